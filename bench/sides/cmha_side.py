"""cmha, as its users write it."""

import numpy as np

import cmha
from cmha.train.adamw import clip_factor, grad_norm, parameter_groups


def start(threads):
    cmha.set_num_threads(threads)


def versions():
    config = cmha.show_config()
    return {"cmha": f"{config['cmha']} ({config['simd']})"}


def to_numpy(t):
    return np.array(t if isinstance(t, np.ndarray) else t.detach().numpy())


def _tensors(data, *names, grad=False):
    return [cmha.tensor(data[name], requires_grad=grad) for name in names]


def _forward_backward(function, leaves, dy):
    """run() -> (y, gradient of each leaf)"""

    def run():
        for leaf in leaves:
            leaf.grad = None
        y = function(*leaves)
        y.backward(dy)
        return y, *(leaf.grad for leaf in leaves)

    return run


def matmul(data, s):
    a, b = _tensors(data, "a", "b")
    if s["form"] == "nt":
        return lambda: (a @ b.T,)
    if s["form"] == "tn":
        return lambda: (a.T @ b,)
    return lambda: (a @ b,)


def softmax(data, s):
    (x,) = _tensors(data, "x")
    return lambda: (x.softmax(-1),)


def softmax_backward(data, s):
    return _forward_backward(lambda x: x.softmax(-1), _tensors(data, "x", grad=True), *_tensors(data, "dy"))


def gelu(data, s):
    (x,) = _tensors(data, "x")
    return lambda: (x.gelu(),)


def gelu_backward(data, s):
    return _forward_backward(lambda x: x.gelu(), _tensors(data, "x", grad=True), *_tensors(data, "dy"))


def _layer_norm(data):
    layer = cmha.nn.LayerNorm(len(data["gamma"]))
    layer.load_state_dict({"weight": data["gamma"], "bias": data["beta"]})
    return layer


def layer_norm(data, s):
    layer, (x,) = _layer_norm(data), _tensors(data, "x")

    def run():
        with cmha.no_grad():
            return (layer(x),)

    return run


def layer_norm_backward(data, s):
    layer = _layer_norm(data)
    leaves = [*_tensors(data, "x", grad=True), layer.weight, layer.bias]
    return _forward_backward(lambda x, *_: layer(x), leaves, *_tensors(data, "dy"))


def cross_entropy(data, s):
    (x,), (targets,) = _tensors(data, "x", grad=True), _tensors(data, "targets")

    def run():
        x.grad = None
        loss = cmha.cross_entropy(x, targets)
        loss.backward()
        return loss, x.grad

    return run


def adamw(data, s):
    params = [cmha.tensor(p, requires_grad=True) for p in data["p"]]
    for p, g in zip(params, data["g"], strict=True):
        p.grad = cmha.tensor(g)
    opt = cmha.AdamW(params, 1e-3, betas=(0.9, 0.99), weight_decay=0.1)

    def check():
        opt.step()
        return (params,)

    return opt.step, check


def attention(data, s):
    q, k, v = _tensors(data, "q", "k", "v")
    return lambda: (cmha.scaled_dot_product_attention(q, k, v, is_causal=True),)


def attention_backward(data, s):
    def function(q, k, v):
        return cmha.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _forward_backward(function, _tensors(data, "q", "k", "v", grad=True), *_tensors(data, "dy"))


def _mha(data, s):
    layer = cmha.MultiHeadAttention(s["D"], s["H"])
    layer.load_state_dict({name: a for name, a in data.items() if name.startswith("c_")})
    return layer


def mha(data, s):
    layer, (x,) = _mha(data, s), _tensors(data, "x")

    def run():
        with cmha.no_grad():
            return (layer(x, is_causal=True),)

    return run


def mha_backward(data, s):
    layer = _mha(data, s)
    parameters = dict(layer.named_parameters())
    leaves = [*_tensors(data, "x", grad=True), *(parameters[name] for name in sorted(parameters))]
    run = _forward_backward(lambda x, *_: layer(x, is_causal=True), leaves, *_tensors(data, "dy"))

    def check():
        y, dx, *gradients = run()
        return y, dx, gradients

    return run, check


def _gpt(data, s):
    cfg = cmha.GPTConfig(vocab_size=s["V"], block_size=s["block"], n_layer=s["L"], n_head=s["H"], n_embd=s["D"])
    model = cmha.GPT(cfg)
    model.load_state_dict({name: a for name, a in data.items() if name not in ("ids", "targets")})
    return model


def train(data, s):
    """The step of `cmha train`: forward, backward, the gradient's norm, AdamW with the clip factor."""
    model, ids, targets = _gpt(data, s), data["ids"], data["targets"]
    opt = cmha.AdamW(parameter_groups(model, 0.1), 1e-3, betas=(0.9, 0.99))
    named = list(model.named_parameters())

    def gradients():
        opt.zero_grad()
        _, loss = model(ids, targets)
        loss.backward()
        return loss

    def update():
        norm, _ = grad_norm(named)
        opt.step(grad_scale=clip_factor(norm, 1.0))

    def run():
        loss = gradients()
        update()
        return (loss,)

    def check():
        loss = gradients()
        found = [p.grad for _, p in sorted(named)]
        update()
        return loss, found, run()[0]

    return run, check


def decode(data, s):
    model, ids = _gpt(data, s).eval(), data["ids"]
    cache = model.new_cache(1)
    model(ids[:, :-1], cache=cache)

    def run():
        logits = model(ids[:, -1:], cache=cache)
        cache.truncate(s["T"] - 1)
        return (logits,)

    return run


def generate(data, s):
    model, ids = _gpt(data, s).eval(), data["ids"]
    return lambda: (model.generate(ids, s["new"], temperature=0),)


def prefill(data, s):
    model, ids = _gpt(data, s).eval(), data["ids"]
    return lambda: (model.last_logits(ids, cache=model.new_cache(1, s["T"])),)


OPS = {
    f.__name__: f
    for f in (
        matmul, softmax, softmax_backward, gelu, gelu_backward, layer_norm, layer_norm_backward, cross_entropy, adamw,
        attention, attention_backward, mha, mha_backward, train, decode, generate, prefill,
    )
}  # fmt: skip

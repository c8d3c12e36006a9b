"""PyTorch, as its users write it for speed: fused AdamW, its flash attention, one product for q, k and v.

CMHA_BENCH_TORCH=compile puts torch.compile around modules and training losses; =bfloat16 trains under autocast.
"""

import os

import torch
import torch.nn.functional as F

from sides.torch_gpt import GPT, SelfAttention

MODE = os.environ.get("CMHA_BENCH_TORCH", "")


def start(threads):
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def versions():
    blas = "MKL" if torch.backends.mkl.is_available() else "no MKL"
    return {"PyTorch": f"{torch.__version__} ({blas}, {torch.backends.cpu.get_cpu_capability()})"}


def to_numpy(t):
    return t.detach().float().numpy().copy()


def compiled(function):
    return torch.compile(function) if MODE == "compile" else function


def _tensors(data, *names, grad=False):
    return [torch.tensor(data[name], requires_grad=grad) for name in names]


def _forward_backward(function, leaves, dy):
    """run() -> (y, gradient of each leaf)"""

    def run():
        y = function(*leaves)
        return y, *torch.autograd.grad(y, leaves, dy)

    return run


def _forward(function, *arguments):
    def run():
        with torch.inference_mode():
            return (function(*arguments),)

    return run


def matmul(data, s):
    a, b = _tensors(data, "a", "b")
    return _forward(torch.mm, a.T if s["form"] == "tn" else a, b.T if s["form"] == "nt" else b)


def _softmax(x):
    return F.softmax(x, -1)


def softmax(data, s):
    return _forward(_softmax, *_tensors(data, "x"))


def softmax_backward(data, s):
    return _forward_backward(_softmax, _tensors(data, "x", grad=True), *_tensors(data, "dy"))


def _gelu(x):
    return F.gelu(x, approximate="tanh")


def gelu(data, s):
    return _forward(_gelu, *_tensors(data, "x"))


def gelu_backward(data, s):
    return _forward_backward(_gelu, _tensors(data, "x", grad=True), *_tensors(data, "dy"))


def _layer_norm(x, gamma, beta):
    return F.layer_norm(x, gamma.shape, gamma, beta, 1e-5)


def layer_norm(data, s):
    return _forward(_layer_norm, *_tensors(data, "x", "gamma", "beta"))


def layer_norm_backward(data, s):
    return _forward_backward(_layer_norm, _tensors(data, "x", "gamma", "beta", grad=True), *_tensors(data, "dy"))


def cross_entropy(data, s):
    (x,), (targets,) = _tensors(data, "x", grad=True), _tensors(data, "targets")

    def run():
        loss = F.cross_entropy(x, targets)
        return loss, *torch.autograd.grad(loss, x)

    return run


def adamw(data, s):
    params = [torch.tensor(p, requires_grad=True) for p in data["p"]]
    for p, g in zip(params, data["g"], strict=True):
        p.grad = torch.tensor(g)
    opt = torch.optim.AdamW(params, 1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)

    def check():
        opt.step()
        return (params,)

    return opt.step, check


def _attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(data, s):
    return _forward(_attend, *_tensors(data, "q", "k", "v"))


def attention_backward(data, s):
    return _forward_backward(_attend, _tensors(data, "q", "k", "v", grad=True), *_tensors(data, "dy"))


def _mha(data, s):
    layer = SelfAttention(s["D"], s["H"])
    layer.load_weights({name: torch.tensor(a) for name, a in data.items() if name.startswith("c_")})
    return layer


def mha(data, s):
    return _forward(compiled(_mha(data, s)), *_tensors(data, "x"))


def mha_backward(data, s):
    layer = _mha(data, s)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    function = compiled(layer)
    leaves = [*_tensors(data, "x", grad=True), *parameters]
    run = _forward_backward(lambda x, *_: function(x), leaves, *_tensors(data, "dy"))

    def check():
        y, dx, *gradients = run()
        found = SelfAttention.our_names(dict(zip(names, gradients, strict=True)))
        return y, dx, [found[name] for name in sorted(found)]

    return run, check


def _gpt(data, s):
    model = GPT(s["V"], s["block"], s["L"], s["H"], s["D"])
    model.load_weights({name: torch.tensor(a) for name, a in data.items() if name not in ("ids", "targets")})
    return model


def train(data, s):
    model, (ids, targets) = _gpt(data, s), _tensors(data, "ids", "targets")
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    opt = torch.optim.AdamW(groups, 1e-3, betas=(0.9, 0.99), fused=True)
    loss_of = compiled(lambda: F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()))

    def gradients():
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=MODE == "bfloat16"):
            loss = loss_of()
        loss.backward()
        return loss.detach()

    def update():
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        opt.step()

    def run():
        loss = gradients()
        update()
        return (loss,)

    def check():
        loss = gradients()
        found = model.our_names({name: p.grad.clone() for name, p in model.named_parameters()})
        update()
        return loss, [found[name] for name in sorted(found)], run()[0]

    return run, check


def _past(s, capacity):
    return [torch.empty(2, 1, s["H"], capacity, s["D"] // s["H"]) for _ in range(s["L"])]


def decode(data, s):
    model, (ids,) = _gpt(data, s), _tensors(data, "ids")
    past = _past(s, s["block"])
    with torch.inference_mode():
        model(ids[:, :-1], past, 0)

    def run():
        with torch.inference_mode():
            return (model(ids[:, -1:], past, s["T"] - 1),)

    return run


def prefill(data, s):
    model, (ids,) = _gpt(data, s), _tensors(data, "ids")

    def run():
        with torch.inference_mode():
            return (model(ids, _past(s, s["T"]), last=True),)

    return run


OPS = {
    f.__name__: f
    for f in (
        matmul, softmax, softmax_backward, gelu, gelu_backward, layer_norm, layer_norm_backward, cross_entropy, adamw,
        attention, attention_backward, mha, mha_backward, train, decode, prefill,
    )
}  # fmt: skip

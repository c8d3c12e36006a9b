"""What the rows compute on, and how much of it there is. Every process draws the same random, never zero numbers.

DATA[op](random, sizes) -> {name: array or list of arrays};  WORK[op](sizes) -> [(FLOP, bytes)], one entry per phase
that must follow another. Bytes are those that must move at least once: every input read, every result written.
"""

import hashlib

import numpy as np


def normal(random, *shape, std=1.0):
    x = random.standard_normal(shape, dtype=np.float32)
    x *= np.float32(std)
    return x


def make(op, sizes, seed=1):
    return DATA[op](np.random.Generator(np.random.PCG64(seed)), sizes)


def digest(data):
    """Of the first and last numbers of each array: tells whether two processes drew the same ones."""
    h = hashlib.sha256()
    for name in sorted(data):
        for a in data[name] if isinstance(data[name], list) else [data[name]]:
            h.update(f"{name} {a.shape} {a.dtype}".encode() + a.ravel()[:64].tobytes() + a.ravel()[-64:].tobytes())
    return h.hexdigest()


def _matmul(r, s):
    m, k, n, form = s["m"], s["k"], s["n"], s["form"]
    a = normal(r, *((k, m) if form == "tn" else (m, k)))
    return {"a": a, "b": normal(r, *((n, k) if form == "nt" else (k, n)))}


def _rows(r, s):
    return {"x": normal(r, s["m"], s["n"]), "dy": normal(r, s["m"], s["n"])}


def _layer_norm(r, s):
    return {**_rows(r, s), "gamma": normal(r, s["n"]), "beta": normal(r, s["n"])}


def _cross_entropy(r, s):
    return {"x": normal(r, s["m"], s["n"]), "targets": r.integers(0, s["n"], s["m"])}


def _attention(r, s):
    shape = s["B"], s["H"], s["T"], s["hd"]
    return {name: normal(r, *shape) for name in ("q", "k", "v", "dy")}


def _mha(r, s):
    D, x = s["D"], (s["B"], s["T"], s["D"])
    weights = {f"{part}.weight": normal(r, D, D, std=D**-0.5) for part in ("c_q", "c_k", "c_v", "c_proj")}
    biases = {f"{part}.bias": normal(r, D, std=0.1) for part in ("c_q", "c_k", "c_v", "c_proj")}
    return {"x": normal(r, *x), "dy": normal(r, *x), **weights, **biases}


def gpt_shapes(s):
    """Name -> shape of a GPT-2's parameters; linear weights are (in, out), the output layer is wte."""
    D = s["D"]
    linear = {"attn.c_q": (D, D), "attn.c_k": (D, D), "attn.c_v": (D, D), "attn.c_proj": (D, D),
              "mlp.c_fc": (D, 4 * D), "mlp.c_proj": (4 * D, D)}  # fmt: skip
    shapes = {"wte.weight": (s["V"], D), "wpe.weight": (s["block"], D)}
    for i in range(s["L"]):
        for name, shape in linear.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[1:]}
        shapes |= {f"h.{i}.{name}.{part}": (D,) for name in ("ln_1", "ln_2") for part in ("weight", "bias")}
    return {**shapes, "ln_f.weight": (D,), "ln_f.bias": (D,)}


def parameters(sizes):
    return sum(int(np.prod(shape)) for shape in gpt_shapes(sizes).values())


def _gpt_weights(r, s):
    weights = {}
    for name, shape in gpt_shapes(s).items():
        weights[name] = normal(r, *shape, std=0.02)
        if ".ln_" in f".{name}" and name.endswith("weight"):
            weights[name] += 1
    return weights


def _train(r, s):
    ids = {name: r.integers(0, s["V"], (s["B"], s["T"])) for name in ("ids", "targets")}
    return {**ids, **_gpt_weights(r, s)}


def _adamw(r, s):
    shapes = list(gpt_shapes(s).values())
    return {"p": [normal(r, *shape) for shape in shapes], "g": [normal(r, *shape, std=0.1) for shape in shapes]}


DATA = {
    "matmul": _matmul,
    **dict.fromkeys(("softmax", "softmax_backward", "gelu", "gelu_backward"), _rows),
    **dict.fromkeys(("layer_norm", "layer_norm_backward"), _layer_norm),
    "cross_entropy": _cross_entropy,
    "adamw": _adamw,
    **dict.fromkeys(("attention", "attention_backward"), _attention),
    **dict.fromkeys(("mha", "mha_backward"), _mha),
    **dict.fromkeys(("train", "decode", "generate", "prefill"), _train),
}


def _attention_work(s, matmuls):
    """A causal product over all heads costs 2 hd T^2 / 2; forward has two of them, backward five (the scores again)."""
    elements = s["B"] * s["H"] * s["T"] * s["hd"]
    return elements * s["T"] * matmuls, 4 * elements * (4 if matmuls == 2 else 8)


def _mha_work(s, backward):
    rows, D = s["B"] * s["T"], s["D"]
    attention = s["B"] * s["T"] ** 2 * D * (7 if backward else 2)
    return [
        (
            2 * 4 * rows * D * D * (3 if backward else 1) + attention,
            4 * (4 * D * D + 2 * rows * D) * (2 if backward else 1),
        )
    ]


def _train_work(s):
    """Three products per weight matrix (the output layer is one), attention; AdamW reads p g m v and writes p m v."""
    rows, weights = s["B"] * s["T"], 12 * s["L"] * s["D"] ** 2 + s["V"] * s["D"]
    attention = 7 * s["L"] * s["B"] * s["T"] ** 2 * s["D"]
    return [(6 * rows * weights + attention, 3 * 4 * weights), (0, 7 * 4 * parameters(s))]


def _token_work(s):
    """One position: a product with every weight, which is read once; positions' embeddings are a row."""
    return 2 * (12 * s["L"] * s["D"] ** 2 + s["V"] * s["D"]), 4 * (parameters(s) - s["block"] * s["D"])


def _elementwise(arrays, flops):
    return lambda s: [(flops * s["m"] * s["n"], 4 * arrays * s["m"] * s["n"])]


WORK = {
    "matmul": lambda s: [(2 * s["m"] * s["k"] * s["n"], 4 * (s["m"] * s["k"] + s["k"] * s["n"] + s["m"] * s["n"]))],
    "softmax": _elementwise(2, 0),
    "softmax_backward": _elementwise(4, 0),
    "gelu": _elementwise(2, 0),
    "gelu_backward": _elementwise(4, 0),
    "layer_norm": _elementwise(2, 0),
    "layer_norm_backward": _elementwise(4, 0),
    "cross_entropy": _elementwise(2, 0),
    "adamw": lambda s: [(0, 7 * 4 * parameters(s))],
    "attention": lambda s: [_attention_work(s, 2)],
    "attention_backward": lambda s: [_attention_work(s, 7)],
    "mha": lambda s: _mha_work(s, False),
    "mha_backward": lambda s: _mha_work(s, True),
    "train": _train_work,
    "decode": lambda s: [_token_work(s)],
    "generate": lambda s: [tuple(s["new"] * x for x in _token_work(s))],
    "prefill": lambda s: [(2 * s["T"] * 12 * s["L"] * s["D"] ** 2, _token_work(s)[1])],
}


def training_bytes(s):
    """What must stand at the widest moment of a training step: parameters, gradients, two moments; and per row the
    activations that backward needs: of each layer the residual stream twice, two norms, q k v, the heads' result,
    MLP before and after GELU (16 D), the last norm (2 D), and the logits with their gradient (2 V)."""
    rows = s["B"] * s["T"]
    return 4 * (4 * parameters(s) + rows * ((16 * s["L"] + 2) * s["D"] + 2 * s["V"]))

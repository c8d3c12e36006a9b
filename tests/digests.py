"""SHA-256 of every kernel's output on fixed inputs: the guard of the order of sums.

    python -m tests.digests             what this build computes, as JSON (CMHA_SIMD chooses the instruction set)
    python -m tests.digests --train     the digest of all parameters after three training steps as well
    python -m tests.digests --write     write tests/digests.json

A kernel may become faster; its digest stays. A change that has to move one is written anew with --write, and
CHANGELOG.md says which kernel changed its bits and why. Inputs come from integer arithmetic, so that no version of
NumPy takes part in them. The digest of every instruction set and of every number of threads is the same.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from cmha import _core

FILE = Path(__file__).with_name("digests.json")


def numbers(seed, *shape):
    """splitmix64 of seed and place: 64 bits each."""
    z = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) + np.uint64(seed << 32)
    z = z * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).reshape(shape)


def values(seed, *shape, scale=3.0):
    """float32, uniform on a grid of 2^24 points in [-scale, scale): exact whoever computes them."""
    grid = (numbers(seed, *shape) >> np.uint64(40)).astype(np.int64) - 2**23
    return (grid.astype(np.float32) * np.float32(2.0**-23)) * np.float32(scale)


def integers(seed, n, *shape):
    return (numbers(seed, *shape) % np.uint64(n)).astype(np.int64)


def core(a):
    """An array of the core with memory of its own."""
    return _core.copy(_core.from_buffer(np.ascontiguousarray(a)))


def floats(seed, *shape, scale=3.0):
    return core(values(seed, *shape, scale=scale))


def positive(seed, *shape):
    return core(np.abs(values(seed, *shape)) + np.float32(0.25))


# --- one function per kernel: the arrays whose bits count -----------------------------------------------------------

KERNELS = {}


def kernel(function):
    KERNELS[function.__name__.rstrip("_")] = function
    return function


@kernel
def copy():
    x = floats(1, 7, 11, 19)
    yield x.permute((2, 0, 1)).contiguous()
    yield x[1::2, ::-3, 2:].contiguous()
    yield x[0, 0].expand((5, 19)).contiguous()
    yield core(integers(2, 1000, 13, 37)).permute((1, 0)).contiguous()
    yield _core.less(floats(3, 13, 37), floats(4, 13, 37)).permute((1, 0)).contiguous()


@kernel
def int64_to_float():
    yield _core.to_float(core(integers(1, 2**62, 1037) - 2**61))


@kernel
def bool_to_float():
    yield _core.to_float(_core.less(floats(1, 1037), floats(2, 1037)))


@kernel
def binary():
    for op in (_core.add, _core.subtract, _core.multiply, _core.divide):
        yield op(floats(1, 3, 7, 37), positive(2, 7, 1))
        yield op(floats(3, 1037), positive(4, 1037))


@kernel
def compare():
    for op in (_core.less, _core.less_equal, _core.equal, _core.not_equal):
        yield op(core(integers(1, 5, 7, 37)), core(integers(2, 5, 37)))


@kernel
def where():
    yield _core.where(_core.less(floats(1, 7, 37), floats(2, 37)), floats(3, 7, 1), floats(4, 7, 37))


UNARY = ("exp", "log", "sqrt", "tanh", "sigmoid", "relu", "abs")


def unary_inputs(name):
    if name in ("log", "sqrt"):
        return [positive(1, 1037), core(np.abs(values(2, 333, scale=1e30)) + np.float32(1e-30))]
    return [floats(1, 1037), floats(2, 333, scale=90.0), floats(3, 333, scale=2.0**-20)]


@kernel
def unary():
    for name in UNARY:
        for x in unary_inputs(name):
            yield getattr(_core, f"{name}_forward")(x)
    yield _core.negative_forward(floats(1, 1037))


@kernel
def unary_backward():
    for name in UNARY:
        for x in unary_inputs(name):
            yield getattr(_core, f"{name}_backward")(floats(7, *x.shape), x, getattr(_core, f"{name}_forward")(x))


@kernel
def clip_forward():
    yield _core.clip_forward(floats(1, 1037), -0.75, 1.5)


@kernel
def clip_backward():
    yield _core.clip_backward(floats(2, 1037), floats(1, 1037), -0.75, 1.5)


@kernel
def gelu_forward():
    yield _core.gelu_forward(floats(1, 1037))
    yield _core.gelu_forward(floats(2, 333, scale=30.0))


@kernel
def gelu_backward():
    yield _core.gelu_backward(floats(2, 1037), floats(1, 1037))
    yield _core.gelu_backward(floats(2, 333), floats(1, 333, scale=30.0))


REDUCTIONS = [((1037,), (0,)), ((5, 1037), (1,)), ((1037, 19), (0,)), ((3, 67, 5), (1,)), ((3, 67, 5), (0, 2))]


@kernel
def sum_():
    for i, (shape, axes) in enumerate(REDUCTIONS):
        yield _core.sum(floats(i, *shape), axes)
        yield _core.mean(floats(i, *shape), axes)


@kernel
def var():
    for i, (shape, axes) in enumerate(REDUCTIONS):
        yield _core.var(floats(i, *shape), axes)


@kernel
def extreme():
    for sign in (1, -1):
        yield from _core.extreme(core(integers(1, 50, 5, 37, 3).astype(np.float32)), 1, sign)
        yield from _core.extreme(floats(1, 5, 1037), 1, sign)


@kernel
def extreme_backward():
    _, index = _core.extreme(floats(1, 5, 37, 3), 1, 1)
    yield _core.extreme_backward(floats(2, 5, 3), index, 1, (5, 37, 3))


@kernel
def sum_of_squares():
    for n in (1, 37, 512, 513, 5000):
        yield np.array(_core.sums_of_squares([floats(n, n)])[0])


ROWS = [(3, 1), (7, 37), (2, 512), (3, 1037)]


@kernel
def softmax_forward():
    for M, N in ROWS:
        yield _core.softmax_forward(floats(N, M, N, scale=8.0), 1)


@kernel
def softmax_backward():
    for M, N in ROWS:
        yield _core.softmax_backward(floats(1, M, N), _core.softmax_forward(floats(N, M, N), 1), 1)


@kernel
def log_softmax_forward():
    for M, N in ROWS:
        yield _core.log_softmax_forward(floats(N, M, N, scale=8.0), 1)


@kernel
def log_softmax_backward():
    for M, N in ROWS:
        yield _core.log_softmax_backward(floats(1, M, N), _core.log_softmax_forward(floats(N, M, N), 1), 1)


@kernel
def cross_entropy():
    for M, N in [*ROWS, (1037, 5)]:
        loss, dlogits, count = _core.cross_entropy(floats(N, M, N), core(integers(1, N + 1, M) - 1), -1, True)
        yield from (loss, dlogits, np.array(int(count)))


@kernel
def layer_norm_forward():
    for M, N in ROWS:
        yield from _core.layer_norm_forward(floats(N, M, N), floats(1, N), floats(2, N), 1e-5)
        yield _core.layer_norm_forward(floats(N, M, N), floats(1, N), None, 1e-5)[0]


@kernel
def layer_norm_backward():
    for M, N in [*ROWS, (1037, 5)]:
        x, gamma = floats(N, M, N), floats(1, N)
        stats = _core.layer_norm_forward(x, gamma, None, 1e-5)[1]
        yield from _core.layer_norm_backward(floats(3, M, N), x, stats, gamma)


@kernel
def embedding_forward():
    yield _core.embedding_forward(floats(1, 11, 37), core(integers(2, 11, 5, 7)))


@kernel
def embedding_add_rows():
    yield _core.embedding_add_rows(floats(1, 11, 37), floats(2, 5, 37), core(np.array([9, 0, 4, 10, 3])))


@kernel
def embedding_backward():
    yield _core.embedding_backward(floats(1, 5, 207, 37), core(integers(2, 11, 5, 207)), 11)


@kernel
def dropout():
    yield _core.dropout(floats(1, 1037), 0.3, 2**40 + 7, 5, 3)


PRODUCTS = [((5,), (5,)), ((3, 5), (5, 7)), ((1, 385), (385, 37)), ((33, 801), (801, 1)), ((37, 400), (400, 67)),
            ((2, 3, 7, 9), (3, 9, 19)), ((4, 1), (1, 5))]


@kernel
def matmul():
    for a, b in PRODUCTS:
        yield _core.matmul(floats(1, *a), floats(2, *b))
    yield _core.matmul(floats(1, 401, 37).permute((1, 0)), floats(2, 19, 401).permute((1, 0)))
    yield _core.linear_forward(floats(1, 5, 7, 401), floats(2, 401, 37), floats(3, 37))


@kernel
def matmul_naive():
    for a, b in PRODUCTS:
        yield _core.matmul_naive(floats(1, *a), floats(2, *b))


def attention_calls():
    """q, k, v and options: tails, several blocks of 128 keys, grouped heads, every kind of mask, dropout."""
    def qkv(B, H, T, S, hd, H_kv):
        return floats(1, B, H, T, hd), floats(2, B, H_kv, S, hd), floats(3, B, H_kv, S, hd)

    def mask(*shape):
        return _core.less(floats(4, *shape), _core.full((), 1.5))

    some = np.where(values(5, 7, 19) > 1.5, np.float32("-inf"), values(6, 7, 19))
    yield qkv(2, 3, 7, 19, 5, 3), {"scale": 5**-0.5}
    yield qkv(1, 4, 37, 300, 16, 2), {"scale": 0.25, "is_causal": True}
    yield qkv(2, 2, 7, 19, 17, 1), {"scale": 0.3, "mask": mask(2, 1, 7, 19), "is_causal": True}
    yield qkv(2, 2, 7, 19, 17, 2), {"scale": 0.3, "mask": core(some), "key_mask": mask(2, 19)}
    yield qkv(2, 2, 5, 140, 8, 2), {"scale": 0.3, "lengths": core(np.array([140, 131])), "is_causal": True}
    yield qkv(2, 2, 5, 140, 8, 2), {"scale": 0.3, "dropout_p": 0.3, "seed": 9, "stream": 4, "first_row": 3}


@kernel
def attention_forward():
    for qkv, options in attention_calls():
        yield from _core.attention_forward(*qkv, **options)


@kernel
def attention_weights():
    for (q, k, v), options in attention_calls():
        yield _core.attention_weights(q, k, *_core.attention_forward(q, k, v, **options)[1:], **options)


@kernel
def attention_backward():
    for qkv, options in attention_calls():
        results = _core.attention_forward(*qkv, **options)
        yield from _core.attention_backward(floats(7, *qkv[0].shape), *results, *qkv, **options)


@kernel
def adamw():
    p, m, v = floats(1, 1037), _core.full((1037,), 0.0), _core.full((1037,), 0.0)
    for step in (1, 2, 3):
        _core.adamw([p], [m], [v], [floats(step + 1, 1037)], 0.01, 0.9, 0.999, 1e-8, 0.1, step, 0.5)
        yield from map(_core.copy, (p, m, v))


def digest(arrays):
    """Shapes, types and bytes of the arrays, in order."""
    sha = hashlib.sha256()
    for a in map(np.asarray, arrays):
        sha.update(f"{a.shape} {a.dtype.str}".encode())
        sha.update(np.ascontiguousarray(a).tobytes())
    return sha.hexdigest()


def measure():
    return {name: digest(function()) for name, function in KERNELS.items()}


def train(steps=3, **changes):
    """The digest of all parameters and losses of a small model with dropout, after some steps on fixed ids."""
    import cmha

    config = {"vocab_size": 13, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 12, "dropout": 0.1} | changes
    gpt = cmha.GPT(cmha.GPTConfig(**config))
    gpt.load_state_dict({name: values(i, *t.shape, scale=0.25) for i, (name, t) in enumerate(gpt.state_dict().items())})
    gpt.train()
    cmha.manual_seed(1)
    opt, losses = cmha.AdamW(gpt.parameters(), lr=0.01), []
    for step in range(steps):
        tokens = integers(step, config["vocab_size"], 3, 9)
        _, loss = gpt(tokens[:, :-1], tokens[:, 1:])
        opt.zero_grad()
        loss.backward()
        cmha.clip_grad_norm_(gpt.parameters(), 1.0)
        opt.step()
        losses.append(loss.detach().numpy())
    return digest([*losses, *(p.detach().numpy() for p in gpt.parameters())])


if __name__ == "__main__":
    found = measure() | ({"train": train()} if "--train" in sys.argv else {})
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    FILE.write_text(text, encoding="utf-8") if "--write" in sys.argv else print(text, end="")

"""The one table of public operations. Adding an op adds an entry; test_ops.py, test_errors.py, test_identity.py run it.

    Case(name, call, reference, shapes, kinds, gauge, c)

call works on Tensors and reference on float64 arrays; shapes holds one tuple of argument shapes per example; kinds says
what the arguments are (see `make`). The error bound is c * EPS * gauge(expected, *arguments), element by element. Sizes
that could agree by luck do not: primes, ones, tails of the 16 lanes, more than one block of 512.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import numpy as np

import cmha
from cmha.tensor import make as apply

from . import reference


def op(module, name=None):
    """The differentiable op of that name, for the few that no function of Tensors stands for."""
    return getattr(import_module(f"cmha.ops.{module}"), name or module)


# --- error bounds: the size of what was rounded, per element (N1, N3 ... are their names in docstrings) ---------------

def of_result(y, *x):
    return abs(y)


def of_input(y, x, *_):
    return abs(x)


def exact(y, *x):
    return 0.0


def of_matmul(y, a, b, bias=0.0):
    """N1: sqrt(K) (|A| |B|)."""
    return np.sqrt(a.shape[-1]) * np.matmul(abs(a), abs(b)) + abs(bias)


def of_linear_gelu(y, x, w, b):
    """The GELU of what comes out of a product, whose error a slope of at most 1.13 carries on."""
    return of_matmul(y, x, w, b) + abs(reference.linear(x, w, b))


def of_linear_residual(y, residual, x, w, b):
    return of_matmul(y, x, w, b) + abs(residual)


def of_sum(y, x, axis=None, keepdims=False, divide=False):
    """N11: sqrt(N) times the sum (or the mean) of |x|."""
    n = x.size / max(y.size, 1)
    return np.sqrt(n) * abs(x).sum(axis=axis, keepdims=keepdims) / (n if divide else 1)


def of_softmax(y, x, axis=-1):
    """N3."""
    return (2 + abs(x - x.max(axis=axis, keepdims=True))) * y


def of_log_softmax(y, x, axis=-1):
    """N4: the largest |x| of the row, and the result."""
    return 2 + abs(x).max(axis=axis, keepdims=True) + abs(y)


def of_cross_entropy(y, x, targets):
    return 2 + abs(x).max() + abs(y)


def of_layer_norm(y, x, gamma, beta=0.0):
    """N5: |gamma| (1 + |x-hat|) (1 + |mean| / sigma) + |beta|."""
    mean, sigma = x.mean(axis=-1, keepdims=True), np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    return abs(gamma) * (1 + abs((x - mean) / sigma)) * (1 + abs(mean) / sigma) + abs(beta)


# --- the table ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, eq=False)
class Case:
    name: str
    call: Callable
    reference: Callable
    shapes: list
    kinds: str | tuple = "normal"
    gauge: Callable = exact
    c: float = 0.0
    gradient: bool = True
    large: tuple | None = None      # argument shapes big enough for several threads; None: moves memory only
    covers: tuple = ()              # further names this entry stands for; its own is the first word of `name`

    def inputs(self, shapes, seed=0):
        rng = np.random.default_rng([seed, *map(len, self.name.split())])
        kinds = self.kinds if isinstance(self.kinds, tuple) else (self.kinds,) * len(shapes)
        return [make(kind, shape, rng) for kind, shape in zip(kinds, shapes, strict=True)]

    def names(self):
        return {self.name.split()[0], *self.covers}


def make(kind, shape, rng):
    """An array of this shape: normal, positive, apart (distinct, none within 1e-3 of 0), mask, or `ids N` below N."""
    kind, _, n = kind.partition(" ")
    size = int(np.prod(shape))
    if kind == "mask":
        return rng.random(shape) < 0.6
    if kind == "ids":
        return rng.integers(0, int(n), shape)
    if kind == "targets":                                        # every fourth or so is ignored
        return np.where(rng.random(shape) < 0.25, -1, rng.integers(0, int(n), shape))
    if kind == "apart":
        return ((rng.permutation(size) + 0.5 - size // 2 - 0.25) * (4 / max(size, 1))).reshape(shape).astype(np.float32)
    x = rng.standard_normal(shape)
    return (0.1 + abs(x) if kind == "positive" else x).astype(np.float32)


ONE = [((7,),), ((3, 5),), ((2, 3, 1),), ((1,),), ((),), ((4, 2, 33),), ((2, 0, 3),)]
TWO = [((7,), (7,)), ((3, 5), (3, 5)), ((3, 5), (5,)), ((3, 1), (1, 5)), ((2, 3, 5), (3, 1)), ((1,), (4, 17)),
       ((), (3, 2)), ((2, 1, 1, 7), (3, 5, 1)), ((0, 3), (3,)), ((3, 5), ())]
AXIS = [((3, 5),), ((2, 3, 17),), ((1, 1),), ((5, 1),), ((2, 3, 521),), ((2, 1033),)]
ROWS = [((3, 5),), ((7,),), ((2, 3, 1),), ((4, 2, 33),), ((2, 1027),), ((0, 4),), ((5, 16),)]


def unary(name, function, kinds="normal", c=1.0, gauge=of_result, **options):
    return Case(name, lambda x: getattr(x, name)(), function, ONE, kinds, gauge, c, large=((13, 5003),), **options)


def comparison(name, call, function):
    shapes = [s for s in TWO if s[0] != ()]
    return Case(name, call, function, shapes, gradient=False, large=((5, 13007), (13007,)))


def reduction(name, function, gauge, c, axis, keepdims=False, kinds="normal", gradient=True):
    def call(x):
        return getattr(x, name)(axis=axis, keepdims=keepdims)

    def enough_axes(shape):
        return axis is None or len(shape) > max(np.abs(axis), default=0) if isinstance(axis, tuple) else len(shape) > 1

    title = f"{name} axis={axis}{' keepdims' if keepdims else ''}".replace(", ", ",")
    return Case(title, call, partial(function, axis=axis, keepdims=keepdims), [s for s in AXIS if enough_axes(s[0])],
                kinds, partial(gauge, axis=axis, keepdims=keepdims), c, gradient, large=((5, 13, 1033),))


def of_var(y, x, axis=None, keepdims=False):
    """sqrt(N) times the variance, and the square of what rounding the mean to float32 would move it."""
    return np.sqrt(x.size / max(y.size, 1)) * y + 2.0**-23 * abs(x).max(initial=0) ** 2


def no_rounding(y, x, axis=None, keepdims=False):
    return 0.0


def attention_case(name, shapes, large=None, kinds="normal", make_options=None, **options):
    """Options that are arrays come from make_options(q, k); they take no part in the gradient."""
    def all_options(q, k):
        return {**options, **(make_options(q.shape, k.shape) if make_options else {})}

    def call(q, k, v):
        given = {n: cmha.tensor(o) if isinstance(o, np.ndarray) else o for n, o in all_options(q, k).items()}
        return cmha.scaled_dot_product_attention(q, k, v, **given)

    def expected(q, k, v):
        return reference.attention(q, k, v, **all_options(q, k))[0]

    def gauge(y, q, k, v):
        return reference.attention_gauge(q, k, v, **all_options(q, k))

    return Case(f"scaled_dot_product_attention {name}", call, expected, shapes, kinds, gauge, 4.0,
                large=large or qkv(2, 3, 150, 150, 32))


def bool_mask(q, k):
    return {"mask": np.random.default_rng(5).random((q[-2], k[-2])) < 0.7}


def float_mask(q, k):
    mask = np.random.default_rng(6).standard_normal((q[0], 1, q[-2], k[-2])).astype(np.float32)
    return {"mask": np.where(mask > 1, np.float32("-inf"), mask)}


def qkv(B, H, T, S, hd, H_kv=None):
    return (B, H, T, hd), (B, H_kv or H, S, hd), (B, H_kv or H, S, hd)


def where(a, b):
    return cmha.where(cmha.tensor(checkerboard(np.broadcast_shapes(a.shape, b.shape))), a, b)


def where_reference(a, b):
    return np.where(checkerboard(np.broadcast_shapes(a.shape, b.shape)), a, b)


def checkerboard(shape):
    return (np.indices(shape).sum(axis=0) % 3 == 0) if shape else np.array(True)


def masked_fill(x):
    return x.masked_fill(cmha.tensor(checkerboard(x.shape[-1:])), -2.5)


SITE = {"dropout_p": 0.3, "seed": 2**40 + 7, "stream": 2**33 + 5}


def extra_options(q, k):
    """Row b has a length of its own and a hidden key; dropout on."""
    B, S = q[0], k[2]
    key_mask = np.ones((B, S), bool)
    key_mask[:, 1] = False
    return {"key_mask": key_mask, "lengths": S - np.arange(B), "is_causal": True, "scale": 0.4}


def attention_op(q, k, v):
    options = extra_options(q.shape, k.shape)
    options |= {name: cmha.tensor(options[name]).data for name in ("key_mask", "lengths")}
    return apply(op("attention"), q, k, v, first_row=3, **options, **SITE)


def attention_op_reference(q, k, v):
    """Weight (b, h, t, s) is element ((b*H + h)*T + t)*S + s of the stream, b counted in the global batch."""
    (B, H, T, _), S = q.shape, k.shape[2]
    factors = reference.dropout_factors(B * H * T * S, 0.3, SITE["seed"], SITE["stream"], 3 * H * T * S)
    return reference.attention(q, k, v, dropout=factors.reshape(B, H, T, S), **extra_options(q.shape, k.shape))[0]


def attention_op_gauge(y, q, k, v):
    return reference.attention_gauge(q, k, v, **extra_options(q.shape, k.shape)) / (1 - SITE["dropout_p"])


def merged_attention(q, k, v):
    n_head, n_kv_head = head_counts(q)
    return apply(op("attention", "multi_head_attention"), q, k, v, n_head=n_head, n_kv_head=n_kv_head, scale=0.4,
                 is_causal=True)


def head_counts(q):
    return (4, 2) if q.shape[2] > 4 else (2, 1)


def merged_attention_reference(q, k, v):
    n_head, n_kv = head_counts(q)
    cut = [x.reshape(*x.shape[:2], n, -1).transpose(0, 2, 1, 3) for x, n in ((q, n_head), (k, n_kv), (v, n_kv))]
    return reference.attention(*cut, scale=0.4, is_causal=True)[0].transpose(0, 2, 1, 3).reshape(q.shape)


LINEAR = [((3, 5), (5, 7), (7,)), ((2, 3, 1), (1, 17), (17,)), ((1, 65), (65, 1), (1,)), ((0, 3), (3, 2), (2,)),
          ((2, 0), (0, 3), (3,)), ((5, 401), (401, 33), (33,))]
MATMUL = [((3, 5), (5, 7)), ((1, 17), (17, 1)), ((5,), (5, 3)), ((3, 5), (5,)), ((5,), (5,)), ((2, 3, 5), (2, 5, 7)),
          ((2, 3, 5), (5, 7)), ((3, 1, 2, 5), (4, 5, 3)), ((2, 5, 0), (2, 0, 3)), ((0, 5), (5, 2)), ((7, 5), (5, 0)),
          ((3, 801), (801, 19)), ((33, 31), (31, 37))]
NORM = [((3, 5), (5,), (5,)), ((2, 3, 1), (1,), (1,)), ((7,), (7,), (7,)), ((2, 3, 67), (67,), (67,)),
        ((2, 1031), (1031,), (1031,)), ((0, 5), (5,), (5,))]
ATTENTION = [qkv(1, 1, 1, 1, 1), qkv(2, 3, 5, 5, 7), qkv(1, 2, 3, 131, 4), qkv(2, 1, 7, 5, 17), qkv(1, 4, 3, 5, 2, 2),
             qkv(1, 2, 37, 37, 16), qkv(0, 2, 3, 3, 4), qkv(2, 2, 0, 3, 4), qkv(1, 2, 3, 0, 4)]

CASES = [
    Case("add", lambda a, b: a + b, np.add, TWO, c=0.5, gauge=of_result, large=((5, 13007), (13007,)),
         covers=("__add__", "__radd__")),
    Case("add (the lesson's name)", lambda a, b: a.add(b), np.add, TWO, c=0.5, gauge=of_result),
    Case("subtract", lambda a, b: a - b, np.subtract, TWO, c=0.5, gauge=of_result, large=((5, 13007), (13007,)),
         covers=("__sub__", "__rsub__")),
    Case("multiply", lambda a, b: a * b, np.multiply, TWO, c=0.5, gauge=of_result, large=((5, 13007), (13007,)),
         covers=("__mul__", "__rmul__")),
    Case("divide", lambda a, b: a / b, np.divide, TWO, ("normal", "positive"), c=0.5, gauge=of_result,
         large=((5, 13007), (13007,)), covers=("__truediv__", "__rtruediv__")),
    Case("mul_scalar", lambda x: x.mul_scalar(0.7), lambda x: x * np.float64(np.float32(0.7)), ONE, c=0.5,
         gauge=of_result),
    Case("__neg__", lambda x: -x, np.negative, ONE, covers=("negative",)),
    Case("__pow__ 2", lambda x: x**2, np.square, ONE, c=0.5, gauge=of_result, covers=("power",)),
    Case("__pow__ 3", lambda x: x**3, lambda x: x**3, ONE, c=1.5, gauge=of_result),
    Case("__pow__ -1", lambda x: x**-1, lambda x: 1 / x, ONE, "positive", c=0.5, gauge=of_result),
    Case("__pow__ 0.5", lambda x: x**0.5, np.sqrt, ONE, "positive", c=0.5, gauge=of_result),
    Case("__pow__ 0", lambda x: x**0, lambda x: x**0, ONE),
    comparison("__lt__", lambda a, b: a < b, np.less),
    comparison("__le__", lambda a, b: a <= b, np.less_equal),
    comparison("__gt__", lambda a, b: a > b, np.greater),
    comparison("__ge__", lambda a, b: a >= b, np.greater_equal),
    comparison("__eq__", lambda a, b: a == b, np.equal),
    comparison("__ne__", lambda a, b: a != b, np.not_equal),
    unary("exp", np.exp, c=2.0),
    unary("log", np.log, "positive", c=2.0),
    unary("sqrt", np.sqrt, "positive", c=0.5),
    unary("tanh", np.tanh, c=2.0),
    unary("sigmoid", reference.sigmoid, c=2.0),
    unary("gelu", reference.gelu, c=2.0, gauge=of_input),
    unary("relu", reference.relu, "apart", c=0.0),
    unary("abs", np.abs, "apart", c=0.0, covers=("__abs__",)),
    Case("clip", lambda x: x.clip(-0.7, 0.9), lambda x: np.clip(x, np.float32(-0.7), np.float32(0.9)), ONE, "apart",
         large=((13, 5003),)),
    Case("clip one side", lambda x: x.clip(None, 0.9), lambda x: np.minimum(x, np.float32(0.9)), ONE, "apart"),
    Case("masked_fill", masked_fill, lambda x: reference.masked_fill(x, checkerboard(x.shape[-1:]), -2.5), ONE),
    Case("where", where, where_reference, TWO, large=((5, 13007), (13007,))),

    *[reduction("sum", np.sum, of_sum, 1.0, axis) for axis in (None, 0, 1, -1, (0, 1), (0, -1), (0, 2), ())],
    *[reduction("mean", np.mean, partial(of_sum, divide=True), 1.0, axis) for axis in (None, 0, -1, (1, 2))],
    *[reduction("var", np.var, of_var, 4.0, axis) for axis in (None, 0, -1, (0, 2))],
    *[reduction("max", np.max, no_rounding, 0.0, axis, kinds="apart") for axis in (None, 0, -1)],
    *[reduction("min", np.min, no_rounding, 0.0, axis, kinds="apart") for axis in (None, 0, -1)],
    *[reduction("argmax", np.argmax, no_rounding, 0.0, axis, kinds="apart", gradient=False) for axis in (None, 0, -1)],
    reduction("sum", np.sum, of_sum, 1.0, (0, 2), keepdims=True),
    reduction("mean", np.mean, partial(of_sum, divide=True), 1.0, -1, keepdims=True),
    reduction("max", np.max, no_rounding, 0.0, 1, keepdims=True, kinds="apart"),
    Case("softmax", lambda x: x.softmax(), reference.softmax, ROWS, gauge=of_softmax, c=2.0, large=((37, 1031),)),
    Case("softmax axis=0", lambda x: x.softmax(axis=0), partial(reference.softmax, axis=0), ROWS,
         gauge=partial(of_softmax, axis=0), c=2.0, large=((37, 1031),)),
    Case("softmax_last_dim", lambda x: x.softmax_last_dim(), reference.softmax, ROWS, gauge=of_softmax, c=2.0),
    Case("log_softmax", lambda x: x.log_softmax(), reference.log_softmax, ROWS, gauge=of_log_softmax, c=2.0,
         large=((37, 1031),)),
    Case("cross_entropy", lambda x, t: cmha.cross_entropy(x, t), reference.cross_entropy,
         [((3, 5), (3,)), ((2, 3, 11), (2, 3)), ((1, 7), (1,)), ((7, 1033), (7,))], ("normal", "targets 5"),
         of_cross_entropy, 2.0, large=((67, 1031), (67,))),

    Case("reshape", lambda x: x.reshape(-1, x.shape[0]), lambda x: x.reshape(-1, x.shape[0]),
         [((3, 5),), ((2, 3, 5),), ((7,),), ((1, 1),)]),
    Case("permute", lambda x: x.permute(2, 0, 1), lambda x: x.transpose(2, 0, 1), [((2, 3, 5),), ((1, 7, 2),)]),
    Case("transpose", lambda x: x.transpose(-2, -1), lambda x: x.swapaxes(-2, -1), [((2, 3, 5),), ((3, 5),)],
         covers=("T", "mT")),
    Case("expand", lambda x: x.expand(4, *x.shape), lambda x: np.broadcast_to(x, (4, *x.shape)), [((3, 1),), ((5,),)]),
    Case("contiguous", lambda x: x.permute(1, 0).contiguous(), lambda x: x.T, [((3, 5),), ((17, 33),)]),
    Case("__getitem__", lambda x: x[..., None, 1:3], lambda x: x[..., None, 1:3], [((3, 5),), ((2, 3, 7),)]),
    Case("__getitem__ step", lambda x: x[1, ::-2], lambda x: x[1, ::-2], [((3, 5),), ((2, 7, 3),)]),
    Case("cat", lambda *x: cmha.cat(x, axis=1), lambda *x: np.concatenate(x, axis=1),
         [((2, 3), (2, 5)), ((2, 1, 3), (2, 4, 3), (2, 2, 3)), ((2, 0), (2, 3))]),
    Case("stack", lambda *x: cmha.stack(x, axis=1), lambda *x: np.stack(x, axis=1), [((2, 3), (2, 3)), ((5,), (5,))]),
    Case("split", lambda x: cmha.split(x, 2, axis=1)[1], lambda x: x[:, 2:4], [((3, 5),), ((2, 4, 3),)]),
    Case("detach", lambda x: x.detach(), np.positive, ONE, gradient=False, covers=("float",)),

    Case("matmul", lambda a, b: a @ b, np.matmul, MATMUL, gauge=of_matmul, c=1.0, large=((3, 67, 101), (101, 131)),
         covers=("__matmul__", "__rmatmul__")),
    Case("linear", lambda x, w, b: apply(op("linear"), x, w, b), reference.linear, LINEAR, gauge=of_matmul, c=1.0,
         large=((131, 101), (101, 149), (149,))),
    Case("linear_gelu", lambda x, w, b: apply(op("linear", "linear_gelu"), x, w, b),
         lambda x, w, b: reference.gelu(reference.linear(x, w, b)), LINEAR, gauge=of_linear_gelu, c=2.0,
         large=((131, 101), (101, 149), (149,))),
    Case("linear_residual", lambda r, x, w, b: apply(op("linear", "linear_residual"), r, x, w, b),
         lambda r, x, w, b: r + reference.linear(x, w, b), [((*x[:-1], w[1]), x, w, b) for x, w, b in LINEAR],
         gauge=of_linear_residual, c=1.0, large=((131, 149), (131, 101), (101, 149), (149,))),
    Case("layer_norm", lambda x, g, b: apply(op("layer_norm"), x, g, b), reference.layer_norm, NORM,
         gauge=of_layer_norm, c=4.0, large=((67, 1031), (1031,), (1031,))),
    Case("embedding", lambda w, i: apply(op("embedding"), w, i), reference.embedding,
         [((11, 5), (2, 3)), ((11, 1), (7,)), ((11, 17), (1, 1)), ((11, 3), (0, 2))], ("normal", "ids 11"),
         large=((11, 1031), (5, 37)), covers=("Embedding",)),
    Case("dropout", lambda x: apply(op("dropout"), x, p=0.3, seed=2**40 + 7, stream=2**33 + 5, first=3),
         lambda x: reference.dropout(x, 0.3, 2**40 + 7, 2**33 + 5, 3), ONE, c=1.0, gauge=of_result,
         large=((13, 5003),)),
    attention_case("", ATTENTION),
    attention_case("is_causal", ATTENTION, is_causal=True),
    attention_case("mask=bool", [qkv(2, 3, 5, 5, 7), qkv(1, 4, 3, 150, 2, 2)], make_options=bool_mask),
    attention_case("mask=float is_causal", [qkv(2, 3, 5, 5, 7), qkv(1, 2, 3, 11, 3)], make_options=float_mask,
                   is_causal=True),
    attention_case("scale", [qkv(2, 3, 5, 4, 7)], scale=0.3),
    Case("attention with every option", attention_op, attention_op_reference,
         [qkv(2, 4, 5, 7, 3, 2), qkv(2, 2, 3, 140, 4)], gauge=attention_op_gauge, c=4.0,
         large=qkv(2, 4, 70, 150, 16, 2)),
    Case("multi_head_attention", merged_attention, merged_attention_reference,
         [((2, 5, 12), (2, 7, 6), (2, 7, 6)), ((1, 3, 4), (1, 131, 2), (1, 131, 2))],
         gauge=lambda y, *x: 30 * np.abs(x[2]).max(), c=4.0, large=((2, 150, 64), (2, 150, 32), (2, 150, 32))),
]

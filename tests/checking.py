"""How a result is judged: element by element against float64, bit by bit against itself, gradients along directions."""

import hashlib
import os
import sys

import numpy as np
import pytest

import cmha

EPS = 2.0**-23
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # a build that is checked needs several times the memory
TINY = 2.0**-126
needs_posix = pytest.mark.skipif(os.name != "posix", reason="Windows has no such signals, links, pipes or locks")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such file or limit")


def floats(*arrays):
    """float64 copies of the float arrays, the rest as it is."""
    return [a.astype(np.float64) if a.dtype == np.float32 else a for a in arrays]


def counting(*shape):
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def array(x):
    """The NumPy copy of a tensor, an array of the core, or an array."""
    return np.array(x.detach().numpy() if isinstance(x, cmha.Tensor) else x)


def check(got, expected, gauge, c):
    """|got - expected| <= c * EPS * gauge + 2^-126 for every element; NaN only where NaN is expected."""
    got, expected = array(got), np.asarray(expected)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    if got.size == 0:
        return
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - expected)
    error = np.where(np.isnan(got) & np.isnan(expected) | (got == expected), 0, error)
    limit = np.broadcast_to(c * EPS * np.asarray(gauge, dtype=np.float64) + TINY, expected.shape)
    bad = ~(error <= limit)
    if bad.any():
        raise AssertionError(report(got, expected, error, limit, bad))


def report(got, expected, error, limit, bad):
    """How many are wrong and the worst of them: index, got, expected, how many times the limit."""
    times = np.where(bad, np.nan_to_num(error / limit, nan=np.inf, posinf=np.inf), -1)
    worst = np.unravel_index(int(np.argmax(times)), times.shape)
    first = np.unravel_index(int(np.argmax(bad)), bad.shape)
    lines = [f"{int(bad.sum())} of {bad.size} elements outside their bound"]
    for title, i in (("worst", worst), ("first", first)):
        place = tuple(int(n) for n in i)
        lines.append(f"  {title} {place}: got {got[i]!r}, expected {expected[i]!r}, {times[i]:.3g} times the limit")
    return "\n".join(lines)


def bits(*arrays):
    """SHA-256 of shapes, types and bytes in logical order."""
    digest = hashlib.sha256()
    for a in map(array, arrays):
        digest.update(f"{a.shape}{a.dtype}".encode())
        digest.update(np.ascontiguousarray(a).tobytes())
    return digest.hexdigest()


def same_bits(a, b):
    """Equal shapes, types and bytes; says where not."""
    a, b = array(a), array(b)
    assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{a.shape} {a.dtype}, expected {b.shape} {b.dtype}"
    if a.tobytes() != b.tobytes():
        pairs = zip(a.ravel(), b.ravel(), strict=True)
        different = [i for i, (x, y) in enumerate(pairs) if x.tobytes() != y.tobytes()]
        first = different[0]
        raise AssertionError(f"{len(different)} of {a.size} elements differ, first at flat index {first}: "
                             f"{a.ravel()[first]!r} and {b.ravel()[first]!r}")


def leaf(a, requires_grad=True):
    """A tensor of this array; floats collect gradients."""
    t = cmha.tensor(a)
    if requires_grad and t.dtype == "float32":
        t.requires_grad = True
    return t


def gradients(call, tensors, dy):
    """The gradient of <dy, call(*tensors)> for each tensor that wants one; the tensors are fresh leaves."""
    y = call(*tensors)
    y.backward(cmha.tensor(dy))
    return [t.grad for t in tensors if t.requires_grad]


def numeric(reference, inputs, wanted, directions, dy, h=1e-5):
    """<dy, (reference(x + h v) - reference(x - h v)) / 2h> in float64, v moving only the inputs that are wanted."""
    inputs = floats(*inputs)
    values = []
    for sign in (1, -1):
        moved = list(inputs)
        for i, v in zip(wanted, directions, strict=True):
            moved[i] = inputs[i] + sign * h * v
        values.append(np.sum(dy * np.asarray(reference(*moved), dtype=np.float64)))
    return (values[0] - values[1]) / (2 * h)


def gradcheck(call, reference, inputs, seed=0, n_directions=3, tensors=None, tolerance=1e-4):
    """Vector-Jacobian products in float32 against differences of the float64 reference, one argument at a time.

        <vjp(dy), v>  ==  <dy, (reference(x + h v) - reference(x - h v)) / 2h>    within tolerance * |vjp(dy)| * |v|
    """
    rng = np.random.default_rng([seed, 77])     # not the draws of any input: dy = x would make x^T dy symmetric
    tensors = [leaf(a) for a in inputs] if tensors is None else tensors
    wanted = [i for i, t in enumerate(tensors) if t.requires_grad]
    shape = np.shape(reference(*floats(*inputs)))
    dy = rng.standard_normal(shape).astype(np.float32)
    for i, gradient in zip(wanted, gradients(call, tensors, dy), strict=True):
        assert gradient is not None, f"argument {i} got no gradient"
        gradient = array(gradient).astype(np.float64)
        assert gradient.shape == inputs[i].shape, f"gradient {gradient.shape} of an argument {inputs[i].shape}"
        for _ in range(n_directions):
            v = rng.standard_normal(gradient.shape)
            got, expected = np.sum(gradient * v), numeric(reference, inputs, [i], [v], dy)
            limit = (tolerance * np.linalg.norm(gradient) + 1e-8 * (1 + np.linalg.norm(dy))) * np.linalg.norm(v)
            assert abs(got - expected) <= limit, (
                f"argument {i}, shape {gradient.shape}: <vjp(dy), v> = {got:.9g}, difference of the reference "
                f"{expected:.9g}, {abs(got - expected) / limit:.3g} times the limit")


# --- one array, many places in memory -------------------------------------------------------------------------------

def permuted(a):
    """Stored with its axes in reverse order, seen in the right one."""
    back = tuple(reversed(range(a.ndim)))
    return cmha.tensor(np.ascontiguousarray(a.transpose(back))).permute(*back)


def sliced(a):
    """Every second element of a larger tensor along each axis, starting at 1."""
    large = np.full([2 * n + 2 for n in a.shape], -77).astype(a.dtype)
    place = tuple(slice(1, 2 * n + 1, 2) for n in a.shape)
    large[place] = a
    return cmha.tensor(large)[place]


def offset(a):
    """Contiguous, three elements into a longer piece of memory."""
    flat = np.concatenate([np.full(3, -77).astype(a.dtype), a.ravel(), np.full(5, -77).astype(a.dtype)])
    return cmha.tensor(flat)[3:3 + a.size].reshape(a.shape)


def expanded(a):
    """The first entry along axis 0 (and along the last) repeated with stride 0: other values, no other rule."""
    place = tuple(slice(0, 1) if i in (0, a.ndim - 1) else slice(None) for i in range(a.ndim))
    return cmha.tensor(np.ascontiguousarray(a[place])).expand(*a.shape)


LAYOUTS = {"permuted": permuted, "sliced": sliced, "offset": offset, "expanded": expanded}


class Rude:
    """Memory that x gives through DLPack, taken as writable whatever its flags say: PyTorch's ways."""

    def __init__(self, x):
        self.polite = np.from_dlpack(x)
        self.__array_interface__ = dict(self.polite.__array_interface__)
        self.__array_interface__["data"] = (self.__array_interface__["data"][0], False)


def rude(x):
    """A writable NumPy view of a tensor; x is lent as long as it lives."""
    return np.asarray(Rude(x))


def ruin(x):
    """Another value in every element."""
    view = rude(x)
    view[...] = ~view if view.dtype == bool else view + 1 if view.dtype == np.int64 else np.nan
    return view

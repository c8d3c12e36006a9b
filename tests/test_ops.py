"""Every public op of the table: its value and its gradient against float64, and the same bits from any layout."""

import numpy as np
import pytest

import cmha
import cmha.ops

from .cases import CASES
from .checking import LAYOUTS, array, bits, check, floats, gradcheck, gradients, leaf, same_bits


def shape_text(shapes):
    return " ".join("x".join(map(str, s)) or "scalar" for s in shapes)


EXAMPLES = [pytest.param(c, shapes, id=f"{c.name}: {shape_text(shapes)}") for c in CASES for shapes in c.shapes]
GRADIENTS = [p for p in EXAMPLES if p.values[0].gradient]
ONE_EACH = [pytest.param(c, next(s for s in c.shapes if all(map(np.prod, s))), id=c.name) for c in CASES]
THREADED = [pytest.param(c, id=c.name) for c in CASES if c.large]

# Public names of Tensor and of the package that are no operation on numbers, or compute nothing of their own.
NOT_OPS = {
    "backward", "data", "dtype", "grad", "is_contiguous", "item", "ndim", "numpy", "requires_grad", "shape", "size",
    "strides", "tolist", "node", "version",
}
SPECIAL = {
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__",
    "__pow__", "__matmul__", "__rmatmul__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__getitem__",
    "__abs__",
}
FUNCTIONS = {"cat", "cross_entropy", "scaled_dot_product_attention", "split", "stack", "where"}


@pytest.mark.parametrize("case, shapes", EXAMPLES)
def test_value(case, shapes):
    inputs = case.inputs(shapes)
    tensors = [leaf(a, requires_grad=False) for a in inputs]
    y = case.call(*tensors)
    expected = np.asarray(case.reference(*floats(*inputs)))
    assert y.shape == expected.shape
    assert str(y.dtype) == {"f": "float32", "b": "bool", "i": "int64"}[expected.dtype.kind]
    if y.size:
        check(y, expected, case.gauge(expected, *floats(*inputs)), case.c)
    assert bits(*tensors) == bits(*inputs), "an input was changed"


@pytest.mark.parametrize("case, shapes", GRADIENTS)
def test_gradient(case, shapes):
    gradcheck(case.call, case.reference, case.inputs(shapes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case, shapes", ONE_EACH)
def test_layout_changes_no_bit(case, shapes, layout):
    """B12: f(view) is f(view.contiguous()) for value and gradients, whatever the view."""
    inputs = case.inputs(shapes)
    views = [LAYOUTS[layout](a).detach() if a.ndim else cmha.tensor(a) for a in inputs]
    packed = [cmha.tensor(array(v)) for v in views]
    for t in views + packed:
        t.requires_grad = case.gradient and t.dtype == "float32"
    y, expected = case.call(*views), case.call(*packed)
    same_bits(y, expected)
    if case.gradient:
        dy = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
        for got, wanted in zip(gradients(case.call, views, dy), gradients(case.call, packed, dy), strict=True):
            same_bits(got, wanted)


@pytest.mark.parametrize("case", THREADED)
def test_threads_change_no_bit(case):
    """D2: large enough that every one of four threads gets a share."""
    inputs, found = case.inputs(case.large), set()
    for n in (1, 2, 3, 4):
        cmha.set_num_threads(n)
        tensors = [leaf(a, case.gradient) for a in inputs]
        y = case.call(*tensors)
        results = [y]
        if case.gradient:
            dy = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
            results += gradients(case.call, tensors, dy)
        found.add(bits(*results))
    assert len(found) == 1


def test_every_public_op_has_a_case():
    covered = set().union(*(c.names() for c in CASES))
    methods = {n for n in vars(cmha.Tensor) if not n.startswith("_")} - NOT_OPS
    specials = {n for n in vars(cmha.Tensor) if n in SPECIAL}
    missing = (methods | specials | FUNCTIONS) - covered
    assert not missing, f"no entry in tests/cases.py for {sorted(missing)}"


OP_NAMES = {"index": "__getitem__"}


def test_every_differentiable_op_has_a_case():
    """What cmha.ops offers, under its own name or that of the Tensor method it stands behind."""
    covered = set().union(*(c.names() for c in CASES))
    missing = [name for name in cmha.ops.__all__ if OP_NAMES.get(name, name) not in covered]
    assert not missing, f"no entry in tests/cases.py for {missing}"


def test_operators_take_numbers_on_either_side():
    x = cmha.tensor([1.0, 2.0, 4.0])
    assert (1 + x).tolist() == (x + 1).tolist() == [2, 3, 5]
    assert (1 - x).tolist() == [0, -1, -3] and (x - 1).tolist() == [0, 1, 3]
    assert (2 * x).tolist() == (x * 2).tolist() == [2, 4, 8]
    assert (4 / x).tolist() == [4, 2, 1] and (x / 2).tolist() == [0.5, 1, 2]
    assert (x > 1).tolist() == [False, True, True] and (1 >= x).tolist() == [True, False, False]


def test_axis_and_dim_mean_the_same():
    """PyTorch's words and NumPy's are both taken."""
    x = cmha.tensor(np.arange(30, dtype=np.float32).reshape(2, 3, 5))
    same_bits(x.sum(axis=1, keepdims=True), x.sum(dim=1, keepdim=True))
    same_bits(x.mean(axis=(0, 2)), x.mean(dim=(0, 2)))
    same_bits(x.max(axis=-1), x.max(dim=-1))
    same_bits(x.softmax(axis=0), x.softmax(dim=0))
    same_bits(x.argmax(axis=0), x.argmax(dim=0))
    same_bits(x.softmax(-1), x.softmax_last_dim())


def test_int_and_bool_count_as_float32_in_arithmetic():
    whole, truth, x = cmha.tensor([1, 2, 3]), cmha.tensor([True, False, True]), cmha.tensor([0.5, 0.5, 0.5])
    for y in (whole + x, whole + whole, truth * x, whole / whole, truth + truth):
        assert str(y.dtype) == "float32"
    assert (whole + x).tolist() == [1.5, 2.5, 3.5] and (truth * whole).tolist() == [1, 0, 3]


def test_the_first_maximum_gets_the_gradient():
    x = leaf(np.array([[1, 3, 3], [2, 2, 2]], dtype=np.float32))
    x.max(axis=1).sum().backward()
    assert x.grad.tolist() == [[0, 1, 0], [1, 0, 0]]
    x = leaf(np.array([[1, 0, 0]], dtype=np.float32))
    x.min().backward()
    assert x.grad.tolist() == [[0, 1, 0]]

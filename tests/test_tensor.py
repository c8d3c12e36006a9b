"""The row-major tensor: strides, views, foreign memory, empty axes, indexing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cmha
from cmha import nn

from . import reference
from .checking import array, check, counting, leaf, same_bits

# --- what splitting heads needs -------------------------------------------------------------------------------------

def test_permute():
    """Permute moves strides, never data."""
    a = counting(2, 3, 4, 5)
    x = cmha.tensor(a)
    y = x.permute(0, 2, 1, 3)
    assert x.strides == (60, 20, 5, 1) and y.shape == (2, 4, 3, 5) and y.strides == (60, 5, 20, 1)
    assert not y.is_contiguous() and y.permute(0, 2, 1, 3).is_contiguous()
    assert np.shares_memory(x.numpy(), y.numpy())
    same_bits(y, a.transpose(0, 2, 1, 3))
    assert x.permute(-1, 0, 1, 2).shape == (5, 2, 3, 4)                                                       # B19
    assert x.permute((0, 2, 1, 3)).shape == y.shape


def test_matmul_3d():
    """A batch of products, one per head; small integers make the result exact."""
    a, b = counting(2, 3, 4) - 11, 7 - counting(2, 4, 5)
    same_bits(cmha.tensor(a) @ cmha.tensor(b), a @ b)
    same_bits(cmha.tensor(a).matmul(cmha.tensor(b)), a @ b)
    k = counting(2, 5, 4)
    same_bits(cmha.tensor(a) @ cmha.tensor(k).transpose(1, 2), a @ k.transpose(0, 2, 1))
    same_bits(cmha.tensor(a) @ cmha.tensor(k).mT, a @ k.transpose(0, 2, 1))


def test_add_broadcasts_a_mask_over_heads():
    scores, mask = counting(6, 3, 5), np.where(counting(3, 5) % 2 == 0, 0, -np.inf).astype(np.float32)
    same_bits(cmha.tensor(scores).add(cmha.tensor(mask)), scores + mask)


@pytest.mark.parametrize("B, T, H, hd", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 5), (2, 3, 4, 1)])
def test_reshape_copies_only_where_strides_leave_no_way(B, T, H, hd):
    """The last reshape of the split copies unless B, T or H is 1; the merge's unless T, H or hd is 1."""
    x = cmha.tensor(counting(B, T, H * hd))
    cut = x.reshape(B, T, H, hd)
    forward = cut.permute(0, 2, 1, 3)
    heads = forward.reshape(B * H, T, hd)
    assert np.shares_memory(x.numpy(), cut.numpy()) and np.shares_memory(x.numpy(), forward.numpy())
    assert np.shares_memory(forward.numpy(), heads.numpy()) == (1 in (B, T, H))
    back = heads.contiguous().reshape(B, H, T, hd).permute(0, 2, 1, 3)
    merged = back.reshape(B, T, H * hd)
    assert np.shares_memory(back.numpy(), merged.numpy()) == (1 in (T, H, hd))
    same_bits(merged, x)


def test_reshape_alone_mixes_heads_into_time():
    """B05: right shape, wrong owner."""
    x = cmha.tensor(counting(1, 2, 4))
    assert nn.split_heads(x, 2).tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert x.reshape(2, 2, 2).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize("T", [1, 2, 5])
@pytest.mark.parametrize("B, H, hd", [(1, 1, 1), (2, 3, 1), (3, 1, 4), (2, 5, 3)])
def test_split_then_merge_is_identity(B, T, H, hd):
    """N13, bit for bit."""
    a = np.random.default_rng(0).standard_normal((B, T, H * hd)).astype(np.float32)
    heads = nn.split_heads(cmha.tensor(a), H)
    same_bits(heads, reference.split_heads(a, H))
    same_bits(nn.merge_heads(heads, H), a)


# --- the NumPy border -----------------------------------------------------------------------------------------------

FOREIGN = {
    "reversed": np.arange(3, dtype=np.float32)[::-1],
    "reversed and stepped": np.arange(12, dtype=np.float32).reshape(3, 4)[::-1, ::2],
    "one row reversed": np.zeros((1, 3, 2), dtype=np.float32)[::-1],
    "broadcast": np.broadcast_to(np.array([1, 2], dtype=np.float32), (4, 2)),
    "fortran": np.asfortranarray(counting(3, 5)),
    "big endian": counting(2, 3).astype(">f4"),
    "unaligned": np.frombuffer(b"\0" + counting(4).tobytes(), dtype=np.float32, offset=1),
    "field of a record": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i1"), ("b", "<f4")])["b"],
    "float64": np.linspace(0, 1, 7), "float16": np.linspace(0, 1, 7, dtype=np.float16),
    "int8": np.array([-3, 4], dtype=np.int8), "big endian int": np.array([-3, 2**40], dtype=">i8"),
    "uint8 stepped": np.arange(9, dtype=np.uint8)[::3], "bool reversed": np.array([True, False, False])[::-1],
    "empty": np.zeros((2, 0, 3)), "scalar": np.float32(2.5), "0-d": np.array(7),
}


@pytest.mark.parametrize("make", [cmha.tensor, cmha.from_numpy], ids=["tensor", "from_numpy"])
@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_layouts(name, make):
    """B20: any stride, order of bytes and alignment means its values."""
    a = np.asarray(FOREIGN[name])
    before = a.copy()
    if a.ndim:
        a = a.view()
        a.flags.writeable = False
    x = make(a)
    wanted = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.bool_}[a.dtype.kind]
    same_bits(x, before.astype(wanted))
    assert (x + 0).shape == a.shape
    assert np.array_equal(a, before)


def test_creation_and_types():
    assert cmha.zeros((2, 3)).tolist() == [[0, 0, 0]] * 2 and cmha.ones(3).tolist() == [1, 1, 1]
    assert cmha.full((2,), 2.5).tolist() == [2.5, 2.5] and cmha.arange(4).tolist() == [0, 1, 2, 3]
    assert cmha.tensor([1, 2]).dtype == "int64" and cmha.tensor([True]).dtype == "bool"
    assert cmha.tensor([1.5, 2]).dtype == "float32" and cmha.tensor(3).shape == ()
    assert cmha.tensor([1, 2]).float().dtype == "float32" and cmha.tensor(2.5).item() == 2.5
    assert isinstance(cmha.tensor([7])[0].item(), int) and isinstance(cmha.tensor([True])[0].item(), bool)
    x = cmha.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    assert (x.shape, x.strides, x.ndim, x.size, x.requires_grad) == ((2, 2), (2, 1), 2, 4, True)
    assert x.T.shape == (2, 2) and x.T.tolist() == [[1, 3], [2, 4]]
    assert cmha.tensor(cmha.tensor([1.0, 2.0])).tolist() == [1, 2]


def test_random_numbers_follow_the_seed():
    cmha.manual_seed(3)
    a, b = cmha.randn(5, 7), cmha.rand(5, 7)
    cmha.manual_seed(3)
    same_bits(cmha.randn(5, 7), a)
    same_bits(cmha.rand(5, 7), b)
    assert 0 <= array(b).min() and array(b).max() < 1
    assert array(cmha.randn(5, 7)).tobytes() != array(a).tobytes()
    large = array(cmha.randn(100, 101)).astype(np.float64)
    assert abs(large.mean()) < 0.05 and abs(large.std() - 1) < 0.03


def test_views_are_read_only():
    x = cmha.tensor([1.0, 2.0])
    for view in (x.numpy(), np.asarray(x), np.asarray(memoryview(x.data))):
        assert not view.flags.writeable and view.tolist() == [1, 2]
        with pytest.raises(ValueError):
            view[0] = 5
    with pytest.raises((ValueError, RuntimeError)):
        leaf(np.ones(2, np.float32)).numpy()
    view = x.numpy()
    del x
    assert view.tolist() == [1, 2]                      # the memory lives as long as the view


def test_writing_through_an_expanded_view_is_impossible():
    """B16."""
    a = cmha.tensor([1.0])
    b = a.expand(4)
    b += 2
    assert b.tolist() == [3, 3, 3, 3] and a.tolist() == [1]
    with pytest.raises(TypeError):
        a.expand(4)[0] = 5
    assert a.tolist() == [1]


def test_truth_and_iteration():
    assert bool(cmha.tensor(1.0)) and not bool(cmha.tensor([0]))
    with pytest.raises((ValueError, TypeError)):
        bool(cmha.tensor([1.0, 2.0]))
    x = cmha.tensor(counting(2, 3))
    assert len(x) == 2
    try:
        rows = list(x)
    except TypeError:
        return                                          # refused is fine; without end or wrong is not
    assert [r.tolist() for r in rows] == [[0, 1, 2], [3, 4, 5]]


def test_what_python_expects_of_a_number():
    loss = cmha.tensor(-2.34567)
    assert f"{loss:.3f}" == "-2.346" and f"{cmha.tensor([7])}" == "7" and f"{cmha.ones(2)}" == repr(cmha.ones(2))
    assert abs(loss).item() == -loss.item() and (+loss).item() == loss.item()
    for other in (None, "a", {}, object()):
        assert (loss == other) is False and (loss != other) is True
        with pytest.raises(TypeError):
            _ = loss < other


def test_sizes_by_array_and_a_huge_step():
    assert cmha.zeros(np.array([2, 3])).shape == cmha.full(np.array([2, 3]), 1).shape == (2, 3)
    x = cmha.arange(5)
    assert x.reshape(np.array([5, 1])).shape == (5, 1)
    for step in (2**70, -(2**70)):
        assert x[::step].tolist() == np.arange(5)[::step].tolist()
        assert x[4:1:step].tolist() == np.arange(5)[4:1:step].tolist()


def test_functions_take_numpy():
    a = counting(2, 3, 4)
    same_bits(nn.split_heads(a, 2), nn.split_heads(cmha.tensor(a), 2))
    same_bits(nn.merge_heads(a, 2), nn.merge_heads(cmha.tensor(a), 2))
    assert [t.shape for t in cmha.split(a, np.int64(2), axis=2)] == [(2, 3, 2)] * 2
    loss = cmha.cross_entropy(a[0], np.array([0, 1, 2]), ignore_index=np.int64(-1))
    same_bits(loss, cmha.cross_entropy(cmha.tensor(a[0]), [0, 1, 2]))


def test_data_and_grad_from_outside():
    x = leaf(counting(2, 3))
    with pytest.raises(AttributeError):
        x.data = np.ones(3)
    x.grad = [[1, 2, 3], [4, 5, 6]]
    assert x.grad.dtype == "float32" and x.grad.tolist() == [[1, 2, 3], [4, 5, 6]]
    (x * 2).sum().backward()
    assert x.grad.tolist() == [[3, 4, 5], [6, 7, 8]]
    with pytest.raises(ValueError):
        x.grad = np.ones(3)
    assert x.grad.tolist() == [[3, 4, 5], [6, 7, 8]]
    x.grad = None
    assert x.grad is None


# --- layouts, empty axes, hard numbers ------------------------------------------------------------------------------

def test_softmax_of_a_transposed_view():
    """B12: logical rows, not stored ones."""
    x = cmha.tensor([[0.0, 1, 3], [2, 2, 2]]).T
    expected = [[0.11920292, 0.88079708], [0.26894142, 0.73105858], [0.73105858, 0.26894142]]
    check(x.softmax(), np.array(expected), 1.0, 2)


def test_matmul_with_nothing_to_sum():
    """B13: zeros, also in memory that held something else."""
    for _ in range(3):
        junk = cmha.full((2, 5, 3), float("nan"))
        del junk
        same_bits(cmha.zeros((2, 5, 0)) @ cmha.zeros((2, 0, 3)), np.zeros((2, 5, 3), np.float32))
    a, b = leaf(np.ones((3, 4), np.float32)), leaf(np.ones((4, 0), np.float32))
    (((a @ b) + 1) ** 2).sum().backward()
    same_bits(a.grad, np.zeros((3, 4), np.float32))
    assert b.grad.shape == (4, 0)
    for left, right in (((0, 5), (5, 2)), ((3, 5), (5, 0)), ((0, 3, 5), (5, 2)), ((2, 0, 5), (2, 5, 3))):
        assert (cmha.zeros(left) @ cmha.zeros(right)).shape == (np.zeros(left) @ np.zeros(right)).shape


def test_reductions_over_an_empty_axis():
    """B14."""
    x = cmha.zeros((2, 0))
    same_bits(x.sum(axis=1), np.zeros(2, np.float32))
    assert x.max(axis=0).shape == (0,) and x.softmax(axis=1).shape == (2, 0)
    assert cmha.zeros((0, 3)).softmax().shape == (0, 3) and cmha.zeros((0, 3)).argmax(axis=1).shape == (0,)
    with np.errstate(invalid="ignore"):
        assert np.isnan(array(x.mean(axis=1))).all()


@pytest.mark.parametrize("row", [3000 + 0.01 * np.arange(8), [50000, 50002, 50004, 50010],
                                 [-7000, -7001, -7003, -7007]])
def test_layer_norm_with_a_large_mean(row):
    """B24: two passes; the variance of these rows in one pass is nonsense."""
    x = np.asarray(row, dtype=np.float32)
    y = nn.LayerNorm(len(x))(cmha.tensor(x[None]))
    expected = reference.layer_norm(x.astype(np.float64)[None], 1.0)
    assert np.abs(array(y) - expected).max() < 1e-3


# --- against NumPy, on whatever hypothesis finds --------------------------------------------------------------------

@st.composite
def views(draw):
    """An array and a chain of views, done on both sides."""
    a = counting(*draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)))
    x = cmha.tensor(a)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["permute", "index", "reshape"]))
        if kind == "permute":
            axes = draw(st.permutations(range(a.ndim)))
            a, x = a.transpose(axes), x.permute(*axes)
        elif kind == "index":
            index = draw(hnp.basic_indices(a.shape, allow_newaxis=a.ndim < 6, allow_ellipsis=True))
            a, x = a[index], x[index]
            a = np.asarray(a)
        else:
            a, x = a.reshape(a.shape[::-1]), x.reshape(a.shape[::-1])
        if a.ndim == 0:
            break
    return a, x


@given(views())
def test_chains_of_views(pair):
    a, x = pair
    assert x.shape == a.shape
    same_bits(x, np.ascontiguousarray(a).reshape(a.shape))
    same_bits(x + 1, a + 1)
    assert x.tolist() == a.tolist()


@given(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=4))
def test_broadcasting(shapes):
    a, b = (counting(*s) + 1 for s in shapes.input_shapes)
    x, y = leaf(a), leaf(b)
    z = x * y
    same_bits(z, a * b)
    z.sum().backward()
    for t, other, value in ((x, b, a), (y, a, b)):
        full = np.broadcast_to(other, z.shape)
        lead = full.ndim - value.ndim
        axes = (*range(lead), *(lead + i for i, n in enumerate(value.shape) if n == 1 and full.shape[lead + i] != 1))
        check(t.grad, full.sum(axis=axes).reshape(value.shape), full.sum() + 1, 1)


def test_memory_is_counted():
    cmha.reset_peak_memory_stats()
    before = cmha.memory_stats()
    x = cmha.zeros(3, 1031)
    during = cmha.memory_stats()
    if during["allocated"] == before["allocated"] == 0:
        pytest.skip("a build for the sanitizers has no pool")
    size = during["allocated"] - before["allocated"]
    assert 4 * 3 * 1031 <= size <= 5 * 3 * 1031  # blocks come in four sizes per power of two
    assert before["peak"] == before["allocated"] and during["peak"] >= during["allocated"]
    del x
    after = cmha.memory_stats()
    assert after["allocated"] == before["allocated"] and after["peak"] >= during["peak"]
    assert after["reserved"] >= after["peak"] - after["allocated"]

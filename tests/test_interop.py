"""Arrays pass to NumPy, PyTorch and JAX and back without copies, and no gradient is silently wrong for it.

PyTorch and JAX are not in the test extra: where they are missing, their tests are skipped.
"""

import gc
import importlib.util
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cmha

from .checking import SANITIZED, array, counting, leaf, rude, same_bits
from .test_docs import blocks

OLD_NUMPY = np.lib.NumpyVersion(np.__version__) < "2.1.0"  # its capsules cannot say that memory is read-only
EACH_DTYPE = [
    np.array([[1.5, -2.0, 0.0], [4.0, 5.0, 6.5]], np.float32), np.array([[1, -(2**40)]]), np.array([True, False]),
]  # fmt: skip
needs_pool = pytest.mark.skipif(SANITIZED, reason="a sanitizer has no pool that counts")
ALSO = [np.float32(2.5), np.array(7), np.array(True), np.zeros((2, 0, 3), np.float32)]


def address(x):
    return np.asarray(x).__array_interface__["data"][0]


# --- the buffer protocol and __array__ ------------------------------------------------------------------------------

@pytest.mark.parametrize("a", EACH_DTYPE, ids=lambda a: a.dtype.name)
def test_memoryview_of_a_tensor(a):
    x = cmha.tensor(a)
    view = memoryview(x)
    assert view.readonly and view.shape == a.shape and view.tolist() == a.tolist() and view.itemsize == a.itemsize
    assert bytes(x) == a.tobytes() and memoryview(x.T).tolist() == a.T.tolist()
    with pytest.raises(TypeError):
        view[(0,) * a.ndim] = 1
    del x
    gc.collect()
    assert view.tolist() == a.tolist()


def test_a_tensor_that_needs_gradients_leaves_only_detached():
    x = cmha.tensor([1.0, 2.0], requires_grad=True)
    for y in (x, x * 2):
        for leave in (memoryview, bytes, np.from_dlpack, cmha.from_dlpack):
            with pytest.raises(BufferError, match=r"needs gradients.*detach\(\) first"):
                leave(y)
        for leave in (np.asarray, np.array, cmha.Tensor.numpy, lambda y: np.asarray(y, np.float64)):
            with pytest.raises(RuntimeError, match=r"needs gradients.*detach\(\) first"):
                leave(y)
        assert memoryview(y.detach()).tolist() == np.from_dlpack(y.detach()).tolist() == y.tolist()


def test_array_with_dtype_and_copy():
    """NumPy 2's rules, whatever NumPy there is."""
    x = cmha.tensor(counting(2, 3))
    assert address(np.asarray(x)) == address(x.__array__()) == address(x.__array__(np.float32, copy=False))
    assert address(x.__array__(copy=True)) != address(x) and x.__array__(copy=True).flags.writeable
    for dtype in (np.float64, np.int64, bool, ">f4", "float16"):
        same_bits(x.__array__(dtype), counting(2, 3).astype(dtype))
        same_bits(np.array(x, dtype), counting(2, 3).astype(dtype))
        with pytest.raises(ValueError, match="needs a copy"):
            x.__array__(dtype, copy=False)
    assert address(np.array(x)) != address(x)
    same_bits(np.stack([x, x]), np.stack([counting(2, 3)] * 2))
    same_bits(np.array([1.0, 2.0, 3.0]) + x.numpy(), counting(2, 3) + np.array([1.0, 2.0, 3.0]))
    if not OLD_NUMPY:
        assert address(np.asarray(x, copy=False)) == address(x)
        with pytest.raises(ValueError):
            np.asarray(x, np.float64, copy=False)


# --- DLPack ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("a", [*EACH_DTYPE, *ALSO], ids=lambda a: f"{a.dtype} {a.shape}")
def test_dlpack_round_trip_moves_nothing(a):
    x = cmha.tensor(a)
    there = np.from_dlpack(x)
    back = cmha.from_dlpack(there)
    for y in (there, back.numpy(), cmha.from_dlpack(x).numpy()):
        same_bits(y, np.asarray(a))
        assert not a.size or address(y) == address(x)


def views(draw, axes):
    """(a NumPy array, the same view of a tensor): slices, permutation, expansion, steps and reversals."""
    shape = draw(st.lists(st.integers(0, 5), min_size=axes, max_size=axes))
    a = counting(*shape)
    x = cmha.tensor(a)
    key = tuple(draw(st.slices(n)) for n in shape)
    order = draw(st.permutations(range(axes)))
    a, x = a[key].transpose(order), x[key].permute(*order)
    if draw(st.booleans()):
        wide = (3, *a.shape)
        a, x = np.broadcast_to(a, wide), x.expand(*wide)
    return a, x


@given(data=st.data(), axes=st.integers(1, 4))
def test_any_view_is_numpys(data, axes):
    """Through the buffer protocol, DLPack of either kind, and back."""
    a, x = views(data.draw, axes)
    same_bits(np.asarray(memoryview(x)), a)
    same_bits(np.from_dlpack(x), a)
    back = cmha.from_dlpack(x)
    same_bits(back, a)
    same_bits(cmha.from_numpy(np.from_dlpack(x)) + 1, a + np.float32(1))
    if a.size and min(x.strides) >= 0:  # backwards: a copy
        assert address(back) == address(x)
        assert [s for s, n in zip(back.strides, a.shape, strict=True) if n > 1] == \
               [s for s, n in zip(x.strides, a.shape, strict=True) if n > 1]  # fmt: skip


def test_capsules_are_of_the_version_that_was_asked_for():
    x = cmha.tensor([1.0, 2.0])
    assert x.__dlpack_device__() == (1, 0)
    for version in (None, (0, 8)):
        assert '"dltensor"' in repr(x.__dlpack__(max_version=version))
    for version in ((1, 0), (1, 1), (2, 0)):
        assert ('"dltensor"' if OLD_NUMPY else '"dltensor_versioned"') in repr(x.__dlpack__(max_version=version))
    assert not np.from_dlpack(x).flags.writeable
    x.__dlpack__(dl_device=(1, 0), copy=False)
    for wrong in ({"stream": 1}, {"dl_device": (2, 0)}, {"dl_device": (1, 1)}):
        with pytest.raises(BufferError, match=r"\[dlpack\].*got"):
            x.__dlpack__(**wrong)
    with pytest.raises(TypeError):
        x.__dlpack__(copy="yes")


@pytest.mark.skipif(OLD_NUMPY, reason="NumPy before 2.1 has no copy=")
def test_a_copy_is_nobodys_but_the_consumers():
    x = cmha.tensor([1.0, 2.0])
    a = np.from_dlpack(x, copy=True)
    a[:] = 7
    assert x.tolist() == [1, 2] and not x.data.shared


class Array:
    """Someone's array."""

    def __init__(self, device=(1, 0), error=None):
        self.device, self.error = device, error

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        raise self.error


def test_a_view_that_runs_backwards_leaves_as_a_copy():
    x = cmha.tensor(counting(4, 3))
    for view, want in ((x[::-1], counting(4, 3)[::-1]), (x[:, ::-1], counting(4, 3)[:, ::-1])):
        taken = np.from_dlpack(view)
        assert min(taken.strides) > 0 and not np.shares_memory(taken, x.numpy())
        same_bits(taken, want)
        with pytest.raises(BufferError, match="runs backwards"):
            view.__dlpack__(copy=False)


@pytest.mark.parametrize("begin", [lambda x: np.from_dlpack(x), lambda x: np.asarray(cmha._core.lend(x.data))])
def test_an_error_on_the_way_ends_a_loan(begin):
    x = cmha.ones(2, 3)
    with pytest.raises(ValueError, match="reshape"):
        begin(x).reshape(7)  # the borrowed view goes while this error is on its way
    assert not x.data.shared


def test_from_dlpack_refuses():
    for a in (np.ones(2), np.ones(2, np.float16), np.ones(2, np.int32), np.ones(2, np.complex64), np.ones(2, np.uint8)):
        with pytest.raises(TypeError, match=rf"\[from_dlpack\] elements must be float32.*{a.dtype}"):
            cmha.from_dlpack(a)
    for x in (3, [1.0], None, "text", np.float32):
        with pytest.raises(TypeError, match=r"\[from_dlpack\]"):
            cmha.from_dlpack(x)
    with pytest.raises(BufferError, match=r"\[from_dlpack\] memory must be the CPU's; got DLPack device \(2, 1\)"):
        cmha.from_dlpack(Array(device=(2, 1)))
    for error in (BufferError("not now"), ValueError("no")):
        with pytest.raises(type(error), match=str(error)):
            cmha.from_dlpack(Array(error=error))
    with pytest.raises(TypeError, match="Array.*bfloat16"):
        cmha.from_dlpack(Array(error=RuntimeError("Unsupported bfloat16")))


def test_memory_that_came_in_read_only_goes_out_read_only():
    a = counting(3)
    a.flags.writeable = False
    x = cmha.from_numpy(a)
    with pytest.raises(BufferError):
        x.__dlpack__()
    if not OLD_NUMPY:
        assert not np.from_dlpack(x).flags.writeable and address(np.from_dlpack(x)) == address(a)
    a = counting(3)
    rude(cmha.from_numpy(a))[0] = 5
    assert a[0] == 5


# --- who lives how long ---------------------------------------------------------------------------------------------

def test_the_producer_lives_as_long_as_the_last_view_and_no_longer():
    a = np.arange(64, dtype=np.float32)
    gone = weakref.ref(a)
    x = cmha.from_dlpack(a)
    y, z = x.reshape(8, 8)[2:].T, np.from_dlpack(x)
    del a, x
    gc.collect()
    assert gone() is not None and y[0, 0].item() == 16
    del y
    gc.collect()
    assert gone() is not None and z[63] == 63
    del z
    gc.collect()
    assert gone() is None


@needs_pool
@pytest.mark.parametrize("leave", [np.from_dlpack, np.asarray, memoryview, rude, cmha.from_dlpack])
def test_the_consumer_outlives_the_tensor(leave):
    gc.collect()
    before = cmha.memory_stats()["allocated"]
    x = cmha.tensor(counting(100, 1000))
    there = leave(x)
    del x
    gc.collect()
    assert cmha.memory_stats()["allocated"] - before >= 400_000
    others = [cmha.zeros(100, 1000) for _ in range(3)]  # take what had been freed too early
    assert np.asarray(there)[99, 999] == 99_999
    del there, others
    gc.collect()
    assert cmha.memory_stats()["allocated"] == before


@needs_pool
def test_a_capsule_that_nobody_took_frees_its_tensor():
    gc.collect()
    before = cmha.memory_stats()["allocated"]
    for options in ({}, {"max_version": (1, 0)}, {"copy": True}):
        x = cmha.tensor(counting(1000))
        capsule = x.__dlpack__(**options)
        del x, capsule
    x = cmha.tensor(counting(1000))
    for _ in range(100):
        x.__dlpack__()
    assert not x.data.shared
    del x
    gc.collect()
    assert cmha.memory_stats()["allocated"] == before


# --- PyTorch --------------------------------------------------------------------------------------------------------

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")


@needs_torch
def test_torch_both_ways_without_a_copy():
    torch = pytest.importorskip("torch")
    for a in (*EACH_DTYPE, np.array(2.5, np.float32), np.zeros((0, 3), np.float32)):
        x = cmha.tensor(a)
        for there in (torch.from_dlpack(x), torch.as_tensor(x)):
            assert there.numpy().tobytes() == a.tobytes() and (not a.size or there.data_ptr() == address(x))
        t = torch.tensor(a)
        back = cmha.from_dlpack(t)
        same_bits(back, a)
        assert not a.size or address(back) == t.data_ptr()
    x = cmha.tensor(counting(2, 3, 4))
    for view in (x.permute(2, 0, 1), x[1, :, 1::2], x[0, 0].expand(5, 4)):
        there = torch.from_dlpack(view)
        same_bits(there.numpy(), array(view))
        assert there.data_ptr() == address(view) and there.stride() == view.strides
    t = torch.arange(24.0).reshape(2, 3, 4).permute(1, 0, 2)[:, :, ::3]
    assert cmha.from_dlpack(t).strides == t.stride() and address(cmha.from_dlpack(t)) == t.data_ptr()
    same_bits(cmha.from_dlpack(t), t.numpy())
    t[0, 0, 0] = 99
    assert cmha.from_dlpack(t)[0, 0, 0].item() == 99
    assert torch.from_dlpack(x, copy=True).data_ptr() != address(x)


@needs_torch
def test_torch_refuses_and_is_refused():
    torch = pytest.importorskip("torch")
    same_bits(torch.from_dlpack(cmha.tensor(counting(3))[::-1]).numpy(), counting(3)[::-1])  # PyTorch would abort
    with pytest.raises(TypeError, match=r"\[tensor\] needs numbers that NumPy can read; got Tensor: .*BFloat16"):
        cmha.tensor(torch.ones(3).bfloat16())
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.complex64):
        with pytest.raises(TypeError, match=rf"\[from_dlpack\] elements must be float32.*{dtype}"):
            cmha.from_dlpack(torch.ones(2, dtype=dtype))
    for t in (torch.ones(2, requires_grad=True), torch.ones(2, 2).to_sparse()):
        with pytest.raises(BufferError):
            cmha.from_dlpack(t)
    x = leaf(counting(2))
    for leave in (torch.from_dlpack, torch.as_tensor, torch.tensor):
        with pytest.raises(BufferError, match="detach"):
            leave(x)


@needs_torch
def test_torch_and_cmha_differentiate_one_chain():
    """Half of a function here, half in PyTorch; the gradients cross on shared memory."""
    torch = pytest.importorskip("torch")
    a = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    x = leaf(a)
    h = x.gelu()
    t = torch.from_dlpack(h.detach()).requires_grad_()
    (t**3).sum().backward()
    h.backward(cmha.from_dlpack(t.grad))
    alone = torch.tensor(a, requires_grad=True)
    (torch.nn.functional.gelu(alone, approximate="tanh") ** 3).sum().backward()
    assert np.allclose(array(x.grad), alone.grad.numpy(), rtol=1e-5, atol=1e-6)


def run_document(library):
    """The blocks of docs/interop.md that need it."""
    text = (Path(__file__).parent.parent / "docs" / "interop.md").read_text(encoding="utf-8")
    (code,) = (code for _, code in blocks(text, "py") if f"import {library}\n" in code)
    namespace = {}
    exec(compile(code, "docs/interop.md", "exec"), namespace)
    return namespace


@needs_torch
def test_the_lines_for_torch():
    names = run_document("torch")
    assert np.allclose(array(names["w"].grad), 2 * np.exp([2.0, 4.0]), rtol=1e-5)


# --- JAX ------------------------------------------------------------------------------------------------------------

@needs_jax
def test_jax_both_ways_without_a_copy():
    jnp = pytest.importorskip("jax.numpy")
    for a in (counting(4, 6), np.array([True, False, True]), np.float32(2.5), np.zeros((0, 3), np.float32)):
        x = cmha.tensor(a)
        there = jnp.from_dlpack(x)
        same_bits(np.asarray(there), np.asarray(a))
        assert not a.size or there.unsafe_buffer_pointer() == address(x)
        j = jnp.array(a)
        back = cmha.from_dlpack(j)
        same_bits(back, np.asarray(a))
        assert not a.size or address(back) == j.unsafe_buffer_pointer()
    x = cmha.tensor(counting(4, 6))
    assert jnp.from_dlpack(x.T).unsafe_buffer_pointer() == address(x)
    same_bits(np.asarray(jnp.from_dlpack(x.T)), counting(4, 6).T)
    assert jnp.asarray(x).unsafe_buffer_pointer() == x.numpy().ctypes.data
    same_bits(np.asarray(jnp.asarray(x[::-1])), counting(4, 6)[::-1])
    same_bits(np.asarray(jnp.from_dlpack(x[:, 1:].contiguous())), counting(4, 6)[:, 1:])
    same_bits(np.asarray(jnp.from_dlpack(cmha.tensor([1, 2, 3]))), np.array([1, 2, 3], np.int32))  # JAX has 32 bits


@needs_jax
def test_the_lines_for_jax():
    assert run_document("jax")["g"].tolist() == [[3, 12], [27, 48]]


@needs_jax
def test_jax_refuses_and_is_refused():
    jnp = pytest.importorskip("jax.numpy")
    for dtype in (jnp.float16, jnp.bfloat16, jnp.int32, jnp.complex64):
        with pytest.raises(TypeError, match=rf"\[from_dlpack\] elements must be float32.*{jnp.dtype(dtype)}"):
            cmha.from_dlpack(jnp.ones(2, dtype))
    for take in (jnp.from_dlpack, jnp.asarray):
        with pytest.raises(BufferError, match="detach"):
            take(leaf(counting(2)))


@needs_jax
def test_jax_and_cmha_differentiate_one_chain():
    jax = pytest.importorskip("jax")
    a = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    x = leaf(a)
    h = x.gelu()
    h.backward(cmha.from_dlpack(jax.grad(lambda t: (t**3).sum())(jax.numpy.from_dlpack(h.detach()))))
    alone = jax.grad(lambda t: (jax.nn.gelu(t, approximate=True) ** 3).sum())(a)
    assert np.allclose(array(x.grad), np.asarray(alone), rtol=1e-5, atol=1e-6)
    j = jax.numpy.arange(3.0)
    x = cmha.from_dlpack(j)
    x.requires_grad = True
    loss = (x * x).sum()
    del j
    gc.collect()
    loss.backward()
    assert x.grad.tolist() == [0, 2, 4]

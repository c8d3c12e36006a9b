"""Functions on tensors: making them, joining them, and the ops that are no method."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, SupportsIndex, overload

import numpy as np

from cmha import _core, ops, random
from cmha.autograd import lasting
from cmha.errors import as_number, check_flag, check_indices, check_integer, check_number, message, quote
from cmha.foreign import numpy_array, one_of, read_axis, read_sizes
from cmha.interchange import CPU
from cmha.tensor import Tensor, make, to_tensor

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import ArrayLike, Dtype, NumPyArray, Sizes, SupportsDLPack, WantedWeights

INT64 = (-(1 << 63), (1 << 63) - 1)


def tensor(data: ArrayLike, requires_grad: bool = False) -> Tensor:
    """A copy of `data` (a number, nested lists, an array, a tensor): floats become float32, integers int64, bools stay
    bool.

    TypeError: complex numbers, text, objects, dates. ValueError: lists that are not rectangular, integers beyond int64.

    >>> cmha.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensor([[1., 2.],
            [3., 4.]], shape=(2, 2))
    """
    return Tensor(_core.copy(data.data) if isinstance(data, Tensor) else to_tensor(data).data, requires_grad)


def from_numpy(array: NumPyArray, requires_grad: bool = False) -> Tensor:
    """On the array's own memory where it is float32, int64 or bool, native and aligned; else a copy.

    The memory is marked as shared: what backward needs later is copied, so writing to the array changes no gradient.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"[from_numpy] needs a NumPy array; got {type(array).__name__}")
    return Tensor(_core.from_buffer(numpy_array(array, "from_numpy")), requires_grad)


def from_dlpack(x: SupportsDLPack) -> Tensor:
    """On the memory of any array that speaks DLPack (PyTorch, JAX, NumPy, ...): float32, int64 or bool, on the CPU.

    No copy is made; the memory is held until the last view of it is gone, and marked as shared (see from_numpy).
    TypeError: another dtype; cast it there, or copy with cmha.tensor(x). BufferError: another device, or x refuses, as
    PyTorch's tensors do that need gradients.
    """
    op = "from_dlpack"
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise TypeError(f"[{op}] needs an array with __dlpack__ and __dlpack_device__; got {type(x).__name__}")
    device = tuple(int(n) for n in x.__dlpack_device__())
    if device != CPU:
        raise BufferError(f"[{op}] memory must be the CPU's; got DLPack device {device}, expected {CPU}")
    rule = f"[{op}] elements must be float32, int64 or bool; got {quote(str(getattr(x, 'dtype', type(x).__name__)))}"
    try:
        array = x if isinstance(x, np.ndarray) else np.from_dlpack(x)  # NumPy before 2.1 refuses its own read-only ones
    except BufferError:
        raise
    except (RuntimeError, TypeError) as error:  # what NumPy has no dtype for
        raise TypeError(f"{rule}: {error}") from None
    if array.dtype not in (np.float32, np.int64, np.bool_):
        raise TypeError(rule)
    return Tensor(_core.from_buffer(numpy_array(array, op)))


def zeros(*shape: Sizes, requires_grad: bool = False) -> Tensor:
    """Zeros, float32: zeros(2, 3) or zeros((2, 3))."""
    return Tensor(_core.full(read_sizes(shape), 0.0, op="zeros"), requires_grad)


def ones(*shape: Sizes, requires_grad: bool = False) -> Tensor:
    """Ones, float32: ones(2, 3) or ones((2, 3))."""
    return Tensor(_core.full(read_sizes(shape), 1.0, op="ones"), requires_grad)


def full(shape: Sizes, value: float, requires_grad: bool = False) -> Tensor:
    """A tensor of this shape full of value: a bool makes a bool tensor, an int an int64 one, a float float32."""
    dtype: Dtype = (
        "bool" if isinstance(value, bool | np.bool_) else "int64" if isinstance(value, int | np.integer) else "float32"
    )
    if dtype == "float32":
        value = as_number("full", "value", value)
    elif dtype == "int64" and not INT64[0] <= value <= INT64[1]:
        raise ValueError(f"[full] integers must fit int64; got {quote(value)}")
    return Tensor(_core.full(read_sizes((shape,)), value, dtype), requires_grad)


def arange(*bounds: float) -> Tensor:
    """arange(stop), arange(start, stop), arange(start, stop, step), stop not included: int64, or float32 if a bound is
    a float.

    ValueError: a step of 0, a bound that is no finite number.

    >>> cmha.arange(2, 6, 2).tolist()
    [2, 4]
    """
    try:
        return to_tensor(np.arange(*bounds), "arange")
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        raise ValueError(f"[arange] needs one to three finite numbers, the third not 0; got {quote(bounds)}") from None


def randn(*shape: Sizes, requires_grad: bool = False) -> Tensor:
    """Standard normal numbers, float32, in the order of the calls since manual_seed (Philox, Salmon et al. 2011)."""
    if random.draws_nothing():
        return zeros(*shape, requires_grad=requires_grad)
    sizes = _core.empty(read_sizes(shape), op="randn").shape  # checks the sizes
    return Tensor(to_tensor(random.generator().standard_normal(sizes, dtype=np.float32)).data, requires_grad)


def rand(*shape: Sizes, requires_grad: bool = False) -> Tensor:
    """Uniform numbers in [0, 1), float32, in the order of the calls since manual_seed (Philox, Salmon et al. 2011)."""
    if random.draws_nothing():
        return zeros(*shape, requires_grad=requires_grad)
    sizes = _core.empty(read_sizes(shape), op="rand").shape
    return Tensor(to_tensor(random.generator().random(sizes, dtype=np.float32)).data, requires_grad)


def where(condition: ArrayLike, a: ArrayLike, b: ArrayLike) -> Tensor:
    """a where condition (bool) is True, else b, as float32; all three broadcast.

    TypeError: a condition that is not bool. ValueError: shapes that do not broadcast.

    >>> cmha.where([True, False], [1.0, 2.0], 0).tolist()
    [1.0, 0.0]
    """
    condition = to_tensor(condition, "where")
    if condition.dtype != "bool":
        raise TypeError(f"[where] condition must be bool; got {condition.dtype}")
    return make(ops.where, condition, to_tensor(a, "where").float(), to_tensor(b, "where").float())


def _tensors(op: str, tensors: Iterable[ArrayLike]) -> list[Tensor]:
    try:
        found = [to_tensor(t, op) for t in iter(tensors)]
    except TypeError as error:
        if str(error).startswith("["):
            raise
        raise TypeError(f"[{op}] needs a list of tensors; got {type(tensors).__name__}") from None
    if not found:
        raise ValueError(f"[{op}] needs at least one tensor; got none")
    return found


def cat(tensors: Iterable[ArrayLike], axis: SupportsIndex | None = None, *, dim: SupportsIndex | None = None) -> Tensor:
    """Join along an axis (the first by default) that all have; the other sizes must agree, or it is a ValueError.

    Of tensors of several dtypes the result is float32.

    >>> cmha.cat([cmha.zeros(2, 1), cmha.ones(2, 2)], axis=1).tolist()
    [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """
    tensors = _tensors("cat", tensors)
    axis = read_axis("cat", one_of("cat", "axis", axis, "dim", dim, 0), tensors[0].ndim)
    shapes = [t.shape for t in tensors]
    if any(
        len(s) != len(shapes[0]) or s[:axis] + s[axis + 1 :] != shapes[0][:axis] + shapes[0][axis + 1 :] for s in shapes
    ):
        raise ValueError(f"[cat] all sizes but axis {axis} must be equal; got {', '.join(map(str, shapes[:10]))}")
    if len({t.dtype for t in tensors}) > 1:
        tensors = [t.float() for t in tensors]
    return make(ops.cat, *tensors, axis=axis)


def stack(
    tensors: Iterable[ArrayLike], axis: SupportsIndex | None = None, *, dim: SupportsIndex | None = None
) -> Tensor:
    """Join along a new axis (in front by default). ValueError: shapes that differ.

    >>> cmha.stack([cmha.zeros(3), cmha.ones(3)]).shape
    (2, 3)
    """
    tensors = _tensors("stack", tensors)
    if len({t.shape for t in tensors}) != 1:
        raise ValueError(f"[stack] all shapes must be equal; got {', '.join(str(t.shape) for t in tensors[:10])}")
    axis = read_axis("stack", one_of("stack", "axis", axis, "dim", dim, 0), tensors[0].ndim + 1)
    return cat([t.reshape(*t.shape[:axis], 1, *t.shape[axis:]) for t in tensors], axis)


def split(
    x: ArrayLike, size: int | Sequence[int], axis: SupportsIndex | None = None, *, dim: SupportsIndex | None = None
) -> list[Tensor]:
    """A list of views of `size` elements along the axis (the first by default), the last one shorter if need be; or of
    the sizes in a list, which must add up to the axis.

    >>> [part.tolist() for part in cmha.split(cmha.arange(5), 2)]
    [[0, 1], [2, 3], [4]]
    """
    x = to_tensor(x, "split")
    axis = read_axis("split", one_of("split", "axis", axis, "dim", dim, 0), x.ndim)
    n = x.shape[axis]
    if isinstance(size, list | tuple):
        sizes = [check_integer("split", "each size", s, 0) for s in size]
        if sum(sizes) != n:
            raise ValueError(f"[split] sizes must add up to {n}; got {quote(sizes)}")
    else:
        size = check_integer("split", "size", size, 1)
        sizes = [min(size, n - i) for i in range(0, n, size)] or [0]
    out, start = [], 0
    for s in sizes:
        out.append(x[(slice(None),) * axis + (slice(start, start + s),)])
        start += s
    return out


def cross_entropy(logits: ArrayLike, targets: ArrayLike, ignore_index: int = -1) -> Tensor:
    """Mean over the counted rows of -log softmax(x)_target = log sum_j exp(x_j) - x_target, in nats.

    logits (..., V), targets (...) integers. Rows whose target is ignore_index do not count; if none counts the loss is
    0 with zero gradients. IndexError: a target outside 0 .. V - 1. TypeError: targets that are no integers.

    >>> round(cmha.cross_entropy([[0.0, 0.0]], [1]).item(), 4)
    0.6931
    """
    ignore_index = check_integer("cross_entropy", "ignore_index", ignore_index, *INT64)
    logits, targets = to_tensor(logits, "cross_entropy"), to_tensor(targets, "cross_entropy")
    if targets.dtype != "int64":
        raise TypeError(f"[cross_entropy] targets must be integers; got {targets.dtype}")
    if logits.ndim < 1 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"[cross_entropy] needs logits (..., V) and targets (...); got {logits.shape}, {targets.shape}"
        )
    rows = logits.float() if logits.ndim == 2 else logits.float().reshape(targets.size, logits.shape[-1])
    return make(ops.cross_entropy, rows, targets.reshape(targets.size), ignore_index=ignore_index,
                need_grad=logits.requires_grad)  # fmt: skip


def attention_mask(mask: ArrayLike | None, op: str = "attention") -> Array | None:
    """A mask as the kernel takes it: bool or float32 array, 2-D (T, S) or 4-D, that needs no gradient."""
    if mask is None:
        return None
    mask = to_tensor(mask, op)
    if mask.dtype == "int64":
        raise TypeError(f"[{op}] mask must be bool (True = may attend) or float (added to the scores); got int64")
    if mask.requires_grad:
        raise ValueError(
            f"[{op}] a mask has no gradient; got a float mask with requires_grad=True, expected mask.detach()"
        )
    if mask.ndim not in (2, 4):
        raise ValueError(f"[{op}] mask must be (T, S) or broadcast to (B, H, T, S); got {mask.shape}")
    return lasting(mask.data)


def wanted_weights(
    op: str, need_weights: bool | Sequence[int], weight_rows: Sequence[int] | None, H: int, T: int
) -> WantedWeights:
    """need_weights (a bool, or a list of heads) and weight_rows (None or (start, stop)) as the op takes them: None for
    no weights, else (heads or None for all, (start, stop))."""
    if isinstance(need_weights, list | tuple | range) or np.ndim(need_weights) > 0:
        heads = check_indices(op, "need_weights", need_weights, H)
    elif not isinstance(need_weights, bool | np.bool_):
        raise TypeError(message(op, "need_weights must be a bool or a list of heads", quote(need_weights)))
    elif not need_weights:
        if weight_rows is not None:
            raise ValueError(f"[{op}] weight_rows needs need_weights; got weight_rows={quote(weight_rows)}")
        return None
    else:
        heads = None
    if weight_rows is None:
        return heads, (0, T)
    ends = weight_rows.tolist() if hasattr(weight_rows, "tolist") else weight_rows
    if isinstance(ends, range) and ends.step == 1:
        ends = ends.start, ends.stop
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        rule = "weight_rows must be (start, stop) or a range of step 1"
        raise TypeError(message(op, rule, quote(weight_rows)))
    start = check_integer(op, "the start of weight_rows", ends[0], 0, T)
    return heads, (start, check_integer(op, "the stop of weight_rows", ends[1], start, T))


def check_probability(op: str, name: str, p: float) -> float:
    if isinstance(p, bool) or not isinstance(p, int | float | np.number) or not 0 <= p <= 1:
        raise ValueError(f"[{op}] {name} must be between 0 and 1; got {quote(p)}")
    return float(p)


@overload
def scaled_dot_product_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = None, is_causal: bool = False,
    dropout_p: float = 0.0, scale: float | None = None, need_weights: Literal[False] = False, weight_rows: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = None, is_causal: bool = False,
    dropout_p: float = 0.0, scale: float | None = None, need_weights: Literal[True] | Sequence[int],
    weight_rows: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def scaled_dot_product_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = None, is_causal: bool = False,
    dropout_p: float = 0.0, scale: float | None = None, need_weights: bool | Sequence[int] = False,
    weight_rows: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def scaled_dot_product_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, mask: ArrayLike | None = None, is_causal: bool = False,
    dropout_p: float = 0.0, scale: float | None = None, need_weights: bool | Sequence[int] = False,
    weight_rows: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T * scale + mask) v in one fused kernel (Vaswani et al. 2017, equation 1).

    q (B, H, T, hd), k and v (B, H_kv, S, hd) -> (B, H, T, hd); H may be a multiple of H_kv: query head h reads key head
    h // (H / H_kv). Scores are never stored (online softmax: Milakov & Gimelshein 2018, Dao et al. 2022).

    - mask: bool (True = may attend) or float (added to the scores), (T, S) or broadcastable to (B, H, T, S). A float
      mask that needs a gradient is a ValueError.
    - is_causal: query i sees keys up to i + S - T, so the last query sees the last key.
    - dropout_p: share of the weights that is dropped, from 0 to 1. scale: 1 / sqrt(hd) by default.
    - need_weights: True returns (y, weights (B, H, T, S)), the softmax before dropout, without gradient. A list of
      heads and weight_rows=(start, stop), a range of queries, leave only those: (B, len(heads), stop - start, S).

    Hidden keys have no influence at all, NaN included; a row that sees nothing is zero, forward and backward.
    """
    op = "scaled_dot_product_attention"
    q, k, v = (to_tensor(t, op) for t in (q, k, v))
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"[{op}] needs q (B, H, T, hd), k and v (B, H_kv, S, hd); got q {q.shape}, k {k.shape}, v {v.shape}"
        )
    if q.shape[3] == 0:
        raise ValueError(f"[{op}] head_dim must be at least 1; got q {q.shape}")
    is_causal = check_flag(op, "is_causal", is_causal)
    wanted = wanted_weights(op, need_weights, weight_rows, q.shape[1], q.shape[2])
    dropout_p = check_probability(op, "dropout_p", dropout_p)
    seed, stream, first_row = random.next_stream() if dropout_p else (0, 0, 0)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else check_number(op, "scale", scale, bool, "a number but 0")
    return make(
        ops.attention, q, k, v, need_weights=wanted, mask=attention_mask(mask, op), is_causal=is_causal,
        scale=scale, dropout_p=dropout_p, seed=seed, stream=stream, first_row=first_row,
    )  # fmt: skip

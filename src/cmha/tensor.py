"""Tensor: an array of the core, a gradient, and how it was made. Each method is a line or two."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np

from cmha import _core, autograd, ops
from cmha.errors import as_number, check_flag, quote
from cmha.foreign import is_data, one_of, read_axes, read_axis, read_sizes, to_array
from cmha.interchange import Interchange

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.autograd import Node
    from cmha.types import ArrayLike, Axes, Dtype, Flag, Index, Op, OpOfTwo, Shape, Sizes


def to_tensor(x: ArrayLike, op: str = "tensor") -> Tensor:
    """Tensors as they are; numbers, lists and arrays copied into one."""
    if isinstance(x, Tensor):
        return x
    if type(x) is builtins.float:  # the short way for `x * 2.0`
        return Tensor(_core.full((), x))
    return Tensor(to_array(x, op))


def _other(name: str, other: ArrayLike) -> Tensor | None:
    """The other operand as a tensor; None where Python should ask its type what to do."""
    try:
        return to_tensor(other, name)
    except TypeError:
        if is_data(other):
            raise
        return None


def _number_op(name: str, op: Op, reverse: bool = False) -> Callable[[Tensor, ArrayLike], Tensor]:
    def method(self: Tensor, other: ArrayLike) -> Any:  # a Tensor, or NotImplemented
        y = _other(name, other)
        if y is None:
            return NotImplemented
        return make(op, y, self) if reverse else make(op, self, y)

    return method


def _compare_op(
    name: str, kernel: Callable[[Array, Array], Array], swap: bool = False
) -> Callable[[Tensor, ArrayLike], Tensor]:
    def method(self: Tensor, other: ArrayLike) -> Any:  # a Tensor, or NotImplemented
        y = _other(name, other)
        if y is None:
            return NotImplemented
        return Tensor(kernel(y._data, self._data) if swap else kernel(self._data, y._data))

    return method


class Tensor(Interchange):
    """Row-major tensor of float32, int64 or bool; made by cmha.tensor, zeros, ones, full, arange, randn, from_numpy."""

    __slots__ = ("_data", "_grad", "_requires_grad", "_node", "__weakref__")
    __hash__ = object.__hash__
    _data: Array
    _grad: Tensor | None
    _node: Node | None  # the op that made it
    _requires_grad: bool

    def __init__(self, data: Array | ArrayLike, requires_grad: bool = False) -> None:
        self._data = data if type(data) is _core.Array else to_tensor(data)._data
        self._grad = self._node = None
        self._requires_grad = False
        if requires_grad is not False:
            self.requires_grad = requires_grad

    # ------------------------------------------------------------------------------------------ what it is
    if TYPE_CHECKING:
        data: Array
    else:
        data = property(attrgetter("_data"), doc="The array of the core; only optimisers and loading write into it.")

    @property
    def shape(self) -> Shape:
        return self._data.shape

    @property
    def strides(self) -> Shape:
        """In elements, not bytes."""
        return self._data.strides

    @property
    def ndim(self) -> int:
        return self._data.ndim

    @property
    def size(self) -> int:
        return self._data.size

    @property
    def dtype(self) -> Dtype:
        """One of "float32", "int64", "bool"."""
        return self._data.dtype

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        value = check_flag("requires_grad", "requires_grad", value)
        if value and self.dtype != "float32":
            raise TypeError(f"[requires_grad] only float32 tensors have gradients; got dtype {self.dtype}")
        if not value and self._node is not None:
            raise ValueError("[requires_grad] a computed tensor keeps its history; got False, expected detach()")
        self._requires_grad = value

    @property
    def grad(self) -> Tensor | None:
        """What backward added up, or None; settable, to a tensor of the same shape or to None."""
        return self._grad

    @grad.setter
    def grad(self, value: ArrayLike | None) -> None:
        if value is not None:
            value = to_tensor(value, "grad").float()
            if value.shape != self.shape:
                raise ValueError(f"[grad] needs the tensor's shape; got {value.shape}, expected {self.shape}")
        self._grad = value

    def is_contiguous(self) -> bool:
        return self._data.is_contiguous()

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        with np.printoptions(precision=4, threshold=200, edgeitems=3):
            text = np.array2string(np.asarray(self._data), separator=", ", prefix="tensor(")
        extra = "" if self.dtype == "float32" else f", dtype={self.dtype}"
        return f"tensor({text}, shape={self.shape}{extra}{', requires_grad=True' if self.requires_grad else ''})"

    def __format__(self, spec: str) -> str:
        """Of one element the number, so that f"{loss:.3f}" works; of more the repr."""
        try:
            return format(self.item() if self.size == 1 else repr(self), spec)
        except ValueError:
            rule = "the format must suit a number" if self.size == 1 else "several elements are formatted as text"
            raise ValueError(f"[format] {rule}; got {quote(spec)} for shape {self.shape}") from None

    def detach(self) -> Tensor:
        """The same memory, outside the graph."""
        return Tensor(self._data)

    def float(self) -> Tensor:
        """float32 (int64 and bool converted)."""
        return self if self.dtype == "float32" else Tensor(_core.to_float(self._data))

    # ------------------------------------------------------------------------------------------ shape
    def reshape(self, *shape: Sizes) -> Tensor:
        return make(ops.reshape, self, shape=read_sizes(shape))

    def permute(self, *axes: Sizes) -> Tensor:
        return make(ops.permute, self, axes=read_sizes(axes))

    def transpose(self, axis0: SupportsIndex, axis1: SupportsIndex) -> Tensor:
        axes = list(range(self.ndim))
        i, j = read_axis("transpose", axis0, self.ndim), read_axis("transpose", axis1, self.ndim)
        axes[i], axes[j] = j, i
        return make(ops.permute, self, axes=tuple(axes))

    @property
    def T(self) -> Tensor:
        """All axes reversed."""
        return make(ops.permute, self, axes=tuple(range(self.ndim))[::-1])

    @property
    def mT(self) -> Tensor:
        """The last two axes swapped."""
        if self.ndim < 2:
            raise ValueError(f"[mT] needs at least two axes; got shape {self.shape}")
        return self.transpose(-2, -1)

    def expand(self, *shape: Sizes) -> Tensor:
        return make(ops.expand, self, shape=read_sizes(shape))

    def contiguous(self) -> Tensor:
        return self if self.is_contiguous() else make(ops.contiguous, self)

    def __getitem__(self, key: Index) -> Tensor:
        return make(ops.index, self, key=key)

    # ------------------------------------------------------------------------------------------ arithmetic
    __add__ = _number_op("add", ops.add)
    __radd__ = _number_op("add", ops.add, reverse=True)
    __sub__ = _number_op("subtract", ops.subtract)
    __rsub__ = _number_op("subtract", ops.subtract, reverse=True)
    __mul__ = _number_op("multiply", ops.multiply)
    __rmul__ = _number_op("multiply", ops.multiply, reverse=True)
    __truediv__ = _number_op("divide", ops.divide)
    __rtruediv__ = _number_op("divide", ops.divide, reverse=True)
    __matmul__ = _number_op("matmul", ops.matmul)
    __rmatmul__ = _number_op("matmul", ops.matmul, reverse=True)
    __lt__ = _compare_op("less", _core.less)
    __le__ = _compare_op("less_equal", _core.less_equal)
    __gt__ = _compare_op("less", _core.less, swap=True)
    __ge__ = _compare_op("less_equal", _core.less_equal, swap=True)
    # element by element, as NumPy's, where object's own give one bool
    __eq__ = _compare_op("equal", _core.equal)  # type: ignore[assignment]
    __ne__ = _compare_op("not_equal", _core.not_equal)  # type: ignore[assignment]

    def __neg__(self) -> Tensor:
        return make(ops.negative, self.float())

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Tensor:
        return self.abs()

    def __pow__(self, exponent: builtins.float) -> Tensor:
        if isinstance(exponent, bool) or not isinstance(exponent, int | builtins.float):
            raise TypeError(f"[power] the exponent must be a number; got {type(exponent).__name__}")
        if exponent * 2 % 1 or not builtins.abs(exponent) <= 64:
            raise ValueError(
                f"[power] the exponent must be a whole or half number up to 64; got {exponent}. "
                "For others use (x.log() * exponent).exp()"
            )
        return make(ops.power, self.float(), exponent=exponent)

    def matmul(self, other: ArrayLike) -> Tensor:
        return self @ other

    def add(self, other: ArrayLike) -> Tensor:
        """The lesson's name for self + other (broadcasting)."""
        return self + other

    def mul_scalar(self, scalar: builtins.float) -> Tensor:
        """The lesson's name for self * scalar."""
        as_number("mul_scalar", "the factor", scalar)
        return self * scalar

    def exp(self) -> Tensor:
        return make(ops.exp, self.float())

    def log(self) -> Tensor:
        return make(ops.log, self.float())

    def sqrt(self) -> Tensor:
        return make(ops.sqrt, self.float())

    def tanh(self) -> Tensor:
        return make(ops.tanh, self.float())

    def sigmoid(self) -> Tensor:
        return make(ops.sigmoid, self.float())

    def gelu(self) -> Tensor:
        """GPT-2's tanh form."""
        return make(ops.gelu, self.float())

    def relu(self) -> Tensor:
        return make(ops.relu, self.float())

    def abs(self) -> Tensor:
        return make(ops.abs, self.float())

    def clip(self, lo: builtins.float | None, hi: builtins.float | None) -> Tensor:
        """min(max(x, lo), hi); the gradient passes where lo <= x <= hi. None leaves a side open."""
        lo = -np.inf if lo is None else as_number("clip", "lo", lo)
        hi = np.inf if hi is None else as_number("clip", "hi", hi)
        if not lo <= hi:
            raise ValueError(f"[clip] lo must not be above hi; got lo={lo}, hi={hi}")
        return make(ops.clip, self.float(), lowest=lo, highest=hi)

    # ------------------------------------------------------------------------------------------ along axes
    def sum(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        return self._reduce("sum", ops.sum, axis, keepdims, dim, keepdim)

    def mean(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        """Mean; NaN over an empty axis."""
        return self._reduce("mean", ops.mean, axis, keepdims, dim, keepdim)

    def var(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        """Mean squared distance from the mean: divides by N."""
        return self._reduce("var", ops.var, axis, keepdims, dim, keepdim)

    def max(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        """Largest value, NaN if there is one; the first of equal ones gets the gradient."""
        return self._reduce("max", ops.max, axis, keepdims, dim, keepdim, one_axis=True)

    def min(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        return self._reduce("min", ops.min, axis, keepdims, dim, keepdim, one_axis=True)

    def argmax(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        """Index of the first largest value (of the flattened tensor without an axis)."""
        axes, keepdims = self._reduced("argmax", axis, keepdims, dim, keepdim, one_axis=True)
        x, axis = self.float()._data, axes[0] if len(axes) == 1 else 0
        if len(axes) != 1:
            x = x.reshape((self.size,))
        if not x.shape[axis]:
            raise ValueError(f"[argmax] there must be an element; got shape {self.shape}")
        return self._kept(Tensor(_core.extreme(x, axis, 1)[1]), axes, keepdims)

    def _reduce(
        self, name: str, op: Op, axis: Axes, keepdims: Flag, dim: Axes, keepdim: Flag, one_axis: bool = False
    ) -> Tensor:
        axes, keepdims = self._reduced(name, axis, keepdims, dim, keepdim, one_axis)
        if one_axis and self.ndim == 0:
            return self.float()
        return self._kept(make(op, self.float(), axes=axes), axes, keepdims)

    def _reduced(
        self, name: str, axis: Axes, keepdims: Flag, dim: Axes, keepdim: Flag, one_axis: bool
    ) -> tuple[tuple[int, ...], bool]:
        """The axes to reduce, ascending, and whether they stay with size 1."""
        keepdims = one_of(name, "keepdims", keepdims, "keepdim", keepdim, False)
        axis = one_of(name, "axis", axis, "dim", dim, None)
        axes = read_axes(name, axis, self.ndim)
        if one_axis and axis is not None and len(axes) != 1:
            raise ValueError(f"[{name}] one axis, or none for all; got axis={quote(axis)}")
        return axes, check_flag(name, "keepdims", keepdims)

    def _kept(self, y: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
        return y.reshape([1 if i in axes else n for i, n in enumerate(self.shape)]) if keepdims else y

    def softmax(self, axis: SupportsIndex | None = None, *, dim: SupportsIndex | None = None) -> Tensor:
        return make(ops.softmax, self.float(), axis=one_of("softmax", "axis", axis, "dim", dim, -1))

    def softmax_last_dim(self) -> Tensor:
        """The lesson's name for softmax(-1)."""
        return self.softmax(-1)

    def log_softmax(self, axis: SupportsIndex | None = None, *, dim: SupportsIndex | None = None) -> Tensor:
        return make(ops.log_softmax, self.float(), axis=one_of("log_softmax", "axis", axis, "dim", dim, -1))

    def masked_fill(self, mask: ArrayLike, value: builtins.float) -> Tensor:
        """value where mask (bool, broadcastable to self) is True; no gradient flows there."""
        mask = to_tensor(mask, "masked_fill")
        if mask.dtype != "bool":
            raise TypeError(f"[masked_fill] mask must be bool; got {mask.dtype}")
        if mask.ndim > self.ndim or any(
            m not in (1, n) for m, n in zip(mask.shape[::-1], self.shape[::-1], strict=False)
        ):
            raise ValueError(f"[masked_fill] mask must broadcast to x; got mask {mask.shape}, x {self.shape}")
        return make(ops.where, mask, to_tensor(as_number("masked_fill", "value", value)), self.float())

    # ------------------------------------------------------------------------------------------ gradients
    def backward(self, grad: ArrayLike | None = None) -> None:
        """Add the gradient of this tensor to .grad of every leaf it came from; the graph is freed on the way."""
        if not self.requires_grad:
            raise RuntimeError("[backward] no tensor on the way here needs a gradient; got requires_grad=False")
        if grad is None:
            if self.size != 1:
                raise ValueError(
                    f"[backward] a tensor of several elements needs a gradient to start from; got shape {self.shape}"
                )
            grad = _core.full(self.shape, 1.0)
        else:
            grad = autograd.lasting(to_tensor(grad, "backward").float()._data)  # a leaf may keep it
            if grad.shape != self.shape:
                raise ValueError(
                    f"[backward] grad must have the tensor's shape; got {grad.shape}, expected {self.shape}"
                )
        for leaf, dleaf in autograd.backward(self._node or self, grad):
            leaf._grad = Tensor(dleaf if leaf._grad is None else _core.add(leaf._grad._data, dleaf))


@overload
def make(op: Op, *tensors: Tensor, **options: Any) -> Tensor: ...
@overload
def make(op: OpOfTwo, *tensors: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]: ...
def make(op: OpOfTwo, *tensors: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The tensor that op makes of `tensors`: the one door from Tensor into ops."""
    data, node = autograd.apply(op, *tensors, **options)
    if isinstance(data, tuple):
        return _made(data[0], node), _made(data[1], None)
    return _made(data, node)


def _made(data: Array, node: Node | None) -> Tensor:
    """A Tensor without the checks of its constructor: a graph makes thousands a second."""
    t = Tensor.__new__(Tensor)
    t._data, t._grad, t._node, t._requires_grad = data, None, node, node is not None
    return t

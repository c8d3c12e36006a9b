"""Tensor: an array of the core, a gradient, and how it was made. Each method is a line or two."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex, overload

import numpy as np

from cmha import _core, autograd, ops
from cmha.along_axes import AlongAxes
from cmha.errors import as_number, check_flag, quote
from cmha.foreign import is_data, read_axis, read_sizes, to_array
from cmha.interchange import Interchange

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.autograd import Node
    from cmha.types import ArrayLike, Axes, Dtype, Flag, Index, Op, OpOfTwo, Shape, Sizes

    Operator = Callable[["Tensor", ArrayLike], "Tensor"]


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


def _number_op(name: str, op: Op, reverse: bool = False) -> Operator:
    def method(self: Tensor, other: ArrayLike) -> Any:  # a Tensor, or NotImplemented
        y = _other(name, other)
        if y is None:
            return NotImplemented
        return make(op, y, self) if reverse else make(op, self, y)

    return method


def _compare_op(name: str, kernel: Callable[[Array, Array], Array], swap: bool = False) -> Operator:
    def method(self: Tensor, other: ArrayLike) -> Any:  # a Tensor, or NotImplemented
        y = _other(name, other)
        if y is None:
            return NotImplemented
        return Tensor(kernel(y._data, self._data) if swap else kernel(self._data, y._data))

    return method


class Tensor(Interchange, AlongAxes):  # in this order: __new__ is the one of the compiled base
    """Row-major tensor of float32, int64 or bool, of at most 8 axes; `cmha.tensor` and its relatives make one.

    Float32 tensors can need gradients. Every method makes a new tensor; views share memory, and nothing is changed in
    place.
    """

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
        """The sizes of the axes, a tuple."""
        return self._data.shape

    @property
    def strides(self) -> Shape:
        """Elements (not bytes) from one entry of an axis to the next, a tuple."""
        return self._data.strides

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._data.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._data.size

    @property
    def dtype(self) -> Dtype:
        """One of "float32", "int64", "bool"."""
        return self._data.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether backward leaves a gradient here; settable on a float32 tensor that no op computed."""
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
        """Whether the elements lie in row-major order without gaps."""
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
        """The same memory, outside the graph: no gradient flows through it."""
        return Tensor(self._data)

    def float(self) -> Tensor:
        """As float32: itself, or int64 and bool converted."""
        return self if self.dtype == "float32" else Tensor(_core.to_float(self._data))

    # ------------------------------------------------------------------------------------------ shape
    def reshape(self, *shape: Sizes) -> Tensor:
        """The same elements in row-major order under another shape; one size may be -1 and follows from the others.

        A view where strides can describe the new shape, else a copy. ValueError: another number of elements.
        """
        return make(ops.reshape, self, shape=read_sizes(shape))

    def permute(self, *axes: Sizes) -> Tensor:
        """A view whose axis i is axis axes[i] of this one; each is named once."""
        return make(ops.permute, self, axes=read_sizes(axes))

    def transpose(self, axis0: SupportsIndex, axis1: SupportsIndex) -> Tensor:
        """A view with two axes swapped."""
        axes = list(range(self.ndim))
        i, j = read_axis("transpose", axis0, self.ndim), read_axis("transpose", axis1, self.ndim)
        axes[i], axes[j] = j, i
        return make(ops.permute, self, axes=tuple(axes))

    @property
    def T(self) -> Tensor:
        """A view with all axes reversed."""
        return make(ops.permute, self, axes=tuple(range(self.ndim))[::-1])

    @property
    def mT(self) -> Tensor:
        """A view with the last two axes swapped. ValueError: fewer than two axes."""
        if self.ndim < 2:
            raise ValueError(f"[mT] needs at least two axes; got shape {self.shape}")
        return self.transpose(-2, -1)

    def expand(self, *shape: Sizes) -> Tensor:
        """A view that repeats axes of size 1, and adds axes in front, with stride 0; -1 keeps a size.

        ValueError: an axis of another size would have to grow.
        """
        return make(ops.expand, self, shape=read_sizes(shape))

    def contiguous(self) -> Tensor:
        """Itself if its elements lie in row-major order, else a copy where they do."""
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
    __eq__: ClassVar[Operator] = _compare_op("equal", _core.equal)  # type: ignore[assignment]
    __ne__: ClassVar[Operator] = _compare_op("not_equal", _core.not_equal)  # type: ignore[assignment]

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
        """Matrix product, (..., M, K) @ (..., K, N) -> (..., M, N); leading axes broadcast.

        A 1-D operand is one row, or one column, whose axis the result lacks. ValueError: the inner sizes differ.
        """
        return self @ other

    def add(self, other: ArrayLike) -> Tensor:
        """The lesson's name for self + other (broadcasting)."""
        return self + other

    def mul_scalar(self, scalar: builtins.float) -> Tensor:
        """The lesson's name for self * scalar, a number. TypeError for what is none."""
        as_number("mul_scalar", "the factor", scalar)
        return self * scalar

    def exp(self) -> Tensor:
        """e ** x, element by element."""
        return make(ops.exp, self.float())

    def log(self) -> Tensor:
        """The natural logarithm, element by element; -inf at 0, NaN below."""
        return make(ops.log, self.float())

    def sqrt(self) -> Tensor:
        """The square root, element by element; NaN below 0."""
        return make(ops.sqrt, self.float())

    def tanh(self) -> Tensor:
        """The hyperbolic tangent, element by element."""
        return make(ops.tanh, self.float())

    def sigmoid(self) -> Tensor:
        """1 / (1 + exp(-x)), element by element."""
        return make(ops.sigmoid, self.float())

    def gelu(self) -> Tensor:
        """GELU, tanh form, as GPT-2 has it (Hendrycks & Gimpel 2016, arXiv:1606.08415), element by element.

        x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
        """
        return make(ops.gelu, self.float())

    def relu(self) -> Tensor:
        """max(x, 0), element by element; the gradient passes where x > 0."""
        return make(ops.relu, self.float())

    def abs(self) -> Tensor:
        """The magnitude, element by element; the gradient at 0 is 0."""
        return make(ops.abs, self.float())

    def clip(self, lo: builtins.float | None, hi: builtins.float | None) -> Tensor:
        """min(max(x, lo), hi), element by element; None leaves a side open. The gradient passes where lo <= x <= hi.

        ValueError: lo above hi.
        """
        lo = -np.inf if lo is None else as_number("clip", "lo", lo)
        hi = np.inf if hi is None else as_number("clip", "hi", hi)
        if not lo <= hi:
            raise ValueError(f"[clip] lo must not be above hi; got lo={lo}, hi={hi}")
        return make(ops.clip, self.float(), lowest=lo, highest=hi)

    # ------------------------------------------------------------------------------------------ along axes
    def argmax(self, axis: Axes = None, keepdims: Flag = None, *, dim: Axes = None, keepdim: Flag = None) -> Tensor:
        """The index (int64) of the first largest value along an axis, or in the flattened tensor (the default).

        NaN counts as the largest. ValueError: several axes, an empty one.
        """
        axes, keepdims = self._reduced("argmax", axis, keepdims, dim, keepdim, one_axis=True)
        x, axis = self.float()._data, axes[0] if len(axes) == 1 else 0
        if len(axes) != 1:
            x = x.reshape((self.size,))
        if not x.shape[axis]:
            raise ValueError(f"[argmax] there must be an element; got shape {self.shape}")
        return self._kept(Tensor(_core.extreme(x, axis, 1)[1]), axes, keepdims)

    def _as_float(self, op: Op, **options: Any) -> Tensor:
        """What an op of one argument makes of this: AlongAxes cannot know `make`."""
        return make(op, self.float(), **options)

    def masked_fill(self, mask: ArrayLike, value: builtins.float) -> Tensor:
        """`value` where mask (bool, broadcastable to self) is True, else self; no gradient flows there.

        TypeError: a mask that is not bool. ValueError: one that does not broadcast.
        """
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
        """Add the gradient of this tensor to .grad of every leaf it came from; the graph is freed on the way.

        grad: the gradient to start from, of this shape; 1 by default, for a tensor of one element. RuntimeError:
        nothing here needs a gradient, the graph was freed before, or memory it needs was changed since. A failed call
        changes no gradient.
        """
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

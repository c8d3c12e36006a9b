"""Tensor: an array of the core, a gradient, and how it was made. Each method is a line or two."""

import builtins

import numpy as np

from cmha import _core, autograd, ops


def _array_from(data, op="tensor"):
    """NumPy's view of `data` as float32, int64 or bool, any byte order, stride and alignment."""
    try:
        a = np.asarray(data)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"[{op}] needs a rectangular array of numbers; got {type(data).__name__}: {error}") from None
    if a.dtype.kind == "f":
        with np.errstate(over="ignore"):
            a = a.astype(np.float32, copy=False)
    elif a.dtype.kind in "iu":
        if a.dtype == np.uint64 and a.size and a.max() > np.iinfo(np.int64).max:
            raise ValueError(f"[{op}] integers must fit int64; got {a.max()}")
        a = a.astype(np.int64, copy=False)
    elif a.dtype != np.bool_:
        raise TypeError(f"[{op}] elements must be floats, integers or bools; got dtype {a.dtype}")
    if a.ndim > 8:
        raise ValueError(f"[{op}] at most 8 axes; got shape {a.shape}")
    aligned = a.ctypes.data % a.itemsize == 0 and all(s % a.itemsize == 0 for s in a.strides)
    if aligned and a.dtype.isnative and type(a) in (np.ndarray, np.memmap):
        return a
    return np.array(a, dtype=a.dtype.newbyteorder("="), order="C", subok=False)


def to_tensor(x, op="tensor"):
    """Tensors as they are; numbers, lists and arrays copied into one."""
    if isinstance(x, Tensor):
        return x
    if type(x) is builtins.float:  # the short way for `x * 2.0`
        return Tensor(_core.full((), x))
    return Tensor(_core.copy(_core.from_buffer(_array_from(x, op))))


def _axes(op, axis, ndim):
    """None (all axes), an int or a tuple of ints as an ascending tuple of non-negative ints."""
    given = range(ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    axes = []
    for a in given:
        if isinstance(a, bool) or not hasattr(a, "__index__"):
            raise TypeError(f"[{op}] an axis must be an int; got {a!r}")
        if not -ndim <= a < ndim:
            raise ValueError(f"[{op}] axis out of range; got axis {a} for {ndim} axes")
        axes.append(a.__index__() % ndim)
    if len(set(axes)) != len(axes):
        raise ValueError(f"[{op}] each axis at most once; got {axis}")
    return tuple(sorted(axes))


def _alias(op, axis, keepdims, dim, keepdim):
    """PyTorch's dim and keepdim beside NumPy's axis and keepdims."""
    if dim is not None and axis is not None:
        raise TypeError(f"[{op}] give axis or dim, not both; got axis={axis}, dim={dim}")
    return (dim if axis is None else axis), keepdims or keepdim


def _sizes(sizes):
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes


def _number_op(name, op, reverse=False):
    def method(self, other):
        try:
            other = to_tensor(other, name)
        except TypeError:
            if isinstance(other, str | bytes) or not hasattr(other, "__len__"):
                return NotImplemented
            raise
        return make(op, other, self) if reverse else make(op, self, other)

    return method


def _compare_op(name, kernel, swap=False):
    def method(self, other):
        other = to_tensor(other, name)
        return Tensor(kernel(other.data, self.data) if swap else kernel(self.data, other.data))

    return method


class Tensor:
    """Row-major tensor of float32, int64 or bool; made by cmha.tensor, zeros, ones, full, arange, randn, from_numpy."""

    __slots__ = ("data", "grad", "_requires_grad", "_node", "__weakref__")
    __array_ufunc__ = None  # a NumPy array on the left hands the operation to us
    __hash__ = object.__hash__

    def __init__(self, data, requires_grad=False):
        self.data = data if type(data) is _core.Array else to_tensor(data).data
        self.grad = self._node = None
        self._requires_grad = False
        if requires_grad:
            self.requires_grad = True

    # ------------------------------------------------------------------------------------------ what it is
    @property
    def shape(self):
        return self.data.shape

    @property
    def strides(self):
        """In elements, not bytes."""
        return self.data.strides

    @property
    def ndim(self):
        return self.data.ndim

    @property
    def size(self):
        return self.data.size

    @property
    def dtype(self):
        """One of "float32", "int64", "bool"."""
        return self.data.dtype

    @property
    def requires_grad(self):
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value):
        if value and self.dtype != "float32":
            raise TypeError(f"[requires_grad] only float32 tensors have gradients; got dtype {self.dtype}")
        if not value and self._node is not None:
            raise ValueError("[requires_grad] a computed tensor keeps its history; got False, expected detach()")
        self._requires_grad = bool(value)

    def is_contiguous(self):
        return self.data.is_contiguous()

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __repr__(self):
        with np.printoptions(precision=4, threshold=200, edgeitems=3):
            text = np.array2string(np.asarray(self.data), separator=", ", prefix="tensor(")
        extra = "" if self.dtype == "float32" else f", dtype={self.dtype}"
        return f"tensor({text}, shape={self.shape}{extra}{', requires_grad=True' if self.requires_grad else ''})"

    # ------------------------------------------------------------------------------------------ out of here
    def numpy(self):
        """A read-only NumPy view on the same memory (after detach() if the tensor needs gradients)."""
        if self.requires_grad:
            raise RuntimeError("[numpy] the tensor needs gradients, which NumPy would lose; call detach() first")
        return np.asarray(self.data)

    def __array__(self, dtype=None, copy=None):
        a = self.numpy()
        return a.astype(dtype) if dtype is not None and dtype != a.dtype else a.copy() if copy else a

    def item(self):
        return self.data.item()

    def tolist(self):
        return np.asarray(self.data).tolist()

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __bool__(self):
        return bool(self.item())

    def detach(self):
        """The same memory, outside the graph."""
        return Tensor(self.data)

    def float(self):
        """float32 (int64 and bool converted)."""
        return self if self.dtype == "float32" else Tensor(_core.to_float(self.data))

    def __reduce__(self):
        return _unpickle, (np.array(self.data), self.requires_grad)

    # ------------------------------------------------------------------------------------------ shape
    def reshape(self, *shape):
        return make(ops.reshape, self, shape=_sizes(shape))

    def permute(self, *axes):
        return make(ops.permute, self, axes=_sizes(axes))

    def transpose(self, axis0, axis1):
        axes = list(range(self.ndim))
        i, j = _axes("transpose", axis0, self.ndim)[0], _axes("transpose", axis1, self.ndim)[0]
        axes[i], axes[j] = j, i
        return make(ops.permute, self, axes=tuple(axes))

    @property
    def T(self):
        """All axes reversed."""
        return make(ops.permute, self, axes=tuple(range(self.ndim))[::-1])

    @property
    def mT(self):
        """The last two axes swapped."""
        if self.ndim < 2:
            raise ValueError(f"[mT] needs at least two axes; got shape {self.shape}")
        return self.transpose(-2, -1)

    def expand(self, *shape):
        return make(ops.expand, self, shape=_sizes(shape))

    def contiguous(self):
        return self if self.is_contiguous() else make(ops.contiguous, self)

    def __getitem__(self, key):
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
    __eq__ = _compare_op("equal", _core.equal)
    __ne__ = _compare_op("not_equal", _core.not_equal)

    def __neg__(self):
        return make(ops.negative, self.float())

    def __pow__(self, exponent):
        if isinstance(exponent, bool) or not isinstance(exponent, int | builtins.float):
            raise TypeError(f"[power] the exponent must be a number; got {type(exponent).__name__}")
        if exponent * 2 % 1 or not builtins.abs(exponent) <= 64:
            raise ValueError(
                f"[power] the exponent must be a whole or half number up to 64; got {exponent}. "
                "For others use (x.log() * exponent).exp()"
            )
        return make(ops.power, self.float(), exponent=exponent)

    def matmul(self, other):
        return self @ other

    def add(self, other):
        """The lesson's name for self + other (broadcasting)."""
        return self + other

    def mul_scalar(self, scalar):
        """The lesson's name for self * scalar."""
        if isinstance(scalar, bool) or not isinstance(scalar, int | builtins.float | np.number):
            raise TypeError(f"[mul_scalar] the factor must be a number; got {type(scalar).__name__}")
        return self * scalar

    def exp(self):
        return make(ops.exp, self.float())

    def log(self):
        return make(ops.log, self.float())

    def sqrt(self):
        return make(ops.sqrt, self.float())

    def tanh(self):
        return make(ops.tanh, self.float())

    def sigmoid(self):
        return make(ops.sigmoid, self.float())

    def gelu(self):
        """GPT-2's tanh form."""
        return make(ops.gelu, self.float())

    def relu(self):
        return make(ops.relu, self.float())

    def abs(self):
        return make(ops.abs, self.float())

    def clip(self, lo, hi):
        """min(max(x, lo), hi); the gradient passes where lo <= x <= hi. None leaves a side open."""
        lo, hi = -np.inf if lo is None else lo, np.inf if hi is None else hi
        for name, bound in (("lo", lo), ("hi", hi)):
            if isinstance(bound, bool) or not isinstance(bound, int | builtins.float | np.number):
                raise TypeError(f"[clip] {name} must be a number or None; got {type(bound).__name__}")
        if not lo <= hi:
            raise ValueError(f"[clip] lo must not be above hi; got lo={lo}, hi={hi}")
        return make(ops.clip, self.float(), lowest=builtins.float(lo), highest=builtins.float(hi))

    # ------------------------------------------------------------------------------------------ along axes
    def sum(self, axis=None, keepdims=False, *, dim=None, keepdim=False):
        return self._reduce("sum", ops.sum, axis, keepdims, dim, keepdim)

    def mean(self, axis=None, keepdims=False, *, dim=None, keepdim=False):
        """Mean; NaN over an empty axis."""
        return self._reduce("mean", ops.mean, axis, keepdims, dim, keepdim)

    def var(self, axis=None, keepdims=False, *, dim=None, keepdim=False):
        """Mean squared distance from the mean: divides by N."""
        return self._reduce("var", ops.var, axis, keepdims, dim, keepdim)

    def max(self, axis=None, keepdims=False, *, dim=None, keepdim=False):
        """Largest value, NaN if there is one; the first of equal ones gets the gradient."""
        return self._reduce("max", ops.max, axis, keepdims, dim, keepdim, one_axis=True)

    def min(self, axis=None, keepdims=False, *, dim=None, keepdim=False):
        return self._reduce("min", ops.min, axis, keepdims, dim, keepdim, one_axis=True)

    def argmax(self, axis=None, keepdims=False, *, dim=None, keepdim=False):
        """Index of the first largest value (of the flattened tensor without an axis)."""
        axis, keepdims = _alias("argmax", axis, keepdims, dim, keepdim)
        flat = self.float().data if axis is not None else self.float().data.reshape((self.size,))
        (axis_number,) = _axes("argmax", 0 if axis is None else axis, flat.ndim)
        index = Tensor(_core.extreme(flat, axis_number, 1)[1])
        if not keepdims:
            return index
        shape = [1] * self.ndim if axis is None else [*self.shape[:axis_number], 1, *self.shape[axis_number + 1 :]]
        return index.reshape(shape)

    def _reduce(self, name, op, axis, keepdims, dim, keepdim, one_axis=False):
        axis, keepdims = _alias(name, axis, keepdims, dim, keepdim)
        axes = _axes(name, axis, self.ndim)
        if one_axis and axis is not None and len(axes) != 1:
            raise ValueError(f"[{name}] one axis, or none for all; got axis={axis}")
        if one_axis and self.ndim == 0:
            return self.float()
        y = make(op, self.float(), axes=axes)
        return y.reshape([1 if i in axes else n for i, n in enumerate(self.shape)]) if keepdims else y

    def softmax(self, axis=-1, *, dim=None):
        return make(ops.softmax, self.float(), axis=axis if dim is None else dim)

    def softmax_last_dim(self):
        """The lesson's name for softmax(-1)."""
        return self.softmax(-1)

    def log_softmax(self, axis=-1, *, dim=None):
        return make(ops.log_softmax, self.float(), axis=axis if dim is None else dim)

    def masked_fill(self, mask, value):
        """value where mask (bool, broadcastable to self) is True; no gradient flows there."""
        mask = to_tensor(mask, "masked_fill")
        if mask.dtype != "bool":
            raise TypeError(f"[masked_fill] mask must be bool; got {mask.dtype}")
        filled = make(ops.where, mask, to_tensor(builtins.float(value)), self.float())
        if filled.shape != self.shape:
            raise ValueError(f"[masked_fill] mask must broadcast to x; got mask {mask.shape}, x {self.shape}")
        return filled

    # ------------------------------------------------------------------------------------------ gradients
    def backward(self, grad=None):
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
            grad = to_tensor(grad, "backward").float().data
            if grad.shape != self.shape:
                raise ValueError(
                    f"[backward] grad must have the tensor's shape; got {grad.shape}, expected {self.shape}"
                )
        for leaf, dleaf in autograd.backward(self._node or self, grad):
            leaf.grad = Tensor(dleaf if leaf.grad is None else _core.add(leaf.grad.data, dleaf))


def make(op, *tensors, **options):
    """The tensor that op makes of `tensors`: the one door from Tensor into ops."""
    data, node = autograd.apply(op, *tensors, **options)
    if type(data) is tuple:
        return _made(data[0], node), *(_made(extra, None) for extra in data[1:])
    return _made(data, node)


def _made(data, node):
    """A Tensor without the checks of its constructor: a graph makes thousands a second."""
    t = object.__new__(Tensor)
    t.data, t.grad, t._node, t._requires_grad = data, None, node, node is not None
    return t


def _unpickle(array, requires_grad):
    return Tensor(array, requires_grad)

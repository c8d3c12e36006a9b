"""What callers hand in, made into what the core takes: data, sizes, axes. Every refusal names its op."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import numpy as np

from cmha import _core
from cmha.errors import quote

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import ArrayLike, Axes, NumPyArray, Sizes

T = TypeVar("T")


def to_array(data: ArrayLike, op: str) -> Array:
    """A copy of numbers, lists or arrays on memory of the core."""
    return _core.copy(_core.from_buffer(numpy_array(data, op)))


def numpy_array(data: ArrayLike, op: str) -> NumPyArray:
    """NumPy's view of `data` as float32, int64 or bool, any byte order, stride and alignment."""
    if isinstance(data, np.ma.MaskedArray):
        raise TypeError(f"[{op}] a masked array would lose its mask; got a MaskedArray, expected .filled(value)")
    try:
        a = np.asarray(data)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"[{op}] needs a rectangular array of numbers; got {type(data).__name__}: {error}") from None
    except TypeError as error:  # PyTorch's bfloat16, memory that is not the CPU's
        raise TypeError(f"[{op}] needs numbers that NumPy can read; got {type(data).__name__}: {error}") from None
    if a.dtype.kind == "f":
        with np.errstate(over="ignore"):
            a = a.astype(np.float32, copy=False)
    elif a.dtype.kind in "iu":
        if a.dtype == np.uint64 and a.size and a.max() > np.iinfo(np.int64).max:
            raise ValueError(f"[{op}] integers must fit int64; got {a.max()}")
        a = a.astype(np.int64, copy=False)
    elif a.dtype == object and a.size and all(type(v) is int for v in a.flat) and not isinstance(data, np.ndarray):
        raise ValueError(f"[{op}] integers must fit int64; got {quote(max(a.flat, key=abs))}")
    elif a.dtype != np.bool_:
        raise TypeError(f"[{op}] elements must be floats, integers or bools; got dtype {a.dtype}")
    if a.ndim > 8:
        raise ValueError(f"[{op}] at most 8 axes; got shape {a.shape}")
    aligned = a.ctypes.data % a.itemsize == 0 and all(s % a.itemsize == 0 for s in a.strides)
    if aligned and a.dtype.isnative and type(a) in (np.ndarray, np.memmap):
        return a
    return np.array(a, dtype=a.dtype.newbyteorder("="), order="C", subok=False)


def is_data(x: object) -> bool:
    """Whether x is meant as the numbers of a tensor: to any other x an operator says NotImplemented."""
    return isinstance(x, list | tuple) or (hasattr(x, "__array__") and not isinstance(x, str | bytes))


def read_sizes(sizes: tuple[Sizes, ...]) -> tuple[Any, ...]:
    """(2, 3), ((2, 3),) and (np.array([2, 3]),) are the same sizes; the core checks each of them."""
    if len(sizes) != 1:
        return sizes
    (given,) = sizes
    if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu":
        return tuple(given.tolist())
    return tuple(given) if isinstance(given, tuple | list) else sizes


def read_axis(op: str, axis: SupportsIndex, ndim: int) -> int:
    """One axis as a non-negative int."""
    try:
        if isinstance(axis, bool):
            raise TypeError
        number = operator.index(axis)
    except TypeError:
        raise TypeError(f"[{op}] an axis must be an int; got {quote(axis)}") from None
    if not -ndim <= number < ndim:
        raise ValueError(f"[{op}] axis out of range; got axis {quote(number)} for {ndim} axes")
    return number % ndim


def read_axes(op: str, axis: Axes, ndim: int) -> tuple[int, ...]:
    """None (all axes), an int or a tuple of ints as an ascending tuple of non-negative ints."""
    if axis is None:
        return tuple(range(ndim))
    if not isinstance(axis, tuple | list):
        return (read_axis(op, axis, ndim),)
    axes = [read_axis(op, a, ndim) for a in axis]
    if len(set(axes)) != len(axes):
        raise ValueError(f"[{op}] each axis at most once; got {quote(axis)}")
    return tuple(sorted(axes))


def one_of(op: str, name: str, value: T | None, torch_name: str, torch_value: T | None, default: T) -> T:
    """The value that was given under NumPy's name or under PyTorch's (axis or dim), else the default."""
    if torch_value is None:
        return default if value is None else value
    if value is not None:
        got = f"{name}={quote(value)}, {torch_name}={quote(torch_value)}"
        raise TypeError(f"[{op}] give {name} or {torch_name}, not both; got {got}")
    return torch_value

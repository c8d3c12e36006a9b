"""Views and the ops that only move elements: reshape, permute, expand, index, contiguous, cat, where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Index, Sizes, Vjp


def reshape(x: Array, *, shape: Sizes) -> tuple[Array, Vjp]:
    """The same elements under another shape, a view where strides allow it;  dx = dy in x's shape."""
    before = x.shape
    return x.reshape(shape), lambda dy: (dy.reshape(before),)


def permute(x: Array, *, axes: Sequence[int]) -> tuple[Array, Vjp]:
    """A view with its axes in another order;  dx = dy with the inverse order."""
    y = x.permute(axes)  # checks the axes
    inverse = tuple(sorted(range(len(axes)), key=lambda i: axes[i] % len(axes)))
    return y, lambda dy: (dy.permute(inverse),)


def expand(x: Array, *, shape: Sizes) -> tuple[Array, Vjp]:
    """A view that repeats axes of size 1;  dx is dy summed over them."""
    return x.expand(shape), lambda dy: (dy,)  # summed to x's shape by autograd


def contiguous(x: Array) -> tuple[Array, Vjp]:
    """x in row-major order;  dx = dy."""
    return x.contiguous(), lambda dy: (dy,)


def index(x: Array, *, key: Index) -> tuple[Array, Vjp]:
    """x[key] for ints, slices, None and ..., a view;  dx = dy there, else 0."""
    shape = x.shape

    def vjp(dy: Array) -> tuple[Array]:
        dx = _core.full(shape, 0.0)
        _core.assign(dx[key], dy)
        return (dx,)

    return x[key], vjp


def cat(*arrays: Array, axis: int) -> tuple[Array, Vjp]:
    """Join along an existing axis;  each array's gradient is its part of dy."""
    sizes = [x.shape[axis] for x in arrays]
    y = _core.empty((*arrays[0].shape[:axis], sum(sizes), *arrays[0].shape[axis + 1 :]), arrays[0].dtype)
    keys, start = [], 0
    for x, size in zip(arrays, sizes, strict=True):
        keys.append((slice(None),) * axis + (slice(start, start + size),))
        _core.assign(y[keys[-1]], x)
        start += size
    return y, lambda dy: tuple(dy[key] for key in keys)


def where(condition: Array, a: Array, b: Array) -> tuple[Array, Vjp]:
    """a where condition is true, else b;  da = dy there, db = dy elsewhere."""
    y = _core.where(condition, a, b)

    def vjp(dy: Array) -> tuple[None, Array, Array]:
        zero = _core.full((), 0.0)
        return None, _core.where(condition, dy, zero), _core.where(condition, zero, dy)

    return y, vjp

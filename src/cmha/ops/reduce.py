"""Reductions over axes (a tuple of ascending, non-negative ints): sum, mean, var, and max, min over one axis or all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Shape, Vjp


def _spread(dy: Array, shape: Shape, axes: tuple[int, ...]) -> Array:
    """Give dy its reduced axes back, with size 1, and repeat it along them."""
    kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
    return dy.reshape(kept).expand(shape)


def _count(shape: Shape, axes: tuple[int, ...]) -> int:
    n = 1
    for axis in axes:
        n *= shape[axis]
    return n


def sum(x: Array, *, axes: tuple[int, ...]) -> tuple[Array, Vjp]:
    """sum_i x_i over axes;  dx_i = dy."""
    shape = x.shape
    return _core.sum(x, axes), lambda dy: (_spread(dy, shape, axes),)


def mean(x: Array, *, axes: tuple[int, ...]) -> tuple[Array, Vjp]:
    """sum_i x_i / n over axes;  dx_i = dy / n."""
    shape = x.shape

    def vjp(dy: Array) -> tuple[Array]:
        return (_core.divide(_spread(dy, shape, axes), _core.full((), _count(shape, axes))),)

    return _core.mean(x, axes), vjp


def var(x: Array, *, axes: tuple[int, ...]) -> tuple[Array, Vjp]:
    """mean((x - mean(x))^2): divides by the number of elements, n;  dx = 2 (x - mean) dy / n."""

    def vjp(dy: Array) -> tuple[Array]:
        centred = _core.subtract(x, _spread(_core.mean(x, axes), x.shape, axes))
        factor = _core.full((), 2.0 / _count(x.shape, axes) if x.size else 0.0)
        return (_core.multiply(_core.multiply(centred, factor), _spread(dy, x.shape, axes)),)

    return _core.var(x, axes), vjp


def _extreme(x: Array, axes: tuple[int, ...], sign: int) -> tuple[Array, Vjp]:
    """Over one axis, or over all of them as one; the first of equal elements gets the gradient."""
    flat, axis = (x, axes[0]) if len(axes) == 1 else (x.reshape((x.size,)), 0)
    values, index = _core.extreme(flat, axis, sign)
    return values, lambda dy: (_core.extreme_backward(dy, index, axis, flat.shape).reshape(x.shape),)


def max(x: Array, *, axes: tuple[int, ...]) -> tuple[Array, Vjp]:
    """max_i x_i over one axis or all, NaN if there is one;  dx = dy at the first of the largest, else 0."""
    return _extreme(x, axes, 1)


def min(x: Array, *, axes: tuple[int, ...]) -> tuple[Array, Vjp]:
    """min_i x_i over one axis or all, NaN if there is one;  dx = dy at the first of the smallest, else 0."""
    return _extreme(x, axes, -1)

"""a + b, a - b, a * b, a / b, -x and x ** p, with broadcasting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Vjp


def add(a: Array, b: Array) -> tuple[Array, Vjp]:
    """a + b;  da = dy,  db = dy."""
    return _core.add(a, b), lambda dy: (dy, dy)


def subtract(a: Array, b: Array) -> tuple[Array, Vjp]:
    """a - b;  da = dy,  db = -dy."""
    return _core.subtract(a, b), lambda dy: (dy, _core.negative_forward(dy))


def multiply(a: Array, b: Array) -> tuple[Array, Vjp]:
    """a b;  da = b dy,  db = a dy."""
    return _core.multiply(a, b), lambda dy: (_core.multiply(dy, b), _core.multiply(dy, a))


def divide(a: Array, b: Array) -> tuple[Array, Vjp]:
    """a / b;  da = dy / b,  db = -da y."""
    y = _core.divide(a, b)

    def vjp(dy: Array) -> tuple[Array, ...]:
        da = _core.divide(dy, b)
        return da, _core.negative_forward(_core.multiply(da, y))

    return y, vjp


def negative(x: Array) -> tuple[Array, Vjp]:
    """-x;  dx = -dy."""
    return _core.negative_forward(x), lambda dy: (_core.negative_forward(dy),)


def power(x: Array, *, exponent: float) -> tuple[Array, Vjp]:
    """x ** exponent for a whole or half number: repeated products, square root, reciprocal; dx = p x^(p-1) dy."""

    def vjp(dy: Array) -> tuple[Array, ...]:
        if exponent == 0:
            return (_core.full(dy.shape, 0.0),)
        slope = _core.multiply(_power(x, exponent - 1), _core.full((), exponent))
        return (_core.multiply(dy, slope),)

    return _power(x, exponent), vjp


def _power(x: Array, p: float) -> Array:
    if p < 0:
        return _core.divide(_core.full((), 1.0), _power(x, -p))
    y: Array | None = None
    square, n = x, int(p)
    while n:  # binary powering, the lowest bit first
        if n & 1:
            y = square if y is None else _core.multiply(y, square)
        n >>= 1
        square = _core.multiply(square, square) if n else square
    if p != int(p):
        root = _core.sqrt_forward(x)
        y = root if y is None else _core.multiply(y, root)
    if y is None:
        return _core.full(x.shape, 1.0)
    return _core.copy(y) if y is x else y

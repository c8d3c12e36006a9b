"""a + b, a - b, a * b, a / b, -x and x ** p, with broadcasting."""

from cmha import _core


def add(a, b):
    return _core.add(a, b), lambda dy: (dy, dy)


def subtract(a, b):
    return _core.subtract(a, b), lambda dy: (dy, _core.negative_forward(dy))


def multiply(a, b):
    return _core.multiply(a, b), lambda dy: (_core.multiply(dy, b), _core.multiply(dy, a))


def divide(a, b):
    y = _core.divide(a, b)

    def vjp(dy):
        da = _core.divide(dy, b)
        return da, _core.negative_forward(_core.multiply(da, y))

    return y, vjp


def negative(x):
    return _core.negative_forward(x), lambda dy: (_core.negative_forward(dy),)


def power(x, *, exponent):
    """x ** exponent for a whole or half number: repeated products, square root, reciprocal; dx = p x^(p-1) dy."""

    def vjp(dy):
        if exponent == 0:
            return (_core.full(dy.shape, 0.0),)
        slope = _core.multiply(_power(x, exponent - 1), _core.full((), exponent))
        return (_core.multiply(dy, slope),)

    return _power(x, exponent), vjp


def _power(x, p):
    if p < 0:
        return _core.divide(_core.full((), 1.0), _power(x, -p))
    y, square, n = None, x, int(p)
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

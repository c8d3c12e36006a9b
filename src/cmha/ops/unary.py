"""Element by element: exp, log, sqrt, tanh, sigmoid, relu, abs, clip."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Vjp


def _op(
    name: str, formula: str, forward: Callable[[Array], Array], backward: Callable[[Array, Array, Array], Array]
) -> Callable[[Array], tuple[Array, Vjp]]:
    def op(x: Array) -> tuple[Array, Vjp]:
        y = forward(x)
        return y, lambda dy: (backward(dy, x, y),)

    op.__name__, op.__doc__ = name, formula
    return op


exp = _op("exp", "e^x;  dx = dy y.", _core.exp_forward, _core.exp_backward)
log = _op("log", "ln x, -inf at 0, NaN below;  dx = dy / x.", _core.log_forward, _core.log_backward)
sqrt = _op("sqrt", "The square root, NaN below 0;  dx = dy / (2 y).", _core.sqrt_forward, _core.sqrt_backward)
tanh = _op("tanh", "tanh x;  dx = dy (1 - y^2).", _core.tanh_forward, _core.tanh_backward)
sigmoid = _op("sigmoid", "1 / (1 + e^-x);  dx = dy y (1 - y).", _core.sigmoid_forward, _core.sigmoid_backward)
relu = _op("relu", "max(x, 0);  dx = dy where x > 0, else 0.", _core.relu_forward, _core.relu_backward)
abs = _op("abs", "The magnitude;  dx = dy sign(x), 0 at 0.", _core.abs_forward, _core.abs_backward)


def clip(x: Array, *, lowest: float, highest: float) -> tuple[Array, Vjp]:
    """min(max(x, lowest), highest);  dx = dy where lowest <= x <= highest, else 0."""
    return _core.clip_forward(x, lowest, highest), lambda dy: (_core.clip_backward(dy, x, lowest, highest),)

"""Element by element: exp, log, sqrt, tanh, sigmoid, relu, abs, clip."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Vjp


def _op(
    name: str, forward: Callable[[Array], Array], backward: Callable[[Array, Array, Array], Array]
) -> Callable[[Array], tuple[Array, Vjp]]:
    def op(x: Array) -> tuple[Array, Vjp]:
        y = forward(x)
        return y, lambda dy: (backward(dy, x, y),)

    op.__name__ = name
    return op


exp = _op("exp", _core.exp_forward, _core.exp_backward)
log = _op("log", _core.log_forward, _core.log_backward)
sqrt = _op("sqrt", _core.sqrt_forward, _core.sqrt_backward)
tanh = _op("tanh", _core.tanh_forward, _core.tanh_backward)
sigmoid = _op("sigmoid", _core.sigmoid_forward, _core.sigmoid_backward)
relu = _op("relu", _core.relu_forward, _core.relu_backward)
abs = _op("abs", _core.abs_forward, _core.abs_backward)


def clip(x: Array, *, lowest: float, highest: float) -> tuple[Array, Vjp]:
    """min(max(x, lowest), highest); the gradient passes where lowest <= x <= highest."""
    return _core.clip_forward(x, lowest, highest), lambda dy: (_core.clip_backward(dy, x, lowest, highest),)

"""Softmax and its logarithm along one axis. A row of -inf only gives zeros (softmax), and no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Vjp


def softmax(x: Array, *, axis: SupportsIndex = -1) -> tuple[Array, Vjp]:
    """y_j = exp(x_j - m) / sum_k exp(x_k - m);  dx_j = y_j (dy_j - sum_k dy_k y_k)."""
    y = _core.softmax_forward(x, axis)
    return y, lambda dy: (_core.softmax_backward(dy, y, axis),)


def log_softmax(x: Array, *, axis: SupportsIndex = -1) -> tuple[Array, Vjp]:
    """y_j = x_j - m - log sum_k exp(x_k - m);  dx_j = dy_j - exp(y_j) sum_k dy_k."""
    y = _core.log_softmax_forward(x, axis)
    return y, lambda dy: (_core.log_softmax_backward(dy, y, axis),)

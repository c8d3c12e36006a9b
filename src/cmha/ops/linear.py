"""y = x W + b with W (n_in, n_out), as GPT-2 stores it; what follows it is done while the result is in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Vjp


def linear(x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, Vjp]:
    """x (..., n_in) -> (..., n_out);  dx = dy W^T,  dW = x^T dy and db = sum dy over all rows."""
    y = _core.linear_forward(x, weight, bias)

    def vjp(dy: Array) -> tuple[Array, ...]:
        return _core.linear_backward(dy, x, weight, bias is not None)

    return y, vjp


def linear_gelu(x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, Vjp]:
    """gelu(x W + b), the bits of the two ops one after the other."""
    y, u = _core.linear_forward(x, weight, bias, gelu=True)

    def vjp(dy: Array) -> tuple[Array, ...]:
        return _core.linear_backward(_core.gelu_backward(dy, u), x, weight, bias is not None)

    return y, vjp


def linear_residual(residual: Array, x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, Vjp]:
    """residual + (x W + b), residual (..., n_out), the bits of the two ops one after the other."""
    y = _core.linear_forward(x, weight, bias, residual)

    def vjp(dy: Array) -> tuple[Array, ...]:
        return dy, *_core.linear_backward(dy, x, weight, bias is not None)

    return y, vjp

"""Layer norm over the last axis (Ba et al. 2016): gamma (x - mean) / sqrt(var + eps) + beta."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Vjp


def layer_norm(x: Array, gamma: Array, beta: Array | None = None, *, eps: float = 1e-5) -> tuple[Array, Vjp]:
    """gamma (x - mean) / sqrt(var + eps) + beta over the last axis (Ba et al. 2016): x (..., N), gamma and beta (N,).

    With xh = (x - mean) / sd and g = dy gamma: dx = (g - mean(g) - xh mean(g xh)) / sd, dgamma = sum dy xh, dbeta = sum
    dy.
    """
    y, stats = _core.layer_norm_forward(x, gamma, beta, eps)

    def vjp(dy: Array) -> tuple[Array, ...]:
        dx, dgamma, dbeta = _core.layer_norm_backward(dy, x, stats, gamma)
        return (dx, dgamma, dbeta) if beta is not None else (dx, dgamma)

    return y, vjp

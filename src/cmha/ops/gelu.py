"""GELU, GPT-2's tanh form (Hendrycks & Gimpel 2016): 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Vjp


def gelu(x: Array) -> tuple[Array, Vjp]:
    """GELU, tanh form (Hendrycks & Gimpel 2016): x / 2 (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715 x^3).

    dx = dy (s + x s (1 - s) 2u'), s = 1 / (1 + exp(-2u)).
    """
    return _core.gelu_forward(x), lambda dy: (_core.gelu_backward(dy, x),)

"""Dropout (Srivastava et al. 2014), inverted: x / (1 - p) where the element's draw is at least p, else 0.

The draw is a function of (seed, stream, element number), so backward draws again instead of keeping a mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Vjp


def dropout(x: Array, *, p: float, seed: int, stream: int, first: int = 0) -> tuple[Array, Vjp]:
    """x / (1 - p) where the element's draw is at least p, else 0 (Srivastava et al. 2014);  dx = dy times the same.

    `first` is the number of x's first element in the global batch; the draw is Philox's of (seed, stream, element
    number).
    """
    return _core.dropout(x, p, seed, stream, first), lambda dy: (_core.dropout(dy, p, seed, stream, first),)

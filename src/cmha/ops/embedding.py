"""Rows of a table by id; backward adds each row's gradient to its id's row, in the order of the ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Vjp


class RowGradient:
    """A gradient (n_rows, D), zero but for rows (n, D) at ids (n): a table has more rows than a batch looks up."""

    def __init__(self, rows: Array, ids: Array, n_rows: int) -> None:
        self.rows, self.ids, self.shape = rows, ids, (n_rows, rows.shape[1])

    def dense(self) -> Array:
        return _core.embedding_add_rows(_core.full(self.shape, 0.0), self.rows, self.ids)


def embedding(weight: Array, ids: Array) -> tuple[Array, Vjp]:
    """Rows of weight (V, D) by ids (...) int64 -> (..., D);  dweight[id] adds dy of every place that has this id."""
    n_rows = weight.shape[0]

    def vjp(dy: Array) -> tuple[RowGradient, None]:
        found, inverse = np.unique(np.asarray(ids), return_inverse=True)
        places = _core.from_buffer(inverse.reshape(ids.shape).astype(np.int64))
        rows = _core.embedding_backward(dy, places, len(found))
        return RowGradient(rows, _core.from_buffer(found), n_rows), None

    return _core.embedding_forward(weight, ids), vjp

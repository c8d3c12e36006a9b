"""Matrix product, batched over leading axes with broadcasting; 1-D arguments as NumPy takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Vjp


def _transposed(x: Array) -> Array:
    axes = tuple(range(x.ndim - 2))
    return x.permute((*axes, x.ndim - 1, x.ndim - 2))


def matmul(a: Array, b: Array) -> tuple[Array, Vjp]:
    """(..., M, K) @ (..., K, N) -> (..., M, N);  da = dy b^T,  db = a^T dy."""
    y = _core.matmul(a, b)

    def vjp(dy: Array) -> tuple[Array, Array]:
        rows = a.reshape((1, *a.shape)) if a.ndim == 1 else a  # 1-D arguments are one row, one column
        columns = b.reshape((*b.shape, 1)) if b.ndim == 1 else b
        if b.ndim == 1:
            dy = dy.reshape((*dy.shape, 1))
        if a.ndim == 1:
            dy = dy.reshape((*dy.shape[:-1], 1, dy.shape[-1]))
        da = _core.matmul(dy, _transposed(columns))
        if columns.strides[-2] == 1 < columns.strides[-1]:  # b lies transposed (the tied output layer): so does db
            db = _transposed(_core.matmul(_transposed(dy), rows))
        else:
            db = _core.matmul(_transposed(rows), dy)
        # a vector's gradient loses the axis it was given above; broadcast batches are summed by autograd
        da = da.reshape((*da.shape[:-2], da.shape[-1])) if a.ndim == 1 else da
        db = db.reshape(db.shape[:-1]) if b.ndim == 1 else db
        return da, db

    return y, vjp

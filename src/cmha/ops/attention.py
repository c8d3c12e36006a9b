"""Scaled dot-product attention, softmax(q k^T * scale + mask) v, as one fused op (Vaswani et al. 2017; Dao 2023).

Options of both ops: mask (bool, True = may attend, or float32, added to the scores; broadcastable to (B, H, T, S)),
key_mask (bool (B, S)), lengths (int64 (B): keys of each row), is_causal, scale, dropout_p, seed, stream, first_row, and
need_weights: None, or the (heads, rows) whose weights are returned, a list or None for all, and (start, stop).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

import numpy as np

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import AttentionOptions, Vjp, WantedWeights


def attention(
    q: Array, k: Array, v: Array, *, need_weights: WantedWeights = None, **options: Unpack[AttentionOptions]
) -> tuple[Array | tuple[Array, Array], Callable[[Array], tuple[Array, Array, Array]]]:
    """softmax(q k^T * scale + mask) v (Vaswani et al. 2017): q (B, H, T, hd), k v (B, H_kv, S, hd) -> y like q.

    With need_weights (y, weights without dropout). Options: see cmha/ops/attention.py.
    """
    y, row_max, row_sum = _core.attention_forward(q, k, v, **options)

    def vjp(dy: Array) -> tuple[Array, Array, Array]:
        return _core.attention_backward(dy, y, row_max, row_sum, q, k, v, **options)

    if need_weights is None:
        return y, vjp
    return (y, _weights(q, k, row_max, row_sum, *need_weights, {**options, "dropout_p": 0.0})), vjp


def _weights(
    q: Array, k: Array, row_max: Array, row_sum: Array, heads: list[int] | None, rows: tuple[int, int],
    options: AttentionOptions,
) -> Array:  # fmt: skip
    """Weights (B, len(heads), stop - start, S): exp2(s - m) / l of only these heads (None: all) and query rows."""
    (B, H, T, _), S, (start, stop) = q.shape, k.shape[2], rows
    if heads is None and (start, stop) == (0, T):
        return _core.attention_weights(q, k, row_max, row_sum, **options)
    ahead = min(T - stop, S) if options.get("is_causal") else 0  # the last row left must meet the last key left
    options, seen = {**options, "key_mask": _cut(options.get("key_mask"), 1, slice(0, S - ahead))}, S - ahead
    if options.get("lengths") is not None:
        options["lengths"] = _core.from_buffer(np.maximum(np.asarray(options["lengths"]) - (T - stop) * (ahead > 0), 0))
    parts = [slice(0, H)] if heads is None else [slice(h, h + 1) for h in heads]
    out = _core.full((B, H if heads is None else len(heads), stop - start, S), 0.0)
    for i, part in enumerate(parts):
        group = H // k.shape[1]  # query heads that share a key head
        part_k = slice(part.start // group, (part.stop - 1) // group + 1)
        mask = _cut(_cut(_cut(options.get("mask"), -3, part), -2, slice(start, stop)), -1, slice(0, seen))
        place = (slice(None), part, slice(start, stop))
        cut: AttentionOptions = {**options, "mask": mask}
        found = _core.attention_weights(
            q[place], k[:, part_k, :seen], row_max[place].contiguous(), row_sum[place].contiguous(), **cut
        )
        _core.assign(out[:, part if heads is None else slice(i, i + 1), :, :seen], found)
    return out


def _cut(x: Array | None, axis: int, part: slice) -> Array | None:
    """x without what lies outside `part` along an axis, if it has that axis and does not broadcast along it."""
    if x is None or -axis > x.ndim or x.shape[axis] == 1:
        return x
    return x[(slice(None),) * (axis % x.ndim) + (part,)]


def multi_head_attention(
    q: Array, k: Array, v: Array, *, n_head: int, n_kv_head: int, need_weights: WantedWeights = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Array | tuple[Array, Array], Vjp]:  # fmt: skip
    """The same with heads side by side in the last axis: q (B, T, n_head * hd), k v (B, S, n_kv_head * hd) -> like q.

    Splitting and merging are views here: the kernel reads each head in place (strides) and writes y the same way.
    """
    y, vjp = attention(_split(q, n_head), _split(k, n_kv_head), _split(v, n_kv_head), need_weights=need_weights,
                       **options)  # fmt: skip

    def merged_vjp(dy: Array) -> tuple[Array, ...]:
        return tuple(_merge(d) for d in vjp(_split(dy, n_head)))

    return ((_merge(y[0]), y[1]) if isinstance(y, tuple) else _merge(y)), merged_vjp


def _split(x: Array, n_head: int) -> Array:
    B, T, D = x.shape
    return x.reshape((B, T, n_head, D // n_head)).permute((0, 2, 1, 3))  # (B, H, T, hd)


def _merge(x: Array) -> Array:
    B, H, T, hd = x.shape
    return x.permute((0, 2, 1, 3)).reshape((B, T, H * hd))  # (B, T, D)

"""Scaled dot-product attention, softmax(q k^T * scale + mask) v, as one fused op (Vaswani et al. 2017; Dao 2023).

Options of both ops: mask (bool, True = may attend, or float32, added to the scores; broadcastable to (B, H, T, S)),
key_mask (bool (B, S)), lengths (int64 (B): keys of each row), is_causal, scale, dropout_p, seed, stream, first_row.
"""

from cmha import _core


def attention(q, k, v, *, need_weights=False, **options):
    """q (B, H, T, hd), k v (B, H_kv, S, hd) -> y (B, H, T, hd), or (y, weights (B, H, T, S) without dropout)."""
    y, row_max, row_sum = _core.attention_forward(q, k, v, **options)

    def vjp(dy):
        return _core.attention_backward(dy, y, row_max, row_sum, q, k, v, **options)

    if not need_weights:
        return y, vjp
    return (y, _core.attention_weights(q, k, row_max, row_sum, **{**options, "dropout_p": 0.0})), vjp


def multi_head_attention(q, k, v, *, n_head, n_kv_head, **options):
    """The same with heads side by side in the last axis: q (B, T, n_head * hd), k v (B, S, n_kv_head * hd) -> like q.

    Splitting and merging are views here: the kernel reads each head in place (strides) and writes y the same way.
    """
    y, vjp = attention(_split(q, n_head), _split(k, n_kv_head), _split(v, n_kv_head), **options)

    def merged_vjp(dy):
        return tuple(_merge(d) for d in vjp(_split(dy, n_head)))

    return ((_merge(y[0]), y[1]) if isinstance(y, tuple) else _merge(y)), merged_vjp


def _split(x, n_head):
    B, T, D = x.shape
    return x.reshape((B, T, n_head, D // n_head)).permute((0, 2, 1, 3))  # (B, H, T, hd)


def _merge(x):
    B, H, T, hd = x.shape
    return x.permute((0, 2, 1, 3)).reshape((B, T, H * hd))  # (B, T, D)

# Attention: q (B, H, T, hd), k and v (B, H_kv, S, hd), read in place whatever the strides of their first three axes.
# y, dq, dk and dv are views (B, H, T, hd) of (B, T, H, hd) memory: merging the heads afterwards moves nothing.

from libc.math cimport isfinite, sqrt

cdef extern from "dispatch.h" nogil:
    ctypedef struct cmha_heads:
        float *data
        Py_ssize_t batch, head, time
    ctypedef struct cmha_attention:
        Py_ssize_t B, H, H_kv, T, S, hd
        float scale
        int is_causal
        const int64_t *lengths
        const uint8_t *bool_mask
        const float *float_mask
        Py_ssize_t mask_strides[4]
        const uint8_t *key_mask
        float dropout_p
        uint64_t seed, stream, first_row
    void cmha_attention_scratch(Py_ssize_t *size, const cmha_attention *call, int threads) noexcept
    void cmha_attention_backward_scratch(Py_ssize_t *size, const cmha_attention *call, int threads) noexcept
    void cmha_attention_forward(const cmha_heads *y, float *row_max, float *row_sum, const cmha_heads *q,
                                const cmha_heads *k, const cmha_heads *v, const cmha_attention *call, float *scratch,
                                int threads) noexcept
    void cmha_attention_weights(float *weights, const float *row_max, const float *row_sum, const cmha_heads *q,
                                const cmha_heads *k, const cmha_attention *call, float *scratch, int threads) noexcept
    void cmha_attention_backward(const cmha_heads *dq, const cmha_heads *dk, const cmha_heads *dv, const cmha_heads *dy,
                                 const cmha_heads *y, const float *row_max, const float *row_sum, const cmha_heads *q,
                                 const cmha_heads *k, const cmha_heads *v, const cmha_attention *call, float *scratch,
                                 int threads) noexcept


cdef int check_heads(Array q, Array k, Array v) except -1:
    """Kinds, axes and sizes of the three; v may be None (weights need none)."""
    need("attention", "q", q, FLOAT, 4)
    need("attention", "k", k, FLOAT, 4)
    if v is not None:
        need("attention", "v", v, FLOAT, 4)
        if not same_shape(k, v):
            raise ValueError(f"[attention] k and v must have one shape; got k {k.shape}, v {v.shape}")
    if q.dims[0] != k.dims[0] or q.dims[3] != k.dims[3]:
        raise ValueError(f"[attention] batch and head size of q and k must be equal; got q {q.shape}, k {k.shape}")
    if q.dims[1] != k.dims[1] and (k.dims[1] == 0 or q.dims[1] % k.dims[1]):
        raise ValueError(f"[attention] q must have a multiple of the heads of k; got q {q.shape}, k {k.shape}")
    return 0


cdef tuple read_call(cmha_attention *call, Array q, Array k, Array v, Array mask, Array key_mask, Array lengths,
                     object is_causal, object scale, double dropout_p, object seed, object stream, object first_row):
    """Check everything and fill `call`; returns the arrays that must live as long as it does."""
    cdef int i, axis
    cdef Py_ssize_t[4] wanted
    check_heads(q, k, v)
    memset(call, 0, sizeof(cmha_attention))
    call.B, call.H, call.T, call.hd = q.dims[0], q.dims[1], q.dims[2], q.dims[3]
    call.H_kv, call.S = k.dims[1], k.dims[2]
    call.scale = 1 / sqrt(<double>max(call.hd, 1)) if scale is None else <double>scale
    if not isfinite(call.scale):
        raise ValueError(f"[attention] scale must be finite; got {scale}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"[attention] dropout_p must be 0 .. 1; got {dropout_p}")
    call.is_causal, call.dropout_p = bool(is_causal), dropout_p
    call.seed, call.stream, call.first_row = seed, stream, first_row
    if mask is not None:
        if mask.kind == INT64:
            raise TypeError("[attention] mask must be bool or float32; got int64")
        wanted = [call.B, call.H, call.T, call.S]
        for axis in range(mask.nd):
            i = axis + 4 - mask.nd
            if i < 0 or (mask.dims[axis] != 1 and mask.dims[axis] != wanted[i]):
                raise ValueError("[attention] mask must broadcast to (B, H, T, S); "
                                 f"got mask {mask.shape}, expected {sizes_tuple(wanted, 4)}")
            call.mask_strides[i] = 0 if mask.dims[axis] == 1 else mask.steps[axis]
        if mask.kind == BOOL:
            call.bool_mask = <uint8_t *>mask.data
        else:
            call.float_mask = floats(mask)
    if key_mask is not None:
        need("attention", "key_mask", key_mask, BOOL, 2)
        if key_mask.dims[0] != call.B or key_mask.dims[1] != call.S:
            raise ValueError(f"[attention] key_mask must be (B, S); got {key_mask.shape}, expected {(call.B, call.S)}")
        key_mask = packed(key_mask)
        call.key_mask = <uint8_t *>key_mask.data
    if lengths is not None:
        need("attention", "lengths", lengths, INT64, 1)
        if lengths.dims[0] != call.B:
            raise ValueError(f"[attention] lengths must be (B,); got {lengths.shape}, expected {(call.B,)}")
        lengths = packed(lengths)
        call.lengths = <int64_t *>lengths.data
        for i in range(call.B):
            if not 0 <= call.lengths[i] <= call.S:
                raise ValueError(f"[attention] lengths must be 0 .. {call.S}; got {call.lengths[i]} for row {i}")
    return mask, key_mask, lengths


cdef inline Array rows_of(Array x):
    """Itself when the last axis is dense, else a copy."""
    return x if x.steps[3] == 1 or x.dims[3] <= 1 else packed(x)


cdef inline cmha_heads heads_of(Array x) noexcept:
    cdef cmha_heads out
    out.data, out.batch, out.head, out.time = floats(x), x.steps[0], x.steps[1], x.steps[2]
    return out


cdef Array new_heads(Array x):
    """Uninitialised, the shape of x (B, H, T, hd), on (B, T, H, hd) memory."""
    cdef Py_ssize_t[4] dims = [x.dims[0], x.dims[2], x.dims[1], x.dims[3]]
    cdef Array out = new_array(FLOAT, 4, dims)
    out.dims[1], out.dims[2] = out.dims[2], out.dims[1]
    out.steps[1], out.steps[2] = out.steps[2], out.steps[1]
    return out


cdef int attention_threads(const cmha_attention *call) noexcept:
    """One part for every thread: the kernels deal out their work piece by piece."""
    return min(thread_limit, gate_flops(4.0 * call.B * call.H * call.T * call.S * call.hd))


cdef int check_rows(const cmha_attention *call, str name, Array x) except -1:
    """Row statistics of the forward pass: (B, H, T)."""
    need("attention", name, x, FLOAT, 3)
    if x.dims[0] != call.B or x.dims[1] != call.H or x.dims[2] != call.T or not is_packed(x):
        raise ValueError(f"[attention] {name} must be contiguous (B, H, T); "
                         f"got {x.shape}, expected {(call.B, call.H, call.T)}")
    return 0


def attention_forward(Array q not None, Array k not None, Array v not None, *, Array mask=None, Array key_mask=None,
                      Array lengths=None, is_causal=False, scale=None, double dropout_p=0.0, seed=0, stream=0,
                      first_row=0):
    """y (B, H, T, hd) and the row statistics row_max, row_sum (B, H, T) that weights and backward need."""
    cdef cmha_attention call
    kept = read_call(&call, q, k, v, mask, key_mask, lengths, is_causal, scale, dropout_p, seed, stream, first_row)
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    cdef Array y = new_heads(q), row_max = new_array(FLOAT, 3, q.dims), row_sum = like(row_max)
    cdef int threads = attention_threads(&call)
    cdef Py_ssize_t size
    cmha_attention_scratch(&size, &call, threads)
    cdef Array scratch = new_vector(FLOAT, size)
    cdef cmha_heads y_heads = heads_of(y), q_heads = heads_of(q), k_heads = heads_of(k), v_heads = heads_of(v)
    with nogil:
        cmha_attention_forward(&y_heads, floats(row_max), floats(row_sum), &q_heads, &k_heads, &v_heads, &call,
                               floats(scratch), threads)
    return y, row_max, row_sum


def attention_weights(Array q not None, Array k not None, Array row_max not None, Array row_sum not None, *,
                      Array mask=None, Array key_mask=None, Array lengths=None, is_causal=False, scale=None,
                      double dropout_p=0.0, seed=0, stream=0, first_row=0):
    """The weights (B, H, T, S) of a forward pass with the same options."""
    cdef cmha_attention call
    kept = read_call(&call, q, k, None, mask, key_mask, lengths, is_causal, scale, dropout_p, seed, stream, first_row)
    check_rows(&call, "row_max", row_max)
    check_rows(&call, "row_sum", row_sum)
    q, k = rows_of(q), rows_of(k)
    cdef Py_ssize_t[4] dims = [call.B, call.H, call.T, call.S]
    cdef Array weights = new_array(FLOAT, 4, dims)
    cdef int threads = attention_threads(&call)
    cdef Py_ssize_t size
    cmha_attention_scratch(&size, &call, threads)
    cdef Array scratch = new_vector(FLOAT, size)
    cdef cmha_heads q_heads = heads_of(q), k_heads = heads_of(k)
    with nogil:
        cmha_attention_weights(floats(weights), floats(row_max), floats(row_sum), &q_heads, &k_heads, &call,
                               floats(scratch), threads)
    return weights


def attention_backward(Array dy not None, Array y not None, Array row_max not None, Array row_sum not None,
                       Array q not None, Array k not None, Array v not None, *, Array mask=None, Array key_mask=None,
                       Array lengths=None, is_causal=False, scale=None, double dropout_p=0.0, seed=0, stream=0,
                       first_row=0):
    """Gradients dq (B, H, T, hd), dk and dv (B, H_kv, S, hd)."""
    cdef cmha_attention call
    kept = read_call(&call, q, k, v, mask, key_mask, lengths, is_causal, scale, dropout_p, seed, stream, first_row)
    need("attention", "dy", dy, FLOAT, 4)
    need("attention", "y", y, FLOAT, 4)
    need_same_shape("attention", "dy", dy, "q", q)
    need_same_shape("attention", "y", y, "q", q)
    check_rows(&call, "row_max", row_max)
    check_rows(&call, "row_sum", row_sum)
    dy, y, q, k, v = rows_of(dy), rows_of(y), rows_of(q), rows_of(k), rows_of(v)
    cdef Array dq = new_heads(q), dk = new_heads(k), dv = new_heads(k)
    cdef int threads = attention_threads(&call)
    cdef Py_ssize_t size
    cmha_attention_backward_scratch(&size, &call, threads)
    cdef Array scratch = new_vector(FLOAT, size)
    cdef cmha_heads dy_heads = heads_of(dy), y_heads = heads_of(y)
    cdef cmha_heads q_heads = heads_of(q), k_heads = heads_of(k), v_heads = heads_of(v)
    cdef cmha_heads dq_heads = heads_of(dq), dk_heads = heads_of(dk), dv_heads = heads_of(dv)
    with nogil:
        cmha_attention_backward(&dq_heads, &dk_heads, &dv_heads, &dy_heads, &y_heads, floats(row_max), floats(row_sum),
                                &q_heads, &k_heads, &v_heads, &call, floats(scratch), threads)
    return dq, dk, dv

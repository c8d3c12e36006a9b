# Matrix products. A transposed operand is the same kernel with its two strides swapped: nothing is copied.

cdef extern from "dispatch.h" nogil:
    ctypedef struct cmha_matrix:
        float *data
        const Py_ssize_t *offsets
        Py_ssize_t row, col
    ctypedef struct cmha_epilogue:
        const float *bias
        const float *residual
        float *activated
    void cmha_matmul(const cmha_matrix *c, const cmha_matrix *a, const cmha_matrix *b, const cmha_epilogue *after,
                     Py_ssize_t batch, Py_ssize_t M, Py_ssize_t N, Py_ssize_t K, int accumulate, float *scratch,
                     int threads) noexcept
    void cmha_matmul_naive(const cmha_matrix *c, const cmha_matrix *a, const cmha_matrix *b, const cmha_epilogue *after,
                           Py_ssize_t batch, Py_ssize_t M, Py_ssize_t N, Py_ssize_t K, int accumulate) noexcept
    void cmha_matmul_scratch(Py_ssize_t *floats, Py_ssize_t M, Py_ssize_t N, Py_ssize_t K, int threads) noexcept


cdef Array product(Array a, Array b, bint naive):
    """(..., M, K) @ (..., K, N) with broadcast leading axes, and 1-D arguments as NumPy takes them."""
    if a.nd == 0 or b.nd == 0:
        raise ValueError(f"[matmul] needs at least one axis each; got a {dims_tuple(a)}, b {dims_tuple(b)}")
    cdef Array x = as_float(a), w = as_float(b)
    if x.nd == 1:
        x = reshape(x, (1, x.dims[0]))
    if w.nd == 1:
        w = reshape(w, (w.dims[0], 1))
    if x.dims[x.nd - 1] != w.dims[w.nd - 2]:
        raise ValueError(f"[matmul] inner sizes must match; got a {dims_tuple(a)} @ b {dims_tuple(b)}: "
                         f"{x.dims[x.nd - 1]} != {w.dims[w.nd - 2]}")
    cdef Py_ssize_t M = x.dims[x.nd - 2], K = x.dims[x.nd - 1], N = w.dims[w.nd - 1], batch = 1
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef int lead = max(x.nd, w.nd) - 2, i
    cdef Py_ssize_t from_x, from_w
    for i in range(lead):
        from_x = x.dims[i - lead + x.nd - 2] if i >= lead + 2 - x.nd else 1
        from_w = w.dims[i - lead + w.nd - 2] if i >= lead + 2 - w.nd else 1
        if from_x != from_w and from_x != 1 and from_w != 1:
            raise ValueError(f"[matmul] leading sizes must broadcast; got a {dims_tuple(a)} @ b {dims_tuple(b)}")
        dims[i] = from_w if from_x == 1 else from_x
        batch *= dims[i]
    dims[lead], dims[lead + 1] = M, N
    cdef Array y = new_array(FLOAT, lead + 2, dims)
    cdef Array tall = view_matrix(x, batch * M, K) if w.nd == 2 and x.nd > 2 else None
    if tall is not None:                    # one tall matrix instead of many short ones
        run_product(y, tall, w, 1, batch * M, N, K, NULL, naive)
    else:
        run_product(y, x, w, batch, M, N, K, NULL, naive)
    if a.nd == 1 or b.nd == 1:
        shape = dims_tuple(y)[:lead] + ((M,) if a.nd > 1 else ()) + ((N,) if b.nd > 1 else ())
        y = reshape(y, shape)
    return y


cdef Array view_matrix(Array x, Py_ssize_t m, Py_ssize_t n):
    """x as one (m, n) matrix on the same memory, or None when no strides can express it."""
    if x.nd == 2:
        return x
    cdef Array out = alias(x)
    out.nd, out.dims[0], out.dims[1] = 2, m, n
    return out if reshape_strides(x, out) else None


cdef inline Array as_matrix(Array x, Py_ssize_t m, Py_ssize_t n):
    """x as one (m, n) matrix; copied only when it has to be."""
    cdef Array out = view_matrix(x, m, n)
    return out if out is not None else view_matrix(duplicate(x), m, n)


cdef inline Array turned(Array x):
    """The transpose of a matrix: its two strides swapped."""
    cdef Array out = alias(x)
    out.dims[0], out.dims[1], out.steps[0], out.steps[1] = x.dims[1], x.dims[0], x.steps[1], x.steps[0]
    return out


cdef void fill_offsets(Py_ssize_t *offsets, Array x, Array y):
    """Where each matrix of x starts, one entry per matrix of y (leading axes in row-major order, size 1 repeated)."""
    cdef Py_ssize_t batch = 1, n, i, j, rest, lead = y.nd - 2, missing = y.nd - x.nd
    for i in range(lead):
        batch *= y.dims[i]
    for n in range(batch):
        rest, offsets[n] = n, 0
        for i in range(lead - 1, -1, -1):
            j = i - missing
            if j >= 0 and x.dims[j] != 1:
                offsets[n] += rest % y.dims[i] * x.steps[j]
            rest //= y.dims[i]


cdef int run_product(Array y, Array x, Array w, Py_ssize_t batch, Py_ssize_t M, Py_ssize_t N, Py_ssize_t K,
                     const cmha_epilogue *after, bint naive) except -1:
    """y = x @ w, then what `after` says; y is contiguous."""
    cdef Py_ssize_t zero = 0, needed, i
    cdef Array places, scratch
    cdef Py_ssize_t *offsets = &zero
    cdef int threads = gate_flops(2.0 * batch * M * N * K)
    cdef cmha_matrix c, a, b
    c.offsets = a.offsets = b.offsets = offsets
    if batch > 1:
        places = new_vector(INT64, 3 * batch)
        offsets = <Py_ssize_t *>places.data
        for i in range(batch):
            offsets[i] = i * M * N
        fill_offsets(offsets + batch, x, y)
        fill_offsets(offsets + 2 * batch, w, y)
        c.offsets, a.offsets, b.offsets = offsets, offsets + batch, offsets + 2 * batch
    c.data, c.row, c.col = floats(y), N, 1
    a.data, a.row, a.col = floats(x), x.steps[x.nd - 2], x.steps[x.nd - 1]
    b.data, b.row, b.col = floats(w), w.steps[w.nd - 2], w.steps[w.nd - 1]
    cmha_matmul_scratch(&needed, M, N, K, threads)
    scratch = new_vector(FLOAT, needed)
    with nogil:
        if naive:
            cmha_matmul_naive(&c, &a, &b, after, batch, M, N, K, 0)
        else:
            cmha_matmul(&c, &a, &b, after, batch, M, N, K, 0, floats(scratch), threads)
    return 0


def matmul(Array a not None, Array b not None):
    """a @ b; leading axes broadcast, a 1-D a is one row, a 1-D b one column."""
    return product(a, b, False)


def matmul_naive(Array a not None, Array b not None):
    """The same bits by three plain loops: the oracle of the tests."""
    return product(a, b, True)


cdef Py_ssize_t linear_rows(Array x, Array weight) except -1:
    """Checks x (..., n_in) against weight (n_in, n_out); the number of rows of x."""
    need("linear", "x", x, FLOAT)
    need("linear", "weight", weight, FLOAT, 2)
    if x.nd == 0 or x.dims[x.nd - 1] != weight.dims[0]:
        raise ValueError(f"[linear] x must be (..., n_in) for weight (n_in, n_out); got x {dims_tuple(x)}, "
                         f"weight {dims_tuple(weight)}")
    cdef Py_ssize_t rows = 1
    cdef int i
    for i in range(x.nd - 1):
        rows *= x.dims[i]
    return rows


def linear_forward(Array x not None, Array weight not None, Array bias=None, Array residual=None, bint gelu=False):
    """x (..., n_in) @ weight (n_in, n_out) [+ bias (n_out)] [+ residual (..., n_out)] as one product over all rows.

    With gelu the pair (GELU of that, that): backward needs what went into it.
    """
    cdef Py_ssize_t rows = linear_rows(x, weight), n_in = weight.dims[0], n_out = weight.dims[1]
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef cmha_epilogue after
    cdef Array activated
    memset(&after, 0, sizeof(after))
    memcpy(dims, x.dims, sizeof(dims))
    dims[x.nd - 1] = n_out
    cdef Array y = new_array(FLOAT, x.nd, dims)
    if bias is not None:
        need("linear", "bias", bias, FLOAT, 1)
        if bias.dims[0] != n_out:
            raise ValueError(f"[linear] bias must be (n_out,); got {dims_tuple(bias)}, expected ({n_out},)")
        bias = packed(bias)
        after.bias = floats(bias)
    if residual is not None:
        need("linear", "residual", residual, FLOAT)
        need_same_shape("linear", "residual", residual, "x W", y)
        residual = packed(residual)
        after.residual = floats(residual)
    if gelu:
        activated = like(y)
        after.activated = floats(activated)
    run_product(y, as_matrix(x, rows, n_in), weight, 1, rows, n_out, n_in, &after, False)
    return (activated, y) if gelu else y


def linear_backward(Array dy not None, Array x not None, Array weight not None, bint with_bias):
    """dx = dy W^T, dW = x^T dy and, with_bias, db = the sum of dy over all rows; transposes are swapped strides."""
    cdef Py_ssize_t rows = linear_rows(x, weight), n_in = weight.dims[0], n_out = weight.dims[1]
    need("linear", "dy", dy, FLOAT)
    if dy.nd != x.nd or dy.dims[dy.nd - 1] != n_out or memcmp(dy.dims, x.dims, (x.nd - 1) * sizeof(Py_ssize_t)):
        raise ValueError(f"[linear] dy must have the output's shape; got {dims_tuple(dy)}, "
                         f"expected {dims_tuple(x)[:x.nd - 1] + (n_out,)}")
    cdef Array x_rows = as_matrix(x, rows, n_in), dy_rows = as_matrix(dy, rows, n_out)
    cdef Array dx = like(x), dweight = new_matrix(FLOAT, n_in, n_out), dbias
    cdef int threads = gate(dy.length)
    run_product(dx, dy_rows, turned(weight), 1, rows, n_in, n_out, NULL, False)
    run_product(dweight, turned(x_rows), dy_rows, 1, n_in, n_out, rows, NULL, False)
    if not with_bias:
        return dx, dweight
    dbias, dy_rows = new_vector(FLOAT, n_out), packed(dy_rows)
    with nogil:
        cmha_sum(floats(dbias), floats(dy_rows), 1, rows, n_out, 1.0, threads)
    return dx, dweight, dbias

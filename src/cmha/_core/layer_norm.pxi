# Layer norm over the last axis.

cdef extern from "dispatch.h" nogil:
    void cmha_layer_norm_forward(float *y, float *stats, const float *x, const float *gamma, const float *beta,
                                 Py_ssize_t M, Py_ssize_t N, float eps, int threads) noexcept
    void cmha_layer_norm_backward(float *dx, float *dgamma, float *dbeta, const float *dy, const float *x,
                                  const float *stats, const float *gamma, Py_ssize_t M, Py_ssize_t N, float *lanes,
                                  int threads) noexcept


cdef int need_width(str name, Array vector, Array x) except -1:
    """gamma and beta are (N,) for x (..., N)."""
    need("layer_norm", name, vector, FLOAT, 1)
    if x.nd == 0 or vector.dims[0] != x.dims[x.nd - 1]:
        raise ValueError(f"[layer_norm] {name} must have the size of x's last axis; "
                         f"got x {dims_tuple(x)}, {name} {dims_tuple(vector)}")
    return 0


def layer_norm_forward(Array x, Array gamma, Array beta, double eps):
    """y and stats (M, 3) for backward: each row's mean (two floats) and 1 / sigma. beta may be None."""
    need("layer_norm", "x", x, FLOAT)
    need_width("gamma", gamma, x)
    if beta is not None:
        need_width("beta", beta, x)
    if not 0 <= eps < 3e38:
        raise ValueError(f"[layer_norm] eps must be a number of at least 0; got {eps}")
    x, gamma, beta = packed(x), packed(gamma), None if beta is None else packed(beta)
    cdef Py_ssize_t N = gamma.length, M = x.length // N if N else 0
    cdef Array y = like(x), stats = new_matrix(FLOAT, M, 3)
    cdef float *shift = NULL if beta is None else floats(beta)
    cdef int threads = gate(x.length)
    with nogil:
        cmha_layer_norm_forward(floats(y), floats(stats), floats(x), floats(gamma), shift, M, N, eps, threads)
    return y, stats


def layer_norm_backward(Array dy, Array x, Array stats, Array gamma):
    """dx, dgamma, dbeta."""
    need("layer_norm", "x", x, FLOAT)
    need("layer_norm", "dy", dy, FLOAT)
    need_same_shape("layer_norm", "dy", dy, "x", x)
    need_width("gamma", gamma, x)
    need("layer_norm", "stats", stats, FLOAT, 2)
    dy, x, stats, gamma = packed(dy), packed(x), packed(stats), packed(gamma)
    cdef Py_ssize_t N = gamma.length, M = x.length // N if N else 0
    if stats.dims[0] != M or stats.dims[1] != 3:
        raise ValueError(f"[layer_norm] stats must be those of x; got stats {dims_tuple(stats)}, expected {(M, 3)}")
    cdef Array dx = like(x), dgamma = new_vector(FLOAT, N), dbeta = new_vector(FLOAT, N)
    cdef Array lanes = new_vector(FLOAT, (M + 511) // 512 * 32 * N)
    cdef int threads = gate(x.length)
    with nogil:
        cmha_layer_norm_backward(floats(dx), floats(dgamma), floats(dbeta), floats(dy), floats(x), floats(stats),
                                 floats(gamma), M, N, floats(lanes), threads)
    return dx, dgamma, dbeta

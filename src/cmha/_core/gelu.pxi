# GELU, the tanh form.

cdef extern from "dispatch.h" nogil:
    void cmha_gelu_forward(float *y, const float *x, Py_ssize_t n, int threads) noexcept
    void cmha_gelu_backward(float *dx, const float *dy, const float *x, Py_ssize_t n, int threads) noexcept


def gelu_forward(Array x not None):
    cdef Array source = dense(x), y = like(x)
    cdef int threads = gate(x.length)
    with nogil:
        cmha_gelu_forward(floats(y), floats(source), y.length, threads)
    return y


def gelu_backward(Array dy not None, Array x not None):
    need_same_shape("gelu", "dy", dy, "x", x)
    cdef Array d = dense(dy), source = dense(x), dx = like(x)
    cdef int threads = gate(x.length)
    with nogil:
        cmha_gelu_backward(floats(dx), floats(d), floats(source), dx.length, threads)
    return dx

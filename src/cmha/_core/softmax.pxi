# Softmax and log-softmax along any axis. The kernels know rows; another axis is brought to the end by a copy.

cdef extern from "dispatch.h" nogil:
    void cmha_softmax_forward(float *y, const float *x, Py_ssize_t M, Py_ssize_t N, int threads) noexcept
    void cmha_softmax_backward(float *dx, const float *dy, const float *y, Py_ssize_t M, Py_ssize_t N,
                               int threads) noexcept
    void cmha_log_softmax_forward(float *y, const float *x, Py_ssize_t M, Py_ssize_t N, int threads) noexcept
    void cmha_log_softmax_backward(float *dx, const float *dy, const float *y, Py_ssize_t M, Py_ssize_t N,
                                   int threads) noexcept

ctypedef void (*row_forward)(float *, const float *, Py_ssize_t, Py_ssize_t, int) noexcept nogil
ctypedef void (*row_backward)(float *, const float *, const float *, Py_ssize_t, Py_ssize_t, int) noexcept nogil


cdef Py_ssize_t softmax_axis(str op, Array x, object axis) except -1:
    if x.nd == 0:
        raise ValueError(f"[{op}] needs at least one axis; got shape ()")
    try:
        return read_axis(op, axis, x.nd)
    except ValueError:
        raise ValueError(f"[{op}] axis out of range; got axis {short(axis)} for shape {dims_tuple(x)}, "
                         f"expected -{x.nd} .. {x.nd - 1}") from None


cdef Array exchange_last(Array x, Py_ssize_t axis):
    """A view with `axis` and the last axis exchanged; the same call brings them back."""
    cdef Array out = alias(x)
    cdef Py_ssize_t last = x.nd - 1
    out.dims[axis], out.dims[last] = x.dims[last], x.dims[axis]
    out.steps[axis], out.steps[last] = x.steps[last], x.steps[axis]
    return out


cdef Array along_rows(str op, Array x, object given_axis, row_forward kernel):
    cdef Py_ssize_t axis = softmax_axis(op, x, given_axis), N = x.dims[axis]
    cdef Array rows = dense(exchange_last(x, axis)), y = like(rows)
    cdef Py_ssize_t M = y.length // N if N else 0
    cdef int threads = gate(y.length)
    with nogil:
        kernel(floats(y), floats(rows), M, N, threads)
    return packed(exchange_last(y, axis))


cdef Array along_rows_backward(str op, Array dy, Array y, object given_axis, row_backward kernel):
    need_same_shape(op, "dy", dy, "y", y)
    cdef Py_ssize_t axis = softmax_axis(op, y, given_axis), N = y.dims[axis]
    cdef Array gradient = dense(exchange_last(dy, axis)), rows = dense(exchange_last(y, axis)), dx = like(rows)
    cdef Py_ssize_t M = dx.length // N if N else 0
    cdef int threads = gate(dx.length)
    with nogil:
        kernel(floats(dx), floats(gradient), floats(rows), M, N, threads)
    return packed(exchange_last(dx, axis))


def softmax_forward(Array x not None, axis=-1):
    """Every line of x along `axis` becomes positive and sums to one; a line of -inf only becomes zeros."""
    return along_rows("softmax", x, axis, cmha_softmax_forward)


def softmax_backward(Array dy not None, Array y not None, axis=-1):
    return along_rows_backward("softmax", dy, y, axis, cmha_softmax_backward)


def log_softmax_forward(Array x not None, axis=-1):
    """The logarithm of softmax; a line of -inf only stays -inf and has gradient zero."""
    return along_rows("log_softmax", x, axis, cmha_log_softmax_forward)


def log_softmax_backward(Array dy not None, Array y not None, axis=-1):
    return along_rows_backward("log_softmax", dy, y, axis, cmha_log_softmax_backward)

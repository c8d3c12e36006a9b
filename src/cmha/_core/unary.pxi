# Functions of one element, and clip. Backward is given dy, x and y and reads the one its slope follows from.

cdef extern from "dispatch.h" nogil:
    enum:
        CMHA_EXP, CMHA_LOG, CMHA_SQRT, CMHA_TANH, CMHA_SIGMOID, CMHA_RELU, CMHA_ABS, CMHA_NEGATIVE
    void cmha_unary(float *y, const float *x, int op, Py_ssize_t n, int threads) noexcept
    void cmha_unary_backward(float *dx, const float *dy, const float *x, const float *y, int op, Py_ssize_t n,
                             int threads) noexcept
    void cmha_clip_forward(float *y, const float *x, float lowest, float highest, Py_ssize_t n, int threads) noexcept
    void cmha_clip_backward(float *dx, const float *dy, const float *x, float lowest, float highest, Py_ssize_t n,
                            int threads) noexcept


cdef inline Array dense(Array x):
    """float32 and contiguous, as the kernels of this file take it."""
    return packed(as_float(x))


cdef Array unary(Array x, int op):
    cdef Array source = dense(x), y = like(x)
    cdef int threads = gate(x.length)
    with nogil:
        cmha_unary(floats(y), floats(source), op, y.length, threads)
    return y


cdef Array unary_backward(str name, Array dy, str saved_name, Array saved, int op):
    """`saved` is the one of x and y that the kernel reads."""
    need_same_shape(name, "dy", dy, saved_name, saved)
    cdef Array d = dense(dy), s = dense(saved), dx = like(dy)
    cdef int threads = gate(dy.length)
    with nogil:
        cmha_unary_backward(floats(dx), floats(d), floats(s), floats(s), op, dx.length, threads)
    return dx


def exp_forward(Array x not None):
    return unary(x, CMHA_EXP)


def exp_backward(Array dy not None, Array x not None, Array y not None):
    return unary_backward("exp", dy, "y", y, CMHA_EXP)


def log_forward(Array x not None):
    return unary(x, CMHA_LOG)


def log_backward(Array dy not None, Array x not None, Array y not None):
    return unary_backward("log", dy, "x", x, CMHA_LOG)


def sqrt_forward(Array x not None):
    return unary(x, CMHA_SQRT)


def sqrt_backward(Array dy not None, Array x not None, Array y not None):
    return unary_backward("sqrt", dy, "y", y, CMHA_SQRT)


def tanh_forward(Array x not None):
    return unary(x, CMHA_TANH)


def tanh_backward(Array dy not None, Array x not None, Array y not None):
    return unary_backward("tanh", dy, "y", y, CMHA_TANH)


def sigmoid_forward(Array x not None):
    return unary(x, CMHA_SIGMOID)


def sigmoid_backward(Array dy not None, Array x not None, Array y not None):
    return unary_backward("sigmoid", dy, "y", y, CMHA_SIGMOID)


def relu_forward(Array x not None):
    return unary(x, CMHA_RELU)


def relu_backward(Array dy not None, Array x not None, Array y not None):
    return unary_backward("relu", dy, "x", x, CMHA_RELU)


def abs_forward(Array x not None):
    return unary(x, CMHA_ABS)


def abs_backward(Array dy not None, Array x not None, Array y not None):
    return unary_backward("abs", dy, "x", x, CMHA_ABS)


def negative_forward(Array x not None):
    return unary(x, CMHA_NEGATIVE)


cdef int check_bounds(double lowest, double highest) except -1:
    if not lowest <= highest:               # so that NaN is refused too
        raise ValueError(f"[clip] lowest must not be above highest; got lowest {lowest}, highest {highest}")
    return 0


def clip_forward(Array x not None, double lowest, double highest):
    """min(max(x, lowest), highest)."""
    check_bounds(lowest, highest)
    cdef Array source = dense(x), y = like(x)
    cdef int threads = gate(x.length)
    with nogil:
        cmha_clip_forward(floats(y), floats(source), <float>lowest, <float>highest, y.length, threads)
    return y


def clip_backward(Array dy not None, Array x not None, double lowest, double highest):
    """dy where lowest <= x <= highest, else 0."""
    check_bounds(lowest, highest)
    need_same_shape("clip", "dy", dy, "x", x)
    cdef Array d = dense(dy), source = dense(x), dx = like(x)
    cdef int threads = gate(x.length)
    with nogil:
        cmha_clip_backward(floats(dx), floats(d), floats(source), <float>lowest, <float>highest, dx.length, threads)
    return dx

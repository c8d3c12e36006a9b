# Two operands, element by element, with NumPy's broadcasting. int64 and bool count as float32.

cdef extern from "dispatch.h" nogil:
    enum:
        CMHA_ADD, CMHA_SUBTRACT, CMHA_MULTIPLY, CMHA_DIVIDE
        CMHA_LESS, CMHA_LESS_EQUAL, CMHA_EQUAL, CMHA_NOT_EQUAL
    void cmha_binary(float *y, const float *a, const float *b, int op, int ndim, const Py_ssize_t *shape,
                     const Py_ssize_t *a_strides, const Py_ssize_t *b_strides, int threads) noexcept
    void cmha_compare(uint8_t *y, const float *a, const float *b, int op, int ndim, const Py_ssize_t *shape,
                      const Py_ssize_t *a_strides, const Py_ssize_t *b_strides, int threads) noexcept
    void cmha_where(float *y, const uint8_t *condition, const float *a, const float *b, int ndim,
                    const Py_ssize_t *shape, const Py_ssize_t *condition_strides, const Py_ssize_t *a_strides,
                    const Py_ssize_t *b_strides, int threads) noexcept


cdef bint broadcast_dims(Py_ssize_t *dims, int nd, Array x) noexcept:
    """Widen dims (nd axes, at least x's) by x's sizes; False where neither is 1 and they differ."""
    cdef int i
    cdef Py_ssize_t *d
    for i in range(x.nd):
        d = &dims[nd - x.nd + i]
        if d[0] == 1:
            d[0] = x.dims[i]
        elif x.dims[i] != 1 and x.dims[i] != d[0]:
            return False
    return True


cdef void broadcast_steps(Py_ssize_t *steps, int nd, Array x) noexcept:
    """x's strides under nd axes: 0 where its one element is repeated."""
    cdef int i
    for i in range(nd - x.nd):
        steps[i] = 0
    for i in range(x.nd):
        steps[nd - x.nd + i] = 0 if x.dims[i] == 1 else x.steps[i]


cdef Array binary(str name, Array a, Array b, int op, Kind kind):
    """kind of the result: FLOAT for arithmetic, BOOL for comparisons."""
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef Py_ssize_t[MAX_NDIM] a_steps
    cdef Py_ssize_t[MAX_NDIM] b_steps
    cdef int nd = max(a.nd, b.nd), i, threads
    for i in range(nd):
        dims[i] = 1
    if not (broadcast_dims(dims, nd, a) and broadcast_dims(dims, nd, b)):
        raise ValueError(f"[{name}] shapes must broadcast; got a {dims_tuple(a)}, b {dims_tuple(b)}")
    a, b = as_float(a), as_float(b)
    cdef Array y = new_array(kind, nd, dims)
    broadcast_steps(a_steps, nd, a)
    broadcast_steps(b_steps, nd, b)
    threads = gate(y.length)
    with nogil:
        if kind == FLOAT:
            cmha_binary(floats(y), floats(a), floats(b), op, nd, dims, a_steps, b_steps, threads)
        else:
            cmha_compare(<uint8_t *>y.data, floats(a), floats(b), op, nd, dims, a_steps, b_steps, threads)
    return y


def add(Array a not None, Array b not None):
    return binary("add", a, b, CMHA_ADD, FLOAT)


def subtract(Array a not None, Array b not None):
    return binary("subtract", a, b, CMHA_SUBTRACT, FLOAT)


def multiply(Array a not None, Array b not None):
    return binary("multiply", a, b, CMHA_MULTIPLY, FLOAT)


def divide(Array a not None, Array b not None):
    return binary("divide", a, b, CMHA_DIVIDE, FLOAT)


def less(Array a not None, Array b not None):
    """bool, like the other comparisons; with NaN all are false but not_equal."""
    return binary("less", a, b, CMHA_LESS, BOOL)


def less_equal(Array a not None, Array b not None):
    return binary("less_equal", a, b, CMHA_LESS_EQUAL, BOOL)


def equal(Array a not None, Array b not None):
    return binary("equal", a, b, CMHA_EQUAL, BOOL)


def not_equal(Array a not None, Array b not None):
    return binary("not_equal", a, b, CMHA_NOT_EQUAL, BOOL)


def where(Array condition, Array a not None, Array b not None):
    """a where the bool condition holds, else b; all three broadcast."""
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef Py_ssize_t[MAX_NDIM] condition_steps
    cdef Py_ssize_t[MAX_NDIM] a_steps
    cdef Py_ssize_t[MAX_NDIM] b_steps
    need("where", "condition", condition, BOOL)
    cdef int nd = max(condition.nd, a.nd, b.nd), i, threads
    for i in range(nd):
        dims[i] = 1
    if not (broadcast_dims(dims, nd, condition) and broadcast_dims(dims, nd, a) and broadcast_dims(dims, nd, b)):
        raise ValueError(f"[where] shapes must broadcast; got condition {dims_tuple(condition)}, "
                         f"a {dims_tuple(a)}, b {dims_tuple(b)}")
    a, b = as_float(a), as_float(b)
    cdef Array y = new_array(FLOAT, nd, dims)
    broadcast_steps(condition_steps, nd, condition)
    broadcast_steps(a_steps, nd, a)
    broadcast_steps(b_steps, nd, b)
    threads = gate(y.length)
    with nogil:
        cmha_where(floats(y), <uint8_t *>condition.data, floats(a), floats(b), nd, dims, condition_steps, a_steps,
                   b_steps, threads)
    return y

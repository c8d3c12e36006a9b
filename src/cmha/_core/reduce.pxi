# Reductions. The kernels know (outer, n, inner); here any set of axes becomes that, by a copy only if it is scattered.

cdef extern from "dispatch.h" nogil:
    void cmha_sum(float *y, const float *x, Py_ssize_t outer, Py_ssize_t n, Py_ssize_t inner, double divisor,
                  int threads) noexcept
    void cmha_var(float *y, const float *x, Py_ssize_t outer, Py_ssize_t n, Py_ssize_t inner, int threads) noexcept
    void cmha_extreme(float *y, int64_t *index, const float *x, int sign, Py_ssize_t outer, Py_ssize_t n,
                      Py_ssize_t inner, int threads) noexcept
    void cmha_extreme_backward(float *dx, const float *dy, const int64_t *index, Py_ssize_t outer, Py_ssize_t n,
                               Py_ssize_t inner, int threads) noexcept
    void cmha_sum_of_squares(double *y, const float *x, Py_ssize_t n, double *totals, int threads) noexcept

cdef enum Reduction:
    SUM, MEAN, VAR


cdef int read_axes(str op, object axes, int nd, bint *reduced) except -1:
    """Marks each axis of the tuple `axes`; none twice."""
    cdef Py_ssize_t axis
    memset(reduced, 0, MAX_NDIM * sizeof(bint))
    for given in axes:
        axis = read_axis(op, given, nd)
        if reduced[axis]:
            raise ValueError(f"[{op}] each axis at most once; got {tuple(axes)}")
        reduced[axis] = True
    return 0


cdef Array reduce(Array x, const bint *reduced, Reduction how):
    """Over the marked axes, which are gone in the result. An empty sum is 0, an empty mean or variance NaN."""
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef Py_ssize_t outer = 1, n = 1, inner = 1
    cdef Array moved
    cdef int i, kept = 0, last = 0, threads
    cdef bint adjacent = True, begun = False, ended = False
    x = as_float(x)
    for i in range(x.nd):                   # axes of size 1 are adjacent to everything
        if reduced[i]:
            adjacent &= not (ended and x.dims[i] != 1)
            begun |= x.dims[i] != 1
            n *= x.dims[i]
        else:
            ended |= begun and x.dims[i] != 1
            dims[kept] = x.dims[i]
            kept += 1
            if begun:
                inner *= x.dims[i]
            else:
                outer *= x.dims[i]
    if not adjacent:                        # bring the reduced axes to the end, in their order
        moved = alias(x)
        last = kept
        kept = 0
        for i in range(x.nd):
            if reduced[i]:
                moved.dims[last], moved.steps[last] = x.dims[i], x.steps[i]
                last += 1
            else:
                moved.dims[kept], moved.steps[kept] = x.dims[i], x.steps[i]
                kept += 1
        x, outer, inner = moved, outer * inner, 1
    x = packed(x)
    cdef Array y = new_array(FLOAT, kept, dims)
    threads = gate(x.length)
    with nogil:
        if how == VAR:
            cmha_var(floats(y), floats(x), outer, n, inner, threads)
        else:
            cmha_sum(floats(y), floats(x), outer, n, inner, <double>n if how == MEAN else 1.0, threads)
    return y


def sum(Array x not None, axes):
    """Over a tuple of axes, which are gone in the result."""
    cdef bint[MAX_NDIM] reduced
    read_axes("sum", axes, x.nd, reduced)
    return reduce(x, reduced, SUM)


def mean(Array x not None, axes):
    """NaN where there is nothing to average."""
    cdef bint[MAX_NDIM] reduced
    read_axes("mean", axes, x.nd, reduced)
    return reduce(x, reduced, MEAN)


def var(Array x not None, axes):
    """The mean of (x - mean)^2."""
    cdef bint[MAX_NDIM] reduced
    read_axes("var", axes, x.nd, reduced)
    return reduce(x, reduced, VAR)


def sum_to(Array x not None, shape):
    """What undoes broadcasting from `shape`: sums of new leading axes and of axes that had size 1. x itself if none."""
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef bint[MAX_NDIM] reduced
    cdef int nd = read_shape("sum_to", shape, dims), lead = x.nd - nd, i
    cdef bint fits = lead >= 0, equal = lead == 0
    for i in range(x.nd):
        if i < lead:
            reduced[i] = True
            continue
        reduced[i] = fits and dims[i - lead] == 1 and x.dims[i] != 1
        fits = fits and (reduced[i] or dims[i - lead] == x.dims[i])
        equal &= not reduced[i]
    if not fits:
        raise ValueError(f"[sum_to] shape must broadcast to x's; got x {dims_tuple(x)}, shape {tuple(shape)}")
    if equal:
        return x
    cdef Array y = reduce(x, reduced, SUM)
    y.nd = nd
    memcpy(y.dims, dims, sizeof(dims))
    pack_strides(y)
    return y


cdef void split_at(Array x, Py_ssize_t axis, Py_ssize_t *outer, Py_ssize_t *inner) noexcept:
    cdef int i
    outer[0] = inner[0] = 1
    for i in range(x.nd):
        if i < axis:
            outer[0] *= x.dims[i]
        elif i > axis:
            inner[0] *= x.dims[i]


cdef Array without_axis(Kind kind, Array x, Py_ssize_t axis):
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef int i, nd = 0
    for i in range(x.nd):
        if i != axis:
            dims[nd] = x.dims[i]
            nd += 1
    return new_array(kind, nd, dims)


def extreme(Array x not None, axis, int sign):
    """(values, index) of the largest (sign 1) or smallest (-1) along an axis; the first of equals, NaN before all."""
    cdef str name = "max" if sign > 0 else "min"
    cdef Py_ssize_t at = read_axis(name, axis, x.nd), outer, n = x.dims[at], inner
    if n == 0:
        raise ValueError(f"[{name}] the axis must not be empty; got axis {at} of shape {dims_tuple(x)}")
    cdef Array rows = packed(as_float(x)), y = without_axis(FLOAT, x, at), index = without_axis(INT64, x, at)
    cdef int threads = gate(x.length)
    split_at(x, at, &outer, &inner)
    with nogil:
        cmha_extreme(floats(y), <int64_t *>index.data, floats(rows), sign, outer, n, inner, threads)
    return y, index


def extreme_backward(Array dy not None, Array index not None, axis, shape):
    """dx of `shape`: dy at index along the axis, 0 elsewhere."""
    cdef Array dx = empty(shape)
    cdef Py_ssize_t at = read_axis("extreme_backward", axis, dx.nd), outer, inner, n = dx.dims[at]
    need("extreme_backward", "dy", dy, FLOAT, dx.nd - 1)
    need("extreme_backward", "index", index, INT64, dx.nd - 1)
    split_at(dx, at, &outer, &inner)
    need_same_shape("extreme_backward", "dy", dy, "index", index)
    if dy.length != outer * inner:
        raise ValueError(f"[extreme_backward] dy must lack the axis only; got dy {dims_tuple(dy)}, x {dims_tuple(dx)}")
    dy, index = packed(dy), packed(index)
    cdef int threads = gate(dx.length)
    with nogil:
        cmha_extreme_backward(floats(dx), floats(dy), <int64_t *>index.data, outer, n, inner, threads)
    return dx


def sums_of_squares(list arrays):
    """[a Python float per array]: each array's sum in double, for the norm of all of them."""
    cdef Array x, totals
    cdef double y
    cdef int threads
    sums = []
    for array in arrays:
        need("sums_of_squares", "x", array, FLOAT)
        x = packed(array)
        totals = new_vector(INT64, (x.length + 511) // 512)             # memory for doubles
        threads = gate(x.length)
        with nogil:
            cmha_sum_of_squares(&y, floats(x), x.length, <double *>totals.data, threads)
        sums.append(y)
    return sums

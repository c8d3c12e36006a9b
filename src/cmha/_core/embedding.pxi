# Rows of a table by id. Ids are checked here, because the kernel cannot fail.

cdef extern from "dispatch.h" nogil:
    void cmha_embedding_forward(float *y, const float *weight, const int64_t *ids, Py_ssize_t n, Py_ssize_t D,
                                int threads) noexcept
    void cmha_embedding_backward(float *dweight, const float *dy, const int64_t *ids, Py_ssize_t n, Py_ssize_t V,
                                 Py_ssize_t D, int threads) noexcept
    void cmha_embedding_add_rows(float *weight, const float *rows, const int64_t *ids, Py_ssize_t n, Py_ssize_t D,
                                 int threads) noexcept


cdef int check_ids(str op, Array ids, Py_ssize_t V) except -1:
    """Every id (contiguous) in 0 .. V - 1; the error names the first that is not and where it stands."""
    cdef const int64_t *id = <const int64_t *>ids.data
    cdef Py_ssize_t i, bad = -1
    with nogil:
        for i in range(ids.length):
            if id[i] < 0 or id[i] >= V:
                bad = i
                break
    if bad < 0:
        return 0
    place, rest = [], bad
    for n in reversed(dims_tuple(ids)):
        place.insert(0, rest % n)
        rest //= n
    allowed = f"0 .. {V - 1}" if V else "none: the table is empty"
    raise IndexError(f"[{op}] id out of range; got {id[bad]} at position {tuple(place)}, expected {allowed}")


def embedding_forward(Array weight, Array ids):
    """weight (V, D), ids (...) -> (..., D)."""
    need("embedding", "weight", weight, FLOAT, 2)
    need("embedding", "ids", ids, INT64)
    if ids.nd == MAX_NDIM:
        raise ValueError(f"[embedding] ids must have at most {MAX_NDIM - 1} axes; got shape {dims_tuple(ids)}")
    weight, ids = packed(weight), packed(ids)
    check_ids("embedding", ids, weight.dims[0])
    cdef Py_ssize_t[MAX_NDIM] dims
    cdef Py_ssize_t D = weight.dims[1]
    memcpy(dims, ids.dims, sizeof(dims))
    dims[ids.nd] = D
    cdef Array y = new_array(FLOAT, ids.nd + 1, dims)
    cdef int threads = gate(y.length)
    with nogil:
        cmha_embedding_forward(floats(y), floats(weight), <int64_t *>ids.data, ids.length, D, threads)
    return y


def embedding_backward(Array dy, Array ids, Py_ssize_t V):
    """dy (..., D), ids (...) -> dweight (V, D)."""
    need("embedding", "ids", ids, INT64)
    need("embedding", "dy", dy, FLOAT, ids.nd + 1)
    if memcmp(dy.dims, ids.dims, ids.nd * sizeof(Py_ssize_t)) or V < 0:
        raise ValueError(f"[embedding] dy must have the axes of ids and one more; "
                         f"got dy {dims_tuple(dy)}, ids {dims_tuple(ids)}")
    dy, ids = packed(dy), packed(ids)
    check_ids("embedding", ids, V)
    cdef Py_ssize_t D = dy.dims[dy.nd - 1]
    cdef Array dweight = new_matrix(FLOAT, V, D)
    cdef int threads = gate(dy.length + dweight.length)
    with nogil:
        cmha_embedding_backward(floats(dweight), floats(dy), <int64_t *>ids.data, ids.length, V, D, threads)
    return dweight


def embedding_add_rows(Array weight, Array rows, Array ids):
    """A copy of weight (V, D) with rows (n, D) added at ids (n), which differ from each other."""
    need("embedding", "weight", weight, FLOAT, 2)
    need("embedding", "rows", rows, FLOAT, 2)
    need("embedding", "ids", ids, INT64, 1)
    cdef Array y = duplicate(weight)
    cdef Py_ssize_t n = ids.length, D = weight.dims[1]
    if rows.dims[0] != n or rows.dims[1] != D:
        raise ValueError(f"[embedding] rows must be one of weight for every id; got weight {dims_tuple(weight)}, "
                         f"rows {dims_tuple(rows)}, ids {dims_tuple(ids)}")
    rows, ids = packed(rows), packed(ids)
    check_ids("embedding", ids, weight.dims[0])
    cdef int threads = gate(rows.length)
    with nogil:
        cmha_embedding_add_rows(floats(y), floats(rows), <int64_t *>ids.data, n, D, threads)
    return y

# Mean cross-entropy over the rows whose target counts, with the gradient of the logits from the same pass.

cdef extern from "dispatch.h" nogil:
    void cmha_cross_entropy(float *loss, int64_t *count, float *dlogits, const float *logits, const int64_t *targets,
                            Py_ssize_t M, Py_ssize_t V, int64_t ignore_index, double *rows, int threads) noexcept


cdef int check_targets(Array targets, Py_ssize_t V, int64_t ignore_index) except -1:
    cdef const int64_t *ids = <const int64_t *>targets.data
    cdef Py_ssize_t i
    for i in range(targets.length):
        if ids[i] != ignore_index and not 0 <= ids[i] < V:
            raise IndexError(f"[cross_entropy] targets must be in 0..V-1 or ignore_index; got {ids[i]} at row {i}, "
                             f"expected below {V}")
    return 0


def cross_entropy(Array logits not None, Array targets not None, int64_t ignore_index=-1, bint need_grad=True):
    """logits (M, V), targets (M) -> loss (), gradient (M, V) for dloss = 1 or None, number of rows that counted."""
    need("cross_entropy", "logits", logits, FLOAT, 2)
    need("cross_entropy", "targets", targets, INT64, 1)
    if targets.length != logits.dims[0]:
        raise ValueError(f"[cross_entropy] logits (M, V) and targets (M) must agree; got logits {dims_tuple(logits)}, "
                         f"targets {dims_tuple(targets)}")
    cdef Py_ssize_t M = logits.dims[0], V = logits.dims[1]
    cdef Array x = packed(logits), ids = packed(targets)
    check_targets(ids, V, ignore_index)
    cdef Array loss = new_array(FLOAT, 0, logits.dims), rows = new_vector(INT64, M)    # 8 bytes each, as a double
    cdef Array gradient = like(x) if need_grad else None
    cdef float *dlogits = floats(gradient) if need_grad else NULL
    cdef int64_t count = 0
    cdef int threads = gate(x.length)
    with nogil:
        cmha_cross_entropy(floats(loss), &count, dlogits, floats(x), <const int64_t *>ids.data, M, V, ignore_index,
                           <double *>rows.data, threads)
    return loss, gradient, count

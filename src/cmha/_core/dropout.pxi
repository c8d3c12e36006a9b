# Dropout: forward, and backward on dy.

cdef extern from "dispatch.h" nogil:
    void cmha_dropout(float *y, const float *x, Py_ssize_t n, float p, uint64_t seed, uint64_t stream, uint64_t first,
                      int threads) noexcept


cdef uint64_t read_uint64(str op, str name, object number) except? 0:
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"[{op}] {name} must be an int; got {str(number)[:80]!r}")
    if not 0 <= number.__index__() < 2**64:
        raise ValueError(f"[{op}] {name} must be 0 .. 2**64 - 1; got {str(number)[:80]}")
    return number


def dropout(Array x, double p, seed, stream, first):
    """x / (1 - p) where the draw of element first + i of the stream is at least p, else 0."""
    cdef uint64_t key = read_uint64("dropout", "seed", seed), site = read_uint64("dropout", "stream", stream)
    cdef uint64_t start = read_uint64("dropout", "first", first)
    need("dropout", "x", x, FLOAT)
    if not 0 <= p <= 1:
        raise ValueError(f"[dropout] p must be 0 .. 1; got {p}")
    x = packed(x)
    cdef Array y = like(x)
    cdef int threads = gate(4.0 * x.length)     # a draw costs several additions
    with nogil:
        cmha_dropout(floats(y), floats(x), x.length, p, key, site, start, threads)
    return y

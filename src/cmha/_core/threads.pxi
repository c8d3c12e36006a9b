# How many threads a kernel may ask for, and which instruction set it runs on.

cdef extern from "parallel.h" nogil:
    void cmha_team_limit(int threads) noexcept

cdef int thread_limit = 1
cdef str variant_name = ""


cdef inline int parts_of(double work, double least, double piece) noexcept:
    """Parts to cut `work` into: 1 below `least`, where starting threads costs more than it saves; else one for every
    thread, and up to four when each is a `piece` of work still."""
    if thread_limit == 1 or work < least:
        return 1
    return thread_limit * <int>min(4.0, max(1.0, work / (piece * thread_limit)))


cdef inline int gate(double elements) noexcept:
    """Parts for simple operations on so many elements."""
    return parts_of(elements, 32000, 64000)


cdef inline int gate_flops(double flops) noexcept:
    """Parts for products and attention."""
    return parts_of(flops, 1e6, 8e6)


def set_num_threads(n):
    """Threads of every later call, for the whole process: an int from 1 to 1024."""
    global thread_limit
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"[set_num_threads] n must be an int; got {str(n)[:80]!r}")
    if not 1 <= n.__index__() <= 1024:
        raise ValueError(f"[set_num_threads] n must be 1 .. 1024; got {str(n)[:80]}")
    thread_limit = n
    cmha_team_limit(n)


def get_num_threads():
    """Threads that a large enough call uses."""
    return thread_limit


def has_openmp():
    return bool(threads_available())


def has_variant(str name not None):
    """Was this variant built, and does this processor run it?"""
    return bool(cmha_has_variant(name.encode()))


def use_variant(str name not None):
    """Run every later kernel on `name` ("" = the best there is)."""
    global variant_name
    cdef const char *chosen = cmha_dispatch(name.encode())
    if chosen == NULL:
        known = [v for v in ("base", "avx2", "avx512", "neon") if has_variant(v)]
        raise ValueError(f"[CMHA_SIMD] this machine runs {', '.join(known)}; got {name[:80]!r}")
    variant_name = chosen.decode()


def get_variant():
    return variant_name

# How many threads a kernel may ask for, and which instruction set it runs on.

cdef int thread_limit = 1
cdef str variant_name = ""


cdef inline int gate(double elements) noexcept:
    """Threads for `elements` simple element operations: below 32,000 starting them costs more than they save."""
    return thread_limit if elements >= 32000 else 1


cdef inline int gate_flops(double flops) noexcept:
    """The same for products: from about a million operations on."""
    return thread_limit if flops >= 1e6 else 1


def set_num_threads(n):
    """Threads of every later call, for the whole process: an int from 1 to 1024."""
    global thread_limit
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"[set_num_threads] n must be an int; got {str(n)[:80]!r}")
    if not 1 <= n.__index__() <= 1024:
        raise ValueError(f"[set_num_threads] n must be 1 .. 1024; got {str(n)[:80]}")
    thread_limit = n


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

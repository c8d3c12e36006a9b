# How many threads a kernel may ask for, and which instruction set it runs on.

cdef extern from "parallel.h" nogil:
    void cmha_team_limit(int threads) noexcept
    int parts_per_thread() noexcept
    const char *threads_kind() noexcept

cdef extern from *:
    int CYTHON_HEX_VERSION

cdef Py_ssize_t thread_limit = 1
cdef object limit_lock = object()       # two threads that set the limit take turns, where there is no GIL
cdef const char *variant_name = ""


cdef inline int parts_of(double work, double least, double piece) noexcept:
    """Parts to cut `work` into: 1 below `least`, where starting threads costs more than it saves; else one for every
    thread, and up to parts_per_thread() when each is a `piece` of work still."""
    cdef int threads = <int>word_read(&thread_limit)
    if threads == 1 or work < least:
        return 1
    return threads * <int>min(<double>parts_per_thread(), max(1.0, work / (piece * threads)))


cdef inline int gate(double elements) noexcept:
    """Parts for simple operations on so many elements."""
    return parts_of(elements, 32000, 64000)


cdef inline int gate_flops(double flops) noexcept:
    """Parts for products and attention."""
    return parts_of(flops, 1e6, 8e6)


def set_num_threads(n):
    """Threads of every later call, for the whole process: an int from 1 to 1024."""
    cdef int threads
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"[set_num_threads] n must be an int; got {str(n)[:80]!r}")
    if not 1 <= n.__index__() <= 1024:
        raise ValueError(f"[set_num_threads] n must be 1 .. 1024; got {str(n)[:80]}")
    threads = n
    with cython.critical_section(limit_lock):
        word_write(&thread_limit, threads)
        cmha_team_limit(threads)


def get_num_threads():
    """Threads that a large enough call uses."""
    return word_read(&thread_limit)


def has_openmp():
    """Was the core built with threads?"""
    return threads_kind() != b"none"


def has_variant(str name not None):
    """Was this variant built, and does this processor run it?"""
    return bool(cmha_has_variant(name.encode()))


def use_variant(str name not None):
    """Run every later kernel on `name` ("" = the best there is)."""
    global variant_name
    cdef const char *chosen = cmha_dispatch(name.encode())
    if chosen == NULL:
        known = [v for v in build_info()["variants"] if has_variant(v)]
        raise ValueError(f"[CMHA_SIMD] this machine runs {', '.join(known)}; got {name[:80]!r}")
    variant_name = chosen


def get_variant():
    return variant_name.decode()


def build_info():
    """How this module was built and what it found: a dict of strings and lists of strings."""
    cdef int i = 0
    names, flags, seen = [], [], []
    while cmha_variant_name(i) != NULL:
        names.append(cmha_variant_name(i).decode())
        flags.append(cmha_variant_flags(i).decode())
        i += 1
    i = 0
    while cmha_cpu_feature(i) != NULL:
        seen.append(cmha_cpu_feature(i).decode())
        i += 1
    return {
        "variants": names,
        "flags": flags,
        "cpu_features": seen,
        "threads_kind": threads_kind().decode(),
        "compiler": cmha_compiler().decode().strip(),
        "cython": ".".join([str(CYTHON_HEX_VERSION >> shift & 0xff) for shift in (24, 16, 8)]),  # a generator is 10 kB
    }

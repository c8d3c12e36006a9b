cdef extern from "canary.h" nogil:
    int cmha_is_sanitized() noexcept
    void cmha_canary_heap() noexcept
    void cmha_canary_overflow() noexcept


def canary(str fault):
    """Commits a 'heap' or 'overflow' fault, to prove that the sanitizers of a CMHA_SANITIZE=1 build are on."""
    if not cmha_is_sanitized():
        raise RuntimeError("[canary] only a build with CMHA_SANITIZE=1 has one")
    if fault == "heap":
        cmha_canary_heap()
    elif fault == "overflow":
        cmha_canary_overflow()
    else:
        raise ValueError(f"[canary] fault must be 'heap' or 'overflow'; got {fault!r}")

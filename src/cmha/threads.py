"""How many threads the kernels may use, and what this installation runs on."""

from __future__ import annotations

import math
import os

from cmha import _core


def _read(path: str) -> list[str]:
    with open(path, encoding="ascii") as file:
        return file.read().split()


def _cgroup_limit(root: str = "/sys/fs/cgroup") -> int | None:
    """CPUs that the container's quota allows, or None (cgroup v2's cpu.max, v1's cpu.cfs_*_us)."""
    try:
        if os.path.exists(f"{root}/cpu.max"):
            quota, period = _read(f"{root}/cpu.max")[:2]
        else:
            (quota,), (period,) = _read(f"{root}/cpu/cpu.cfs_quota_us"), _read(f"{root}/cpu/cpu.cfs_period_us")
        return max(1, math.ceil(int(quota) / int(period))) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def default_num_threads() -> int:
    """OMP_NUM_THREADS where it is a number from 1 to 1024 (its first level), else the CPUs this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked.isascii() and asked.isdigit() and 1 <= int(asked) <= 1024:
        return int(asked)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _cgroup_limit() or allowed, 1024))


def start() -> None:
    """Called once at import: choose the instruction set and the thread count."""
    _core.use_variant(os.environ.get("CMHA_SIMD", "").strip().lower())
    _core.set_num_threads(default_num_threads() if _core.has_openmp() else 1)


set_num_threads = _core.set_num_threads
get_num_threads = _core.get_num_threads
memory_stats = _core.memory_stats
reset_peak_memory_stats = _core.reset_peak_memory_stats


def installed_version(package: str) -> str:
    """Its version, or "not installed" for a source tree that is only on the path."""
    from importlib.metadata import PackageNotFoundError, version  # costs milliseconds, and few ask

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def show_config() -> dict[str, str | list[str]]:
    """What this installation is and runs on, for a bug report: a dict of strings and lists of strings.

    `simd` is the variant of the kernels that is used, `simd_available` those that this processor runs, `simd_built`
    those that are there, best first, and `flags` the compiler's flags for each of these. `cpu_features` are those of
    the processor that a variant asks for. `threads` is how many a large operation uses, `threads_kind` what runs them:
    "own team (OpenMP pragma)", "OpenMP (vcomp)" or "none".
    """
    import platform

    build = _core.build_info()
    return {
        "cmha": installed_version("cmha"),
        "python": platform.python_version(),
        "numpy": installed_version("numpy"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_features": build["cpu_features"],
        "simd": _core.get_variant(),
        "simd_available": [name for name in build["variants"] if _core.has_variant(name)],
        "simd_built": build["variants"],
        "threads": str(_core.get_num_threads()),
        "openmp": "no" if build["threads_kind"] == "none" else "yes",
        "threads_kind": build["threads_kind"],
        "compiler": build["compiler"],
        "flags": build["flags"],
        "cython": build["cython"],
    }

"""The machine: its name, and the rates that no kernel on it can pass."""

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np


def describe(threads):
    """Lines of the table's head, name -> text."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": f"{_processor()}, {cpus} CPUs{_virtual()}, {_memory()}",
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "threads": str(threads),
    }


def load():
    """Processes that wanted a CPU over the last minute, or None."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def busy_seconds(pid=None):
    """CPU seconds used so far by all processes (and by other guests of the host), or by one; None if unknown."""
    try:
        if pid is None:
            with open("/proc/stat") as file:
                user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
            ticks = user + nice + system + irq + softirq + steal
        else:
            with open(f"/proc/{pid}/stat") as file:
                ticks = sum(map(int, file.read().rsplit(")", 1)[1].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


class Disturbance:
    """How much of the machine's CPU time went to others while a side was timed."""

    def __init__(self):
        self.foreign = self.available = 0.0

    def watch(self, pid, function):
        before, own, start = busy_seconds(), busy_seconds(pid), time.perf_counter()
        try:
            return function()
        finally:
            after, own_after = busy_seconds(), busy_seconds(pid)
            if None not in (before, own, after, own_after):
                self.foreign += max(0.0, after - before - (own_after - own))
                self.available += (time.perf_counter() - start) * (os.cpu_count() or 1)

    def share(self):
        """From 0 to 1; None where too little was watched for clock ticks to tell."""
        return self.foreign / self.available if self.available > 0.2 else None


def _processor():
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.lower().startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _virtual():
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return " (virtual)" if " hypervisor" in file.read() else ""
    except OSError:
        return ""


def _memory():
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (ValueError, OSError, AttributeError):
        return "memory unknown"


def peaks(threads, smoke=False):
    """{"flops": FLOP/s, "bytes": read bytes/s, "how": text}: the best of several runs on `threads` threads."""
    random = np.random.default_rng(0)
    block = random.random(2**20, dtype=np.float32) + np.float32(0.5)
    memory = np.tile(block, 4 if smoke else 128)  # 512 MiB: no cache holds it
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
        library = _compiled(folder)
        if library is not None:
            n, size = 10**5 if smoke else 2 * 10**7, memory.size // threads
            out = np.zeros((threads, 64), np.float32)

            def fma(i):
                return library.peak_fma(n, block.ctypes.data, out[i].ctypes.data)

            def read(i):
                return library.peak_read(size, memory[i * size :].ctypes.data, out[i].ctypes.data)

            how = "register-only FMA loop, 4 streams a thread"
            return {"flops": _best(pool, threads, fma), "bytes": _best(pool, threads, read), "how": how}

        parts = np.array_split(memory, threads)
        a = np.resize(block, (128, 128) if smoke else (2048, 2048))

        def sums(i):
            parts[i].max()
            return parts[i].nbytes

        def product(_):
            a @ a
            return 2.0 * len(a) ** 3

        how = "no C compiler: NumPy's product 2048^3 and its max over 512 MiB"
        return {"flops": _best(pool, 1, product), "bytes": _best(pool, threads, sums), "how": how}


def _best(pool, threads, work, rounds=20):
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        done = sum(pool.map(work, range(threads)))
        rates.append(done / (time.perf_counter() - start))
    return max(rates)


def _compiled(folder):
    """peak.c as a library, or None without a C compiler."""
    target = Path(folder, "peak.so")
    source = Path(__file__).resolve().parent / "peak.c"
    for compiler in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        command = [*compiler.split(), "-O3", "-march=native", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC",
                   str(source), "-o", str(target)]  # fmt: skip
        if shutil.which(command[0]) and subprocess.run(command, capture_output=True).returncode == 0:
            library = ctypes.CDLL(str(target))
            for function, first in ((library.peak_fma, ctypes.c_long), (library.peak_read, ctypes.c_long)):
                function.argtypes, function.restype = [first, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_double
            return library
    return None

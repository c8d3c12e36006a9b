"""One side in its own process: reads one JSON request a line from stdin, answers each with one JSON line.

    python worker.py SIDE THREADS        SIDE is cmha, numpy, torch or jax (sides/SIDE_side.py)

{"do": "prepare", "row": name, "smoke": bool, "out": path}   draws the data, computes once, saves the results
{"do": "time", "seconds": s}                                 seconds of a call (median, best), from about s seconds
{"do": "memory", "calls": n}                                 peak memory of this process after n calls, in bytes
"""

import importlib
import json
import os
import statistics
import sys
import time
import traceback

import data
import numpy as np
import rows

SAMPLE = 2**20  # larger results are compared on about as many evenly spread elements


def follow_parent():
    """A stopped worker whose parent was killed must not stay behind (Linux)."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def bind(threads):
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def sample(a):
    a = np.ravel(a)
    return a[:: a.size // SAMPLE | 1] if a.size > SAMPLE else a


def flat(result, to_numpy):
    parts = result if isinstance(result, list) else [result]
    return np.concatenate([sample(to_numpy(part)) for part in parts])


def time_calls(run, seconds, once):
    """Median over samples of at least a millisecond, for about `seconds`; a first call or two warm up."""
    if once < 0.5:
        end = time.perf_counter() + min(0.01, seconds / 4)
        run()
        while time.perf_counter() < end:
            run()
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    batch, samples, spent = max(1, int(1e-3 / once)), [once] if once >= 1e-3 else [], once
    while spent < seconds or not samples:
        start = time.perf_counter()
        for _ in range(batch):
            run()
        elapsed = time.perf_counter() - start
        samples.append(elapsed / batch)
        spent += elapsed
    return {"seconds": statistics.median(samples), "best": min(samples), "once": once}


def peak_memory():
    try:
        with open("/proc/self/status") as status:  # getrusage would count the parent's memory at the fork
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class Worker:
    def __init__(self, side, threads):
        self.side = importlib.import_module(f"sides.{side}_side")
        self.side.start(threads)
        self.run, self.once = None, 0.0

    def hello(self, request):
        return {"versions": self.side.versions(), "ops": list(self.side.OPS)}

    def prepare(self, request):
        row = next(r for r in (rows.smoke if request["smoke"] else rows.full)() if r.name == request["row"])
        self.run = None  # the last row's memory goes first
        arrays = data.make(row.op, row.sizes)
        mark = data.digest(arrays)
        built = self.side.OPS[row.op](arrays, row.sizes)
        del arrays
        self.run, check = built if isinstance(built, tuple) else (built, built)
        start = time.perf_counter()
        if row.kind == "memory":  # the copies of a check would count
            results = self.run()
        else:
            results = check()
        self.once = time.perf_counter() - start
        flats = [flat(result, self.side.to_numpy) for result in results]
        np.savez(request["out"], *flats)
        return {"digest": mark}

    def time(self, request):
        answer = time_calls(self.run, request["seconds"], self.once)
        self.once = answer["once"]
        return answer

    def memory(self, request):
        for _ in range(request["calls"]):
            self.run()
        return {"bytes": peak_memory()}


def main():
    follow_parent()
    side, threads = sys.argv[1], int(sys.argv[2])
    if side == "jax":
        bind(threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker = worker or Worker(side, threads)
            answer = getattr(worker, request["do"])(request)
        except Exception as error:
            traceback.print_exc()
            text = (str(error).splitlines() or [""])[0]
            answer = {"error": f"{type(error).__name__}: {text}"[:300], "missing": isinstance(error, ImportError)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

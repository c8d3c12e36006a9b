"""The sides as the benchmark sees them: which library, in which Python, with which environment; one process each.

A process runs only while it answers: between its turns it is stopped (SIGSTOP), so none of its threads can spin.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

WORKER = Path(__file__).resolve().parent / "worker.py"
CAN_STOP = hasattr(signal, "SIGSTOP")
# Fresh pages are dear on virtual machines. With these glibc's malloc keeps large blocks instead of returning them.
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_MAX_": "0"}
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Settings of someone's shell that would make one side faster or slower than its users see it.
FOREIGN = ("OPENBLAS_", "MKL_", "OMP_", "GOMP_", "KMP_", "MALLOC_", "XLA_", "JAX_", "GLIBC_TUNABLES", "LD_PRELOAD")


@dataclass(frozen=True)
class Side:
    name: str
    library: str  # sides/LIBRARY_side.py
    python: str = sys.executable
    extra: dict = field(default_factory=dict)  # environment
    only: tuple = ()  # ops it is for; () all
    bound: float | None = None  # where its own arithmetic is coarser than a row's bound

    @property
    def module(self):
        """What its users import."""
        return self.library

    def environment(self, threads):
        env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        if self.python != sys.executable:
            env.pop("PYTHONPATH", None)  # it is for this Python
        return {**env, **dict.fromkeys(THREADS, str(threads)), "PYTHONDONTWRITEBYTECODE": "1", **self.extra}


class SideError(Exception):
    """What went wrong in a side's process; .missing: its library is not installed there."""

    def __init__(self, text, missing=False):
        super().__init__(text)
        self.missing = missing


class Process:
    """ask(request) -> answer; an error of the side is a SideError, and so is its death."""

    def __init__(self, side, threads):
        self.side = side
        self.log = tempfile.TemporaryFile()
        command = [side.python, str(WORKER), side.library, str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        self.child = subprocess.Popen(command, env=side.environment(threads), **pipes)
        self.stopped = False

    def ask(self, do, **request):
        if self.stopped:
            self.child.send_signal(signal.SIGCONT)
            self.stopped = False
        try:
            self.child.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.child.stdin.flush()
            line = self.child.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise SideError(f"its process ended ({self.child.wait()}){self._last_words()}")
        if CAN_STOP:
            self.child.send_signal(signal.SIGSTOP)
            self.stopped = True
        else:
            time.sleep(0.2)  # threads of a library spin a few milliseconds before they sleep
        answer = json.loads(line)
        if "error" in answer:
            raise SideError(answer["error"], answer["missing"])
        return answer

    def _last_words(self):
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else ""

    def close(self):
        self.child.kill()  # ends stopped ones too; a worker has nothing to lose
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout, self.log):
            try:
                pipe.close()
            except OSError:
                pass


class Pool:
    """The processes of one family of rows, started when first asked for."""

    def __init__(self, threads):
        self.threads, self.family, self.processes = threads, None, {}

    def enter(self, family):
        if family != self.family:
            self.close()
            self.family = family

    def get(self, side):
        if side.name not in self.processes:
            self.processes[side.name] = Process(side, self.threads)
        return self.processes[side.name]

    def drop(self, side):
        if side.name in self.processes:
            self.processes.pop(side.name).close()

    def close(self):
        while self.processes:
            self.processes.popitem()[1].close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def known_sides(torch_python=None, jax_python=None, compile=False, bfloat16=False):
    """Every side that may take part, cmha first."""
    torch, jax = torch_python or sys.executable, jax_python or sys.executable
    sides = [
        Side("cmha", "cmha"),
        Side("numpy", "numpy"),
        Side("torch", "torch", torch),
        Side("torch+malloc", "torch", torch, KEEP_PAGES),
    ]
    if compile:
        extra = {**KEEP_PAGES, "CMHA_BENCH_TORCH": "compile"}
        sides.append(Side("torch.compile", "torch", torch, extra, ("mha", "mha_backward", "train")))
    if bfloat16:
        extra = {**KEEP_PAGES, "CMHA_BENCH_TORCH": "bfloat16"}
        sides.append(Side("torch bf16", "torch", torch, extra, ("train",), bound=0.1))
    writing = ("generate", "prefill")
    sides += [Side(name, name, torch, only=writing) for name in ("transformers", "ctranslate2")]
    return [*sides, Side("jax", "jax", jax)]


def present(sides, threads):
    """({side name: (side, ops)}, {label: version}, {side name: why not}) of those whose library can be imported."""
    found, versions, missing = {}, {}, {}
    for side in sides:
        process = None
        try:
            process = Process(side, threads)
            answer = process.ask("hello")
            found[side.name] = side, set(answer["ops"]) & set(side.only or answer["ops"])
            versions |= answer["versions"]
        except (SideError, OSError) as error:
            missing[side.name] = str(error)
        finally:
            if process:
                process.close()
    return found, versions, missing

"""The thread count, forks, and what an import may do to the process. Every test runs in a process of its own."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cmha
from cmha import _core

from .checking import needs_linux, needs_posix

ROOT = Path(__file__).resolve().parent.parent


def run(code, timeout=60, **env):
    """Run code in a fresh interpreter; what it printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, env=clean | env, capture_output=True,
                          text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WORK = """
import hashlib, os, signal, sys
import numpy as np
import cmha

def work():
    a = cmha.tensor(np.linspace(-1, 1, 256 * 256, dtype=np.float32).reshape(256, 256), requires_grad=True)
    loss = ((a @ a).softmax() @ a).gelu().mean()
    loss.backward()
    p = cmha.tensor(a.grad.numpy(), requires_grad=True)
    p.grad = cmha.tensor(a.grad.numpy())
    cmha.AdamW([p], lr=0.1).step()
    return hashlib.sha256(loss.detach().numpy().tobytes() + p.detach().numpy().tobytes()).hexdigest()

if __name__ == "__main__":
    cmha.set_num_threads(4)
    expected = work()
"""


@needs_posix
def test_fork_after_a_parallel_region():
    """B76: the child answers rightly within ten seconds, and the parent goes on."""
    assert run(WORK + """
    for _ in range(3):
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            os._exit(0 if work() == expected else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert work() == expected
    print("done")
""") == "done"


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_multiprocessing(method, tmp_path):
    """B76, P2: worker processes of every kind."""
    script = tmp_path / "workers.py"
    script.write_text(WORK + f"""
    import multiprocessing
    with multiprocessing.get_context("{method}").Pool(2) as pool:
        results = [pool.apply_async(work) for _ in range(4)]
        assert [r.get(timeout=30) for r in results] == [expected] * 4
    assert work() == expected
    print("done")
""", encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stderr


SHOW = "import cmha; print(cmha.get_num_threads())"


def allowed():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize("value", ["2", "3", "3,1", "0", "", "abc", "9999", "-1"])
def test_omp_num_threads(value):
    """B77: a number is obeyed, nonsense is the default, neither is a crash."""
    n = int(run(SHOW, OMP_NUM_THREADS=value))
    if _core.has_openmp() and value[:1] in ("2", "3"):
        assert n == int(value[0])
    else:
        assert 1 <= n <= allowed()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_the_default_is_what_the_process_may_use():
    """B77: not what the machine has."""
    assert run("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + SHOW) == "1"
    assert 1 <= int(run(SHOW)) <= allowed()


def test_the_count_is_kept_and_checked():
    for n in (1, 3, 1024):
        cmha.set_num_threads(n)
        assert cmha.get_num_threads() == n
    for bad in (0, -1, 1025, 2.0, "2", True, None):
        with pytest.raises((ValueError, TypeError)):
            cmha.set_num_threads(bad)
        assert cmha.get_num_threads() == 1024


@needs_linux
def test_small_work_starts_no_threads():
    """B77: the system counts the threads of a process that only ever did small things."""
    assert run("""
import os, cmha
cmha.set_num_threads(4)
before = len(os.listdir("/proc/self/task"))
x = cmha.ones(8, 8)
for _ in range(10):
    (x @ x).softmax().gelu().sum()
print(len(os.listdir("/proc/self/task")) - before)
""") == "0"


def test_import_leaves_the_processor_alone():
    """B78: subnormals are alive after import and after work, in this thread and in another."""
    assert run("""
import sys, threading, warnings
warnings.simplefilter("error")
import numpy as np
import cmha

def look():
    assert sys.float_info.min / 2 == 1.1125369292536007e-308
    assert np.finfo(np.float32).smallest_subnormal > 0 and np.float32(1e-45) * np.float32(1) > 0

look()
cmha.set_num_threads(4)
x = cmha.tensor(np.ones((256, 256), np.float32), requires_grad=True)
(x @ x).softmax().sum().backward()
look()
thread = threading.Thread(target=look)
thread.start()
thread.join()
print("done")
""") == "done"


def test_many_python_threads_at_once():
    """P3: eight threads, shared weights, the bits of a serial run."""
    assert run("""
import threading
import numpy as np
import cmha
w = cmha.tensor(np.random.default_rng(0).standard_normal((65, 67)).astype(np.float32))
inputs = [np.random.default_rng(i).standard_normal((33, 65)).astype(np.float32) for i in range(8)]

def work(i):
    x = cmha.tensor(inputs[i], requires_grad=True)
    y = (x @ w).softmax()
    (y * y).sum().backward()
    return y.detach().numpy().tobytes() + x.grad.numpy().tobytes()

expected, wrong = [work(i) for i in range(8)], []

def many(i):
    wrong.extend(i for _ in range(100) if work(i) != expected[i])

threads = [threading.Thread(target=many, args=(i,)) for i in range(8)]
for t in threads:
    t.start()
for t in threads:
    t.join()
print(len(wrong))
""") == "0"

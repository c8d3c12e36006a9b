"""M2: a kernel that reads one float beyond its input dies here, in the optimised build that ships.

Every input ends at a page that may not be touched, or starts right behind one. The kernels run in a child, which says
what it was doing when it died.
"""

import ctypes
import faulthandler
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = mmap.PAGESIZE
kept = []


def guarded(a, at_end):
    """A core array on a copy of `a` between two forbidden pages."""
    from cmha import _core

    libc = ctypes.CDLL(None, use_errno=True)
    inside = -(-max(a.nbytes, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, inside + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + PAGE + inside):
        assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0
    kept.append(memory)
    place = PAGE + (inside - a.nbytes if at_end else 0)
    view = np.frombuffer(memory, dtype=a.dtype, count=a.size, offset=place).reshape(a.shape)
    view[...] = a
    return _core.from_buffer(view)


def work(at_end):
    from cmha import _core

    rng = np.random.default_rng(0)

    def floats(*shape):
        return guarded(rng.standard_normal(shape).astype(np.float32), at_end)

    def ids(n, *shape):
        return guarded(rng.integers(0, n, shape), at_end)

    def one(n):
        """Everything that has an axis of n."""
        x, y, t, row = floats(3, n), floats(3, n), floats(n, 3), floats(n)
        for f in (_core.add, _core.divide, _core.less):
            f(x, y), f(x, row)
        for name in ("exp", "tanh", "sigmoid", "relu", "abs", "sqrt", "log"):
            getattr(_core, f"{name}_backward")(y, x, getattr(_core, f"{name}_forward")(x))
        _core.gelu_backward(y, x), _core.gelu_forward(x), _core.clip_forward(x, -1.0, 1.0), _core.negative_forward(x)
        for axes in ((0,), (1,), (0, 1)):
            _core.sum(x, axes), _core.var(x, axes), _core.mean(t, axes)
        _core.extreme(x, 1, 1), _core.extreme(t, 0, -1), _core.sums_of_squares([row])[0]
        _core.softmax_backward(y, x, 1), _core.softmax_forward(x, 1), _core.softmax_forward(t, 0)
        _core.log_softmax_backward(y, _core.log_softmax_forward(x, 1), 1)
        _core.cross_entropy(x, ids(n, 3), -1, True)
        _, stats = _core.layer_norm_forward(x, row, floats(n), 1e-5)
        _core.layer_norm_backward(y, x, guarded(np.asarray(stats), at_end), row)
        _core.embedding_forward(floats(5, n), ids(5, 7)), _core.embedding_backward(floats(7, n), ids(5, 7), 5)
        _core.dropout(x, 0.5, 1, 2, 3), _core.to_float(ids(9, n))
        x.permute((1, 0)).contiguous(), x[:, ::2].contiguous()
        for M, N, K in ((n, 7, 5), (3, n, 5), (3, 7, n), (n, n, n), (1, n, 17), (n, 1, 17)):
            _core.matmul(floats(M, K), floats(K, N)), _core.linear_forward(floats(M, K), floats(K, N), floats(N))
            _core.matmul(floats(K, M).permute((1, 0)), floats(N, K).permute((1, 0)))
        for T, S, hd in ((n, 5, 3), (3, n, 5), (2, 3, n), (1, n, n)):
            q, k, v = floats(1, 2, T, hd), floats(1, 1, S, hd), floats(1, 1, S, hd)
            some = guarded(rng.random((T, S)) < 0.5, at_end)
            for options in ({}, {"is_causal": True}, {"mask": floats(T, S)}, {"mask": some}):
                results = _core.attention_forward(q, k, v, scale=0.5, **options)
                _core.attention_backward(floats(1, 2, T, hd), *results, q, k, v, scale=0.5, **options)
                _core.attention_weights(q, k, *results[1:], scale=0.5, **options)

    for n in (*range(1, 20), 31, 32, 33, 48, 49, 127, 128, 129, 511, 513):
        print(f"an axis of {n}", file=sys.stderr, flush=True)
        one(n)
        kept.clear()


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect through ctypes")
@pytest.mark.parametrize("at_end", [True, False])
def test_no_kernel_reads_beyond_its_input(at_end):
    child = subprocess.run([sys.executable, "-m", "tests.test_guard_pages", str(int(at_end))], cwd=ROOT, text=True,
                           capture_output=True, timeout=120)
    assert child.returncode == 0, child.stderr[-2000:]


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect through ctypes")
def test_the_guard_bites():
    """The canary: reading the float behind a guarded buffer kills the child."""
    code = """
import ctypes, numpy as np
from tests.test_guard_pages import guarded
x = np.asarray(guarded(np.ones(5, np.float32), True))
print("ready", flush=True)
print(ctypes.cast(x.ctypes.data, ctypes.POINTER(ctypes.c_float))[5])
"""
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.returncode != 0 and child.stdout == "ready\n"


if __name__ == "__main__":
    faulthandler.enable()
    work(sys.argv[1] == "1")

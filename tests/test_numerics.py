"""Rounding, special values and the processor's floating-point state (N1b, N2, N7, N9, N10, N12)."""

import ctypes
import itertools
import platform
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cmha
from cmha import _core, nn

from . import reference
from .checking import EPS, array, bits, check, floats, leaf, same_bits

NAN, INF = np.float32("nan"), np.float32("inf")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- matmul ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("a_t, b_t", [(False, False), (False, True), (True, False), (True, True)])
def test_exact_integer_matmul(a_t, b_t):
    """N2: below 2^24 any order of sums is exact, so only a wrong index can show. Every M and N from 1 to 40."""
    rng = np.random.default_rng(0)
    lengths = itertools.cycle([*range(1, 41), 64, 383, 384, 385, 1024, 4096][::7])
    for M, N in itertools.product(range(1, 41), repeat=2):
        K = next(lengths) if (M + N) % 3 else int(rng.integers(1, 41))
        a, b = rng.integers(-8, 9, (M, K)), rng.integers(-8, 9, (K, N))
        x, y = (_core.copy(_core.from_buffer(np.ascontiguousarray(m.T if t else m, dtype=np.float32)))
                for m, t in ((a, a_t), (b, b_t)))
        x, y = x.permute((1, 0)) if a_t else x, y.permute((1, 0)) if b_t else y
        got, expected = np.asarray(_core.matmul(x, y)), a.astype(np.float64) @ b
        assert np.array_equal(got, expected), f"M={M}, N={N}, K={K}: wrong at {np.argwhere(got != expected)[0]}"


def test_exact_integer_matmul_at_the_edges_of_blocks():
    rng = np.random.default_rng(1)
    for M, N, K in itertools.product((1, 7, 97), (1, 17, 129), (383, 384, 385, 768, 769, 1153, 4096)):
        a, b = rng.integers(-8, 9, (M, K)), rng.integers(-8, 9, (K, N))
        same_bits(cmha.tensor(a) @ cmha.tensor(b), (a.astype(np.float64) @ b).astype(np.float32))


@st.composite
def products(draw):
    M, K, N = (draw(st.integers(1, n)) for n in (6, 40, 20))
    numbers = st.floats(-1e10, 1e10, width=32, allow_subnormal=True)
    return tuple(draw(hnp.arrays(np.float32, shape, elements=numbers)) for shape in ((M, K), (K, N)))


@given(products())
def test_matmul_of_hard_numbers(pair):
    """N1b: the bound that holds for every input, K u (|A| |B|)."""
    a, b = pair
    a64, b64 = floats(a, b)
    limit = 1.01 * a.shape[1] * EPS / 2 * (abs(a64) @ abs(b64)) + a.shape[1] * 2.0**-149
    assert (abs(array(cmha.tensor(a) @ cmha.tensor(b)) - a64 @ b64) <= limit).all()


@pytest.mark.parametrize("kind", ["same sign", "wide"])
@pytest.mark.parametrize("K", [16, 385, 3072])
def test_matmul_of_other_inputs(kind, K):
    """N1 where sums are worst (all of one sign) and where sizes differ by 2^20."""
    rng = np.random.default_rng(2)
    a, b = (rng.random(s) if kind == "same sign" else rng.standard_normal(s) * 2.0 ** rng.integers(-10, 10, s)
            for s in ((7, K), (K, 33)))
    a, b = a.astype(np.float32), b.astype(np.float32)
    a64, b64 = floats(a, b)
    check(cmha.tensor(a) @ cmha.tensor(b), a64 @ b64, np.sqrt(K) * (abs(a64) @ abs(b64)), 1)


# --- functions, over the whole line ---------------------------------------------------------------------------------

def every(step):
    """All float32 bit patterns, every step-th, in pieces."""
    piece = 2**22
    for start in range(0, 2**32, piece * step):
        patterns = np.arange(start, min(start + piece * step, 2**32), step, dtype=np.uint64)
        yield patterns.astype(np.uint32).view(np.float32)


def on(function, x):
    return np.asarray(function(_core.copy(_core.from_buffer(x))))


def in_ulp(y):
    """The size of one unit in the last place of the float32 nearest to y; subnormals have that of 2^-126."""
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(y), 2.0**-126))) - 23)


FUNCTIONS = {
    "exp": (_core.exp_forward, np.exp, lambda x, y: 2 * in_ulp(y)),
    "tanh": (_core.tanh_forward, np.tanh, lambda x, y: 2 * in_ulp(y)),
    "sigmoid": (_core.sigmoid_forward, reference.sigmoid, lambda x, y: 3 * in_ulp(y)),
    "log": (_core.log_forward, np.log, lambda x, y: 2 * in_ulp(y)),
    "gelu": (_core.gelu_forward, reference.gelu, lambda x, y: 2 * EPS * np.abs(x) + 2.0**-126),
}


def compare_everywhere(name, step):
    function, exact, limit = FUNCTIONS[name]
    for x in every(step):
        x = x[x >= 0] if name == "log" else x
        if not x.size:
            continue
        with np.errstate(all="ignore"):
            y, got = exact(x.astype(np.float64)), on(function, x)
            rounded = y.astype(np.float32)
            same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
            x, y, got, rounded = x[~same], y[~same], got[~same], rounded[~same]
            good = np.abs(got - y) <= limit(x.astype(np.float64), y)
            good |= np.isinf(rounded) & (np.abs(got) >= 3.4e38)     # the last step to infinity may come one ulp late
        assert good.all(), f"{name}({x[~good][0]!r}) = {got[~good][0]!r}, expected {y[~good][0]!r}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_on_floats_of_all_sizes(name):
    """N7, every 1021st float (a prime: all exponents, all low bits); every 64th with -m full."""
    compare_everywhere(name, 1021)


@pytest.mark.full
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_on_every_64th_float(name):
    compare_everywhere(name, 64)


def test_functions_at_their_ends():
    x = np.array([NAN, INF, -INF, 0.0, -0.0, 89, -104, 1e-45, -1e-45, 3e38, -3e38], np.float32)
    with np.errstate(all="ignore"):
        for name, (function, exact, _) in FUNCTIONS.items():
            if name != "gelu":
                y = exact(x.astype(np.float64)).astype(np.float32)
                got = on(function, x)
                assert np.array_equal(np.isnan(got), np.isnan(y)) and np.array_equal(np.isinf(got), np.isinf(y)), name
    y = on(_core.gelu_forward, x)
    assert np.isnan(y[0]) and y[1] == INF and not np.isinf(y[2:]).any() and y[9] == np.float32(3e38)


# --- special values -------------------------------------------------------------------------------------------------

ROWWISE = {
    "softmax": lambda x: x.softmax(), "log_softmax": lambda x: x.log_softmax(),
    "layer_norm": lambda x: nn.LayerNorm(37)(x).detach(), "matmul": lambda x: x @ cmha.tensor(normal(37, 19, seed=1)),
    "sum": lambda x: x.sum(axis=1, keepdims=True), "max": lambda x: x.max(axis=1, keepdims=True),
    "var": lambda x: x.var(axis=1, keepdims=True), "gelu": lambda x: x.gelu()[:, 3:4],
}


@pytest.mark.parametrize("name", ROWWISE)
def test_a_nan_stays_in_its_row(name):
    """N9: and fills it."""
    x = normal(5, 37)
    clean = array(ROWWISE[name](cmha.tensor(x)))
    x[2, 3] = NAN
    dirty = array(ROWWISE[name](cmha.tensor(x)))
    assert np.isnan(dirty[2]).all()
    same_bits(np.delete(dirty, 2, 0), np.delete(clean, 2, 0))


def test_infinite_logits():
    """N9: +inf gives NaN in its row, -inf is a weight of 0, nothing but -inf is zeros, forward and backward."""
    x = normal(4, 19)
    x[0, 3], x[1, :7], x[2] = INF, -INF, -INF
    t = leaf(x)
    y = t.softmax()
    got = array(y)
    assert np.isnan(got[0]).all() and (got[1, :7] == 0).all() and (got[2] == 0).all()
    assert abs(got[1].sum() - 1) < 4 * EPS and np.isfinite(got[3]).all()
    (y[1:] * cmha.tensor(normal(3, 19, seed=1))).sum().backward()
    assert np.isfinite(array(t.grad)[1:]).all() and (array(t.grad)[2] == 0).all()


def test_softmax_sums_to_one():
    """N3, at three spreads, up to GPT-2's vocabulary."""
    for spread, N in itertools.product((1, 10, 50), (1, 17, 50257)):
        x = normal(3, N) * np.float32(spread)
        y, expected = array(cmha.tensor(x).softmax()), reference.softmax(x.astype(np.float64))
        check(y, expected, (2 + abs(x - x.max(axis=1, keepdims=True))) * expected, 2)
        assert (y >= 0).all() and (abs(y.astype(np.float64).sum(axis=1) - 1) <= 4 * EPS).all()


@pytest.mark.parametrize("mean", [0, 1, 100])
def test_layer_norm_off_centre(mean):
    """N5 with the mean far from 0."""
    x, gamma, beta = normal(7, 768) + np.float32(mean), normal(768, seed=1), normal(768, seed=2)
    layer = nn.LayerNorm(768)
    layer.load_state_dict({"weight": gamma, "bias": beta})
    x64, gamma64, beta64 = floats(x, gamma, beta)
    mu, sigma = x64.mean(axis=1, keepdims=True), x64.std(axis=1, keepdims=True)
    gauge = abs(gamma64) * (1 + abs((x64 - mu) / sigma)) * (1 + abs(mu) / sigma) + abs(beta64)
    check(layer(cmha.tensor(x)), reference.layer_norm(x64, gamma64, beta64), gauge, 4)


def test_max_and_min_see_a_nan():
    x = cmha.tensor(np.array([[1, NAN, 3], [4, 5, 6]], np.float32))
    assert np.isnan(array(x.max(axis=1))[0]) and np.isnan(array(x.min(axis=1))[0])
    assert array(x.max(axis=1))[1] == 6 and x.argmax(axis=1).tolist() == [1, 2]


# --- the optimiser --------------------------------------------------------------------------------------------------

def check_adamw(step=reference.adamw, steps=3, lr=0.1, weight_decay=0.1, size=1037):
    """N12, step by step: the float64 step from the float32 state of the step before."""
    p = leaf(normal(size))
    opt = cmha.AdamW([p], lr=lr, weight_decay=weight_decay)
    p64, m, v = array(p).astype(np.float64), np.zeros(size), np.zeros(size)
    for t in range(1, steps + 1):
        g = normal(size, seed=t)
        p.grad = cmha.tensor(g)
        opt.step()
        before = p64
        p64, m, v = step(p64, m, v, g.astype(np.float64), t, lr, weight_decay=weight_decay)
        check(p, p64, abs(before) + t * 8 * (abs(p64 - before) + lr * (1 + weight_decay * abs(before))), 1)


def test_adamw():
    check_adamw()


def test_adamw_by_hand():
    """B38: two steps tell every wrong order of the formula apart."""
    p = leaf(np.array([1.0], np.float32))
    opt = cmha.AdamW([p], lr=0.1, weight_decay=0.1)
    for g, expected in ((0.5, 0.890000002), (-1.0, 0.917710354)):
        p.grad = cmha.tensor([g])
        opt.step()
        assert abs(p.item() - expected) < 3e-7
    p = leaf(np.array([1.0], np.float32))
    opt = cmha.AdamW([p], lr=0.1, weight_decay=0.0)
    p.grad = cmha.tensor([1e-8])
    opt.step()
    assert abs(p.item() - 0.95) < 1e-6


def test_decay_touches_every_matrix_once_and_no_vector():
    """B44: gradients of zero, so decay alone moves anything; the tied table is a matrix like the others."""
    from cmha.train import parameter_groups

    from .models import tiny

    gpt = tiny()
    groups = parameter_groups(gpt, 0.1)
    chosen = [id(p) for group in groups for p in group["params"]]
    assert sorted(chosen) == sorted(id(p) for p in gpt.parameters())
    before = [array(p) for p in gpt.parameters()]
    for p in gpt.parameters():
        p.grad = cmha.zeros(p.shape)
    cmha.AdamW(groups, lr=0.1).step()
    for p, old in zip(gpt.parameters(), before, strict=True):
        if p.ndim == 1:
            same_bits(p, old)
        else:
            check(p, old.astype(np.float64) * 0.99, abs(old), 1)


def test_a_learning_rate_of_zero_changes_no_bit():
    p = leaf(normal(1037))
    before = bits(p)
    opt = cmha.AdamW([p], lr=0.0, weight_decay=0.1)
    p.grad = cmha.tensor(normal(1037, seed=1))
    opt.step()
    assert bits(p) == before


# --- the processor --------------------------------------------------------------------------------------------------

def control_word():
    """MXCSR without its sticky flags: rounding, flush-to-zero, denormals-are-zero, exception masks."""
    libm = ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_ubyte * 64)()
    assert libm.fegetenv(environment) == 0
    return int.from_bytes(bytes(environment)[28:32], "little") & 0xFFC0


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="reads MXCSR from glibc's fenv_t")
def test_the_floating_point_state_is_left_alone():
    """N10: 0x1F80 is round to nearest, everything masked, no flushing: before, after every kernel, in every thread."""
    from . import digests

    seen = [control_word()]

    def work():
        for kernel in digests.KERNELS.values():
            digests.digest(kernel())
            seen.append(control_word())

    cmha.set_num_threads(4)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert set(seen) == {0x1F80}


def test_subnormals_are_numbers():
    """N10, in each of four threads' shares too."""
    cmha.set_num_threads(4)
    tiny = np.full(100_000, 1e-45, np.float32)
    x = cmha.tensor(tiny)
    assert (array(x * 1) == tiny).all() and (array(x + x) == 2 * tiny).all()
    assert (cmha.full((1, 1), 2.0**-100) @ cmha.full((1, 1), 2.0**-40)).item() == 2.0**-140
    with np.errstate(all="raise"):
        assert np.float32(1e-45) * np.float32(1) > 0

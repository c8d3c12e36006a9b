"""Products of one row, which read memory their own way: the bits of three plain loops, for any cut."""

import numpy as np
import pytest

from cmha import _core

from .checking import same_bits


def core(*shape, seed):
    return _core.from_buffer(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request):
    before = _core.get_num_threads()
    _core.set_num_threads(request.param)
    yield request.param
    _core.set_num_threads(before)


# Blocks of 384: none whole, one, 2, 4 and a rest, 5; no whole vector of columns, a rest, narrow and wide strips.
SHAPES = [(K, N) for K in (1, 31, 384, 385, 768, 1600, 1920) for N in (2, 15, 17, 97)] + [(769, 1537), (385, 4112)]


@pytest.mark.parametrize("K, N", SHAPES)
def test_one_row_is_the_naive_product(K, N, threads):
    x, w, turned = core(1, K, seed=1), core(K, N, seed=2), core(N, K, seed=3).permute((1, 0))
    for b in (w, turned, core(2 * K, N + 3, seed=4)[::2, 3:]):
        same_bits(np.asarray(_core.matmul(x, b)), np.asarray(_core.matmul_naive(x, b)))
    column = core(K, 1, seed=5)
    for a in (core(N, K, seed=6), core(K, N, seed=7).permute((1, 0))):  # one column: the same, turned
        same_bits(np.asarray(_core.matmul(a, column)), np.asarray(_core.matmul_naive(a, column)))


@pytest.mark.parametrize("K, N", [(768, 1537), (1600, 97), (31, 17)])
def test_one_row_and_what_follows_it(K, N, threads):
    """Bias, residual and GELU come after all blocks, in this order."""
    x, w, bias, residual = core(1, K, seed=1), core(K, N, seed=2), core(N, seed=3), core(1, N, seed=4)
    y = np.asarray(_core.matmul_naive(x, w)) + np.asarray(bias)
    same_bits(np.asarray(_core.linear_forward(x, w, bias)), y)
    y = y + np.asarray(residual)
    turned = _core.from_buffer(np.ascontiguousarray(np.asarray(w).T)).permute((1, 0))
    for weight in (w, turned):
        activated, found = _core.linear_forward(x, weight, bias, residual, True)
        same_bits(np.asarray(found), y)
        same_bits(np.asarray(activated), np.asarray(_core.gelu_forward(found)))

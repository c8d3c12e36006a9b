"""No kernel changed its bits since tests/digests.json was written (tests/digests.py says how and when to write it)."""

import json

import numpy as np
import pytest

from cmha import _core

from . import digests
from .checking import same_bits

COMMITTED = json.loads(digests.FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", digests.KERNELS)
def test_digest(name):
    assert digests.digest(digests.KERNELS[name]()) == COMMITTED[name], f"{name} no longer gives the committed bits"


def test_the_committed_file_lists_what_there_is():
    assert set(COMMITTED) == set(digests.KERNELS)


def test_the_naive_product_is_the_oracle_of_the_fast_one():
    """Blocks of 384 terms, from +0, one rounding per block: at the edges of the blocks and of the tiles."""
    for M, N, K in [(1, 1, 1), (1, 67, 383), (5, 1, 384), (7, 17, 385), (33, 65, 769), (2, 3, 0), (16, 16, 1153)]:
        a, b = digests.floats(M, M, K), digests.floats(N, K, N)
        same_bits(np.asarray(_core.matmul(a, b)), np.asarray(_core.matmul_naive(a, b)))


def test_the_inputs_are_what_they_were():
    """A wrong digest means a kernel, not the numbers it was fed."""
    assert digests.digest([digests.values(1, 5, 7), digests.integers(2, 10, 11)]) == INPUTS


INPUTS = "4f7d31ef2af327d06ada335c9a1e82ccd0679bbdcd7932a8d1e40744112f0a61"

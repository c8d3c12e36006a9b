"""Batches. Batch `step` is a function of (seed, step) alone: nothing to save, and the same on every machine.

ids (n,) -> inputs (B, T), targets (B, T) one token later; a window may start anywhere from 0 to n - T - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from cmha.text.corpora import check_length

if TYPE_CHECKING:
    from cmha.text.corpora import Ids
    from cmha.types import IntArray


def validation_batch_size(block_size: int) -> int:
    """Windows at a time: 32, or fewer where those would be more than 4096 tokens, whose logits take the memory."""
    return max(1, min(32, 4096 // block_size))


def training_batch(ids: Ids, batch_size: int, block_size: int, *, seed: int, step: int) -> tuple[IntArray, IntArray]:
    """B windows of T + 1 tokens at offsets drawn from Philox(seed, step)."""
    check_length("training", ids, block_size)
    draws = np.random.Philox(key=[seed, 0], counter=[0, step, 0, 0]).random_raw(batch_size)
    offsets = (draws % np.uint64(len(ids) - block_size)).astype(np.int64)
    return _windows(ids, offsets, block_size)


def validation_batches(
    ids: Ids, batch_size: int, block_size: int, *, rank: int = 0, size: int = 1
) -> Iterator[tuple[IntArray, IntArray]]:
    """Every non-overlapping window once, from the first token on; the last batch may be smaller. Of several processes,
    `rank` gets batch rank, rank + size, ..."""
    check_length("validation", ids, block_size)
    offsets = np.arange((len(ids) - 1) // block_size) * block_size
    for first in range(rank * batch_size, len(offsets), size * batch_size):
        yield _windows(ids, offsets[first : first + batch_size], block_size)


def _windows(ids: Ids, offsets: IntArray, block_size: int) -> tuple[IntArray, IntArray]:
    tokens = ids[offsets[:, None] + np.arange(block_size + 1)].astype(np.int64)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])

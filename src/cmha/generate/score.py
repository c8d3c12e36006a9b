"""How likely a text is under a model: log-probabilities of its ids, and with them its perplexity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from cmha.errors import check_integer, message
from cmha.generate.rows import check_prompts
from cmha.generate.sampling import log_softmax

if TYPE_CHECKING:
    from cmha.generate.options import IdArray, IdRow
    from cmha.gpt import GPT
    from cmha.types import FloatArray, IntArray

CHUNK = 128  # positions whose logits stand in memory at once: 26 MB for GPT-2


@overload
def score(model: GPT, ids: IdArray | Sequence[int], *, stride: int | None = None) -> FloatArray: ...
@overload
def score(
    model: GPT, ids: Sequence[IdRow], *, stride: int | None = None
) -> FloatArray | list[FloatArray]: ...
def score(
    model: GPT, ids: IdArray | Sequence[int] | Sequence[IdRow], *, stride: int | None = None
) -> FloatArray | list[FloatArray]:
    """log p(id t | the ids before it) for t = 1 .. T - 1, in nats: ids (T) -> float32 (T - 1); (B, T) -> (B, T - 1); a
    list of rows of unequal length -> a list of arrays. The first id has nothing before it and no entry.

    Perplexity is exp(-mean of the log-probabilities). A text longer than the context (block_size) is read in windows of
    block_size ids that start `stride` ids apart (default: half of block_size); an id counts in the first window that
    has it. So every id but those of the first window has more than block_size - stride ids before it; stride=1 gives
    each all that fit, at the price of one window for each id, and a stride of block_size is the fastest.
    """
    single = _is_one_row(ids)
    rows, rectangle = check_prompts([ids] if single else ids, model.cfg.vocab_size)
    found = [np.concatenate([*pieces(model, row, stride), np.zeros(0, np.float32)]) for row in rows]
    return found[0] if single else np.stack(found) if rectangle else found


def _is_one_row(ids: object) -> bool:
    if isinstance(ids, list | tuple):
        return bool(ids) and all(isinstance(i, int | np.integer) for i in ids)
    return getattr(ids, "ndim", 2) == 1


def pieces(model: GPT, ids: IntArray, stride: int | None = None) -> Iterator[FloatArray]:
    """The same for one row of int64, piece by piece as they are computed: what progress can be shown on."""
    block_size = model.cfg.block_size
    stride = max(1, block_size // 2) if stride is None else check_integer("score", "stride", stride, 1, block_size)
    return _windows(model, ids, stride)


def _windows(model: GPT, ids: IntArray, stride: int) -> Iterator[FloatArray]:
    block_size, start, done = model.cfg.block_size, 0, 1  # done: ids that have an entry, or need none
    while done < len(ids):
        end = min(start + block_size, len(ids) - 1)  # inputs are ids[start:end]; each predicts the next
        cache = model.new_cache(1, capacity=end - start)
        for begin in range(start, end, CHUNK):
            until = min(begin + CHUNK, end)
            first = max(begin, done - 1)  # the first position whose prediction counts
            if first >= until:
                model.last_logits(ids[None, begin:until], cache=cache)
                continue
            logits = model.last_logits(ids[None, begin:until], until - first, cache=cache)[0]
            logprobs = log_softmax(logits)
            if np.isnan(logprobs).any():
                raise ValueError(message("score", "logits must not hold NaN or +inf", f"position {first}"))
            yield logprobs[np.arange(until - first), ids[first + 1 : until + 1]]
            done = until + 1
        start += stride

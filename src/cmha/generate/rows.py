"""Rows of ids that grow, and the logits behind each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cmha.errors import message

if TYPE_CHECKING:
    from cmha.gpt import GPT
    from cmha.nn.kv_cache import ModelCache
    from cmha.types import FloatArray, IntArray


class Rows:
    """Up to block_size ids of a row run on a KV cache; past that, as a loop that crops would have it, every token is
    computed from the row's last block_size ids, whose positions all change with each step.

    Rows may differ in length; each has the bits that it has alone. model.last_logits and model.new_cache do the work.
    """

    def __init__(
        self, model: GPT, prompts: Sequence[IntArray], room: int, cache: ModelCache | None = None
    ) -> None:
        """prompts: arrays of int64; room: how many ids a row may grow by; cache: one of one row to use and to leave
        filled, of which a beginning in common with the prompt is not computed again."""
        self.model, self.block_size = model, model.cfg.block_size
        self.ids = [ids.tolist() for ids in prompts]
        self.cached = [i for i, ids in enumerate(self.ids) if len(ids) <= self.block_size]  # in the cache
        self.cache, self.given = cache, cache is not None  # None: no row is in one
        if cache is not None and self.cached:
            cache.reuse(prompts[0])
        elif self.cached:
            longest = max(len(self.ids[i]) for i in self.cached)
            self.cache = model.new_cache(len(self.cached), capacity=min(self.block_size, longest + room))

    def logits(self) -> FloatArray:
        """(B, V) float32 of the position behind each row."""
        self._leave_the_cache()
        out: dict[int, FloatArray] = {}
        if self.cache is not None and self.cached:
            out.update(zip(self.cached, self._from_cache(self.cache), strict=True))
        for i, ids in enumerate(self.ids):
            if i not in out:
                out[i] = self.model.last_logits(np.array([ids[-self.block_size :]]))[0, 0]
        return np.stack([out[i] for i in range(len(self.ids))]) if len(out) > 1 else out[0][None]

    def _leave_the_cache(self) -> None:
        """Rows that have outgrown block_size."""
        staying = [place for place, i in enumerate(self.cached) if len(self.ids[i]) <= self.block_size]
        if len(staying) < len(self.cached):
            self.cached = [self.cached[place] for place in staying]
            self._choose(staying)

    def _choose(self, places: list[int]) -> None:
        """The cache keeps these of its rows (one may come several times)."""
        if self.given and places in ([], [0]):  # it has one row, and stays as it is
            return
        self.cache, self.given = self.cache.copy(places) if self.cache is not None and places else None, False

    def _from_cache(self, cache: ModelCache) -> Iterable[FloatArray]:
        lengths = cache.lengths.tolist()
        fresh = [self.ids[i][n:] for i, n in zip(self.cached, lengths, strict=True)]
        if len({len(ids) for ids in fresh}) == 1:
            return self.model.last_logits(np.array(fresh), cache=cache)[:, 0]
        caches = map(cache.row, range(len(fresh)))
        return [self.model.last_logits(np.array([i]), cache=c)[0, 0] for i, c in zip(fresh, caches, strict=True)]

    def choose(self, rows: list[int]) -> None:
        """Row j becomes what row rows[j] was; a row may come several times or not at all."""
        if rows == list(range(len(self.ids))):
            return
        place = {i: p for p, i in enumerate(self.cached)}
        self.ids = [list(self.ids[i]) for i in rows]
        self.cached = [j for j, i in enumerate(rows) if i in place]
        if place:
            self._choose([place[i] for i in rows if i in place])

    def append(self, tokens: Iterable[int]) -> None:
        for ids, token in zip(self.ids, tokens, strict=True):
            ids.append(token)


def check_prompts(ids: object, vocab_size: int) -> tuple[list[IntArray], bool]:
    """ids as a list of int64 arrays, at least one row of at least one id, each within the vocabulary; and whether they
    came as one rectangle."""
    try:
        rectangle = np.asarray(ids)
    except ValueError:  # rows of unequal length
        rectangle = None
    if rectangle is None or rectangle.dtype == object:
        rows = [np.asarray(row) for row in ids] if isinstance(ids, list | tuple) else [np.zeros((0, 0))]
        rectangle = None
    else:
        rows = list(rectangle) if rectangle.ndim == 2 else []
    if not rows or any(row.ndim != 1 or row.size == 0 for row in rows):
        rule = "ids must be (B, T), or a list of rows, with at least one row and one token in each"
        shapes = f"rows of shapes {[row.shape for row in rows][:5]}"
        got = shapes if rectangle is None else f"shape {rectangle.shape}"
        raise ValueError(message("generate", rule, got))
    for number, row in enumerate(rows):
        if row.dtype.kind not in "iu":
            raise TypeError(message("generate", "ids must be integers", f"dtype {row.dtype}"))
        outside = np.flatnonzero((row < 0) | (row >= vocab_size))
        if outside.size:
            rule = f"ids must be from 0 to {vocab_size - 1}"
            got = f"{int(row[outside[0]])} at position {outside[0]} of row {number}"
            raise ValueError(message("generate", rule, got))
    return [row.astype(np.int64) for row in rows], rectangle is not None

"""When a row ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from cmha.errors import check_integer, message, quote

if TYPE_CHECKING:
    from cmha.generate.options import Decoder, Stop, StopStrings
    from cmha.gpt import GPT
    from cmha.nn.kv_cache import ModelCache
    from cmha.types import IntArray


class Stops:
    """Ids that end a row, and strings that end it once its new text holds one of them. The model knows no text: it is
    the tokenizer (anything with decode(ids) -> str) that reads the last ids, as many as a string has bytes."""

    def __init__(
        self, vocab_size: int, stop: Stop = None, stop_strings: StopStrings = None, tokenizer: Decoder | None = None
    ) -> None:
        ids = [] if stop is None else list(stop) if isinstance(stop, Iterable) else [stop]
        self.ids = frozenset(check_integer("generate", "stop", token, 0, vocab_size - 1) for token in ids)
        self.strings = _check_strings(stop_strings)
        self.tokenizer = tokenizer
        self.known = getattr(tokenizer, "vocab_size", vocab_size)  # ids: a padded vocabulary has more, without a text
        if self.strings and not callable(getattr(tokenizer, "decode", None)):
            rule = "stop_strings need a tokenizer, which has decode(ids)"
            raise TypeError(message("generate", rule, f"tokenizer={quote(tokenizer)}"))
        self.reach = max((len(s.encode("utf-8", "surrogatepass")) for s in self.strings), default=0)

    def met(self, new_ids: list[int]) -> bool:
        """Whether a row ends with the last of its new ids."""
        if new_ids[-1] in self.ids:
            return True
        if not self.strings or self.tokenizer is None:
            return False
        last = new_ids[-self.reach :]
        unknown = max((place for place, token in enumerate(last) if token >= self.known), default=-1)
        text = self.tokenizer.decode(last[unknown + 1 :])
        return any(s in text for s in self.strings)


def _check_strings(strings: StopStrings) -> tuple[str, ...]:
    given = [] if strings is None else [strings] if isinstance(strings, str) else strings
    if not isinstance(given, list | tuple | set | frozenset) or not all(isinstance(s, str) for s in given):
        raise TypeError(message("generate", "stop_strings must be a str or a list of them", quote(strings)))
    if "" in given:
        raise ValueError(message("generate", "stop_strings must be texts of at least one character", quote(strings)))
    return tuple(given)


def check_cache(model: GPT, cache: ModelCache | None, rows: int, wanted: int) -> None:
    """A cache that is handed in: one row of this model, for one prompt, with room for `wanted` ids less the last."""
    if cache is None:
        return
    if not hasattr(cache, "reuse"):
        raise TypeError(message("generate", "cache must be one of gpt.new_cache()", type(cache).__name__))
    if rows != 1 or cache.batch_size != 1:
        got = f"{rows} rows and a cache of {cache.batch_size}"
        raise ValueError(message("generate", "a cache is for one prompt and has one row", got))
    wanted = min(wanted - 1, model.cfg.block_size)
    if cache.capacity < wanted:
        rule = "the cache must have room for the prompt and what follows"
        raise ValueError(message("generate", rule, f"capacity {cache.capacity}", f"at least {wanted}"))


def filled(rows: list[list[int]]) -> IntArray:
    """Rows of unequal length as one int64 array: a row that ended goes on with its last id."""
    longest = max(len(row) for row in rows)
    return np.array([row + row[-1:] * (longest - len(row)) for row in rows], np.int64)

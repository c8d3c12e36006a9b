"""What a picture of attention shows: the weights of some layers over a text, and the labels of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cmha.errors import message
from cmha.see.labels import token_labels
from cmha.see.weights import attention_weights

if TYPE_CHECKING:
    from cmha.gpt import GPT
    from cmha.text import Tokenizer
    from cmha.types import FloatArray

MOST_TOKENS = 200  # a page or picture of more cannot be read; the terminal cuts to its own width


@dataclass
class Maps:
    title: str
    labels: list[str]  # T texts
    weights: dict[int, FloatArray]  # {layer: (H, T, T)}: row = query, column = key
    note: str  # what was cut, or ""

    def cut(self, tokens: int, why: str) -> Maps:
        """The same for the first tokens: causal weights do not depend on what follows."""
        if len(self.labels) <= tokens:
            return self
        weights = {layer: w[:, :tokens, :tokens] for layer, w in self.weights.items()}
        note = f"the first {tokens} of {len(self.labels)} tokens, {why}"
        return Maps(self.title, self.labels[:tokens], weights, "; ".join(filter(None, [note, self.note])))


def attention_maps(
    gpt: GPT, tokenizer: Tokenizer, text: str, layers: Sequence[int] | None = None, title: str = "attention"
) -> Maps:
    """Maps of all heads of the layers (default: all) over the text, up to 200 tokens and the model's context."""
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError(message("heads", "the text must hold at least one token", "none"))
    most, note = min(MOST_TOKENS, gpt.cfg.block_size), ""
    if len(ids) > most:
        why = "the model's context" if most == gpt.cfg.block_size else "more cannot be read"
        note = f"the first {most} of {len(ids)} tokens: {why}"
    ids = ids[:most]
    found = attention_weights(gpt, np.array([ids]), layers=layers)
    if not all(np.isfinite(w).all() for w in found.values()):
        note = "; ".join(filter(None, [note, "weights that are not finite are drawn as 0"]))
    return Maps(title, token_labels(tokenizer, ids), {layer: w[0] for layer, w in found.items()}, note)

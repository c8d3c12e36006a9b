"""The sizes of a GPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cmha.errors import check_flag, check_integer, quote
from cmha.functional import check_probability


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT: vocab_size V, block_size (the longest context), n_layer L, n_head H, n_embd D = H * head_dim.

    dropout: in training, from 0 to 1. bias: in every linear layer and layer norm. output_projection: c_proj after
    attention. ValueError: a size below 1, n_embd that is no multiple of n_head.
    """

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0
    bias: bool = True
    output_projection: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            object.__setattr__(self, name, check_integer("gpt_config", name, getattr(self, name), 1))
        for name in ("bias", "output_projection"):
            object.__setattr__(self, name, check_flag("gpt_config", name, getattr(self, name)))
        if self.n_embd % self.n_head:
            raise ValueError(
                f"[gpt_config] n_embd must be divisible by n_head; got n_embd={self.n_embd}, n_head={self.n_head}"
            )
        object.__setattr__(self, "dropout", check_probability("gpt_config", "dropout", self.dropout))

    @property
    def head_dim(self) -> int:
        """n_embd / n_head."""
        return self.n_embd // self.n_head

    def num_parameters(self) -> int:
        """Trained numbers of such a GPT, the tied table once; nothing of it has to exist.

        >>> cmha.GPTConfig.tiny(vocab_size=103).num_parameters()
        108736
        """
        D, biases = self.n_embd, int(self.bias)
        projections = 4 if self.output_projection else 3  # c_q c_k c_v c_proj
        norm = D + biases * D
        attention = projections * (D * D + biases * D)
        mlp = 8 * D * D + biases * 5 * D
        return (self.vocab_size + self.block_size) * D + self.n_layer * (2 * norm + attention + mlp) + norm

    @classmethod
    def preset(cls, name: str, **changes: float) -> GPTConfig:
        """A named configuration (tiny, char, baby, gpt2, gpt2_medium, gpt2_large, gpt2_xl), with changes."""
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(
                f"[gpt_config] unknown preset; got {quote(name)}, expected one of {', '.join(PRESETS)}"
            )
        sizes: dict[str, Any] = {**PRESETS[name], **changes}  # integers, flags, one rate: each is checked for its own
        return cls(**sizes)

    @classmethod
    def tiny(cls, vocab_size: int = 65, **changes: float) -> GPTConfig:
        """The lesson's: 2 layers of 4 heads, 64 wide (head_dim 16), 32 positions."""
        return cls.preset("tiny", vocab_size=vocab_size, **changes)

    @classmethod
    def char(cls, vocab_size: int = 65, **changes: float) -> GPTConfig:
        """4 layers of 4 heads, 128 wide, 64 positions."""
        return cls.preset("char", vocab_size=vocab_size, **changes)

    @classmethod
    def baby(cls, vocab_size: int = 65, **changes: float) -> GPTConfig:
        """6 layers of 6 heads, 384 wide, 256 positions (nanoGPT's Shakespeare model)."""
        return cls.preset("baby", vocab_size=vocab_size, **changes)

    @classmethod
    def gpt2(cls, **changes: float) -> GPTConfig:
        """GPT-2 small: 124,439,808 parameters."""
        return cls.preset("gpt2", **changes)

    @classmethod
    def gpt2_medium(cls, **changes: float) -> GPTConfig:
        """GPT-2 medium: 354,823,168 parameters."""
        return cls.preset("gpt2_medium", **changes)

    @classmethod
    def gpt2_large(cls, **changes: float) -> GPTConfig:
        """GPT-2 large: 774,030,080 parameters."""
        return cls.preset("gpt2_large", **changes)

    @classmethod
    def gpt2_xl(cls, **changes: float) -> GPTConfig:
        """GPT-2 XL: 1,557,611,200 parameters."""
        return cls.preset("gpt2_xl", **changes)


def _sizes(n_layer: int, n_head: int, n_embd: int, block_size: int, vocab_size: int = 65) -> dict[str, int]:
    return {"vocab_size": vocab_size, "block_size": block_size, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}


PRESETS = {
    "tiny": _sizes(2, 4, 64, 32),
    "char": _sizes(4, 4, 128, 64),
    "baby": _sizes(6, 6, 384, 256),
    "gpt2": _sizes(12, 12, 768, 1024, 50257),
    "gpt2_medium": _sizes(24, 16, 1024, 1024, 50257),
    "gpt2_large": _sizes(36, 20, 1280, 1024, 50257),
    "gpt2_xl": _sizes(48, 25, 1600, 1024, 50257),
}

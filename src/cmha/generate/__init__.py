"""Writing on: sampling, beam search, and how likely a text is under a model."""

from cmha.generate.loop import generate, stream
from cmha.generate.sampling import draw_seed
from cmha.generate.score import score

__all__ = ["draw_seed", "generate", "score", "stream"]

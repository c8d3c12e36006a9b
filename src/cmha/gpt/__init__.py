"""GPT-2 (Radford et al. 2019): configuration, the model, and its files in Hugging Face's layout."""

from cmha.gpt.config import GPTConfig
from cmha.gpt.model import GPT, Block

__all__ = ["GPT", "Block", "GPTConfig"]

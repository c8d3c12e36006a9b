"""Text and token ids: tokenizers, and the corpora a model learns from."""

from cmha.text.bpe import BPETokenizer
from cmha.text.load import load_tokenizer
from cmha.text.tokenizers import ByteTokenizer, CharTokenizer, StreamDecoder, Tokenizer
from cmha.text.until import TextUntil

__all__ = [
    "BPETokenizer", "ByteTokenizer", "CharTokenizer", "StreamDecoder", "TextUntil", "Tokenizer", "load_tokenizer",
]  # fmt: skip

"""Text and token ids: tokenizers, and the corpora a model learns from."""

from cmha.text.tokenizers import ByteTokenizer, CharTokenizer, StreamDecoder, load_tokenizer

__all__ = ["ByteTokenizer", "CharTokenizer", "StreamDecoder", "load_tokenizer"]

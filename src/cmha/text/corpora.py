"""What a model learns from: the text inside every Python, or the user's files; cut into training and validation."""

import numpy as np

from cmha.errors import message, quote_path
from cmha.files import read_text


def default_text():
    """The language reference behind help(): about 465,000 characters of English that every Python carries."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        rule = "this Python comes without pydoc_data.topics, the default text"
        raise ValueError(message("train", rule, hint="Name a text file instead")) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_texts(paths):
    """The files in the order given, one below the other."""
    texts = []
    for path in paths:
        text = read_text(path)
        if not text:
            raise ValueError(message("train", "text must not be empty", f"0 characters in {quote_path(path)}"))
        texts.append(text)
    return "\n".join(texts)


def encode_text(tokenizer, text):
    """text -> ids (n,), in the smallest type that holds them: a corpus stays in memory for hours."""
    encode = getattr(tokenizer, "encode_array", tokenizer.encode)
    return np.asarray(encode(text), dtype=np.min_scalar_type(tokenizer.vocab_size - 1))


def split(ids, block_size):
    """(training, validation): the last tenth is validation. Each must hold one window and the token after it."""
    cut = len(ids) * 9 // 10
    parts = {"training": ids[:cut], "validation": ids[cut:]}
    for name, part in parts.items():
        check_length(name, part, block_size)
    return tuple(parts.values())


def check_length(name, ids, block_size):
    """A window of block_size tokens predicts the token after each, so one more is needed."""
    if len(ids) < block_size + 1:
        rule = f"{name} split must hold at least block_size + 1 = {block_size + 1} tokens"
        raise ValueError(message("train", rule, str(len(ids)), hint="Use a longer text or a smaller block_size"))

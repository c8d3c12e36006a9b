"""load_tokenizer: the tokenizer of a folder, whatever its type."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cmha.errors import CheckpointError, message, quote_path
from cmha.text import bpe, tokenizers

if TYPE_CHECKING:
    from _typeshed import StrPath


def load_tokenizer(folder: StrPath) -> bpe.BPETokenizer | tokenizers.CharTokenizer | tokenizers.ByteTokenizer:
    """The tokenizer in a folder: tokenizer_cmha.json (characters or bytes), tokenizer.json, or vocab.json and
    merges.txt. A folder with the first and one of the others is refused: only one can be the model's."""
    names = [n for n in (tokenizers.FILE_NAME, bpe.FILE_NAME, bpe.OLD_NAMES[0])
             if os.path.exists(os.path.join(folder, n))]  # fmt: skip
    if names[:1] == [tokenizers.FILE_NAME] and names[1:]:
        rule = "a folder must hold one tokenizer"
        raise CheckpointError(message("load", rule, f"{' and '.join(names)} in {quote_path(folder)}"))
    if names and names[0] != tokenizers.FILE_NAME:
        return bpe.BPETokenizer.load(folder)
    return tokenizers.load_own(folder)

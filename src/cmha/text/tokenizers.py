"""Tokenizers: text <-> a list of ids.

    CharTokenizer   one id per character of a given text, in the order of code points
    ByteTokenizer   the bytes of UTF-8; ids are the byte values
    StreamDecoder   ids one at a time -> text, for any of them; the pieces join to exactly decode(all ids)
"""

import codecs
import os

import numpy as np

from cmha.errors import CheckpointError, message, quote, quote_path
from cmha.files import read_json, write_json

FILE_NAME = "tokenizer_cmha.json"  # `tokenizer.json` is Hugging Face's and means something else


def checked_ids(ids, vocab_size):
    """ids (a list, an array, a tensor) as int64 (n,); an id outside the table is refused by name."""
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(message("decode", "ids must be one row", f"shape {array.shape}"))
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(message("decode", "ids must be integers", f"dtype {array.dtype}"))
    outside = (array < 0) | (array >= vocab_size)
    if outside.any():
        at = int(np.argmax(outside))
        rule = f"ids must be from 0 to {vocab_size - 1}"
        raise ValueError(message("decode", rule, f"{int(array[at])} at position {at}"))
    return array.astype(np.int64)


def utf8(text, op):
    """The bytes of a str; what is no str, or no Unicode, is refused."""
    if not isinstance(text, str):
        raise TypeError(message(op, "text must be a str", f"a {type(text).__name__}"))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        rule = "text must not hold half of a surrogate pair"
        raise ValueError(message(op, rule, f"{text[error.start]!r} at position {error.start}")) from None


class CharTokenizer:
    """One id per character; the table is the sorted set of the characters of `text`."""

    def __init__(self, text):
        if not isinstance(text, str):
            raise TypeError(message("CharTokenizer", "text must be a str", f"a {type(text).__name__}"))
        if not text:
            raise ValueError(message("CharTokenizer", "text must hold at least one character", "''"))
        self.characters = "".join(sorted(set(text)))
        self._points = _code_points(self.characters)

    @property
    def vocab_size(self):
        return len(self.characters)

    def encode_array(self, text):
        """text -> ids (n,) int64, without a Python object per character."""
        points = _code_points(text)
        ids = np.searchsorted(self._points, points)
        unknown = self._points[np.minimum(ids, self.vocab_size - 1)] != points
        if unknown.any():
            at = int(np.argmax(unknown))
            rule = f"text must consist of the {self.vocab_size} characters of this tokenizer"
            raise ValueError(message("encode", rule, f"{text[at]!r} at position {at}"))
        return ids.astype(np.int64)

    def encode(self, text):
        return self.encode_array(text).tolist()

    def decode(self, ids):
        return "".join(self.characters[i] for i in checked_ids(ids, self.vocab_size))

    def save(self, folder):
        write_json(os.path.join(folder, FILE_NAME), {"type": "char", "characters": self.characters})

    @classmethod
    def load(cls, folder):
        return load_own(folder, "char")

    @classmethod
    def _from_file(cls, values, path):
        characters = values.get("characters")
        if set(values) != {"type", "characters"} or not isinstance(characters, str) or not characters:
            rule = "a char tokenizer must have the key 'characters', a text"
            raise CheckpointError(message("load", rule, f"{quote(values)} in {path}"))
        if characters != "".join(sorted(set(characters))):
            rule = "characters must differ and be sorted"
            raise CheckpointError(message("load", rule, f"{quote(characters)} in {path}"))
        return cls(characters)

    def __repr__(self):
        return f"CharTokenizer({self.vocab_size} characters)"


class ByteTokenizer:
    """The bytes of UTF-8: 256 ids, every text has one."""

    vocab_size = 256

    def encode_array(self, text):
        """text -> ids (n,) int64, without a Python object per byte."""
        return np.frombuffer(utf8(text, "encode"), np.uint8).astype(np.int64)

    def encode(self, text):
        return self.encode_array(text).tolist()

    def token_bytes(self, token):
        return bytes((token,))

    def decode(self, ids):
        return bytes(checked_ids(ids, 256).tolist()).decode("utf-8", errors="replace")

    def save(self, folder):
        write_json(os.path.join(folder, FILE_NAME), {"type": "byte"})

    @classmethod
    def load(cls, folder):
        return load_own(folder, "byte")

    @classmethod
    def _from_file(cls, values, path):
        if set(values) != {"type"}:
            rule = "a byte tokenizer must have no key but 'type'"
            raise CheckpointError(message("load", rule, f"{quote(values)} in {path}"))
        return cls()

    def __repr__(self):
        return "ByteTokenizer()"


TYPES = {"char": CharTokenizer, "byte": ByteTokenizer}


def load_own(folder, wanted=None):
    """The character or byte tokenizer of a folder."""
    path = os.path.join(folder, FILE_NAME)
    values, where = read_json(path), quote_path(path)
    kind, known = values.get("type"), list(TYPES) if wanted is None else [wanted]
    if kind not in known:
        allowed = " or ".join(map(repr, known))
        raise CheckpointError(message("load", "tokenizer type is not known here", f"{quote(kind)} in {where}", allowed))
    return TYPES[kind]._from_file(values, where)


class StreamDecoder:
    """Decodes ids as they come. A character cut in two waits for its rest; a byte that can start nothing shows at once::

        decoder = StreamDecoder(tokenizer)
        for token in tokens: print(decoder.feed(token), end="")
        print(decoder.finish())
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if hasattr(tokenizer, "token_bytes") else None

    def feed(self, token):
        """The text that this id completes, often one character, '' while one is incomplete."""
        if self._bytes is None:
            return self._tokenizer.decode([token])
        (token,) = checked_ids([token], self._tokenizer.vocab_size).tolist()
        return self._bytes.decode(self._tokenizer.token_bytes(token))

    def finish(self):
        """What is left of a character that never came whole, as U+FFFD."""
        return "" if self._bytes is None else self._bytes.decode(b"", final=True)


def _code_points(text):
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)

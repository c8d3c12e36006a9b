"""Tokenizers: text <-> a list of ids.

    CharTokenizer   one id per character of a given text, in the order of code points
    ByteTokenizer   the bytes of UTF-8; ids are the byte values
    StreamDecoder   ids one at a time -> text, for any of them; the pieces join to exactly decode(all ids)
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from cmha.errors import CheckpointError, message, quote, quote_path
from cmha.files import read_json, write_json

if TYPE_CHECKING:
    from _typeshed import StrPath
    from numpy.typing import NDArray

    from cmha.types import ArrayLike, IntArray


FILE_NAME = "tokenizer_cmha.json"  # `tokenizer.json` is Hugging Face's and means something else


class Tokenizer(Protocol):
    """What a corpus, a trainer or a stop string needs of a tokenizer: any object that has these may stand for ours."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, V."""

    def encode(self, text: str, /) -> list[int]:
        """text -> list of ids."""

    def decode(self, ids: list[int], /) -> str:
        """ids (n,) -> text."""

    def save(self, folder: StrPath, /) -> None:
        """Writes its files into the folder."""


def checked_ids(ids: ArrayLike, vocab_size: int) -> IntArray:
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


def utf8(text: str, op: str) -> bytes:
    """The bytes of a str; what is no str, or no Unicode, is refused."""
    if not isinstance(text, str):
        raise TypeError(message(op, "text must be a str", f"a {type(text).__name__}"))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        rule = "text must not hold half of a surrogate pair"
        raise ValueError(message(op, rule, f"{text[error.start]!r} at position {error.start}")) from None


class CharTokenizer:
    """One id per character; the table is the sorted set of the characters of `text`.

    TypeError: no str. ValueError: an empty one.

    >>> cmha.CharTokenizer("hello").encode("hole")
    [1, 3, 2, 0]
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(message("CharTokenizer", "text must be a str", f"a {type(text).__name__}"))
        if not text:
            raise ValueError(message("CharTokenizer", "text must hold at least one character", "''"))
        self.characters = "".join(sorted(set(text)))
        self._points = _code_points(self.characters)

    @property
    def vocab_size(self) -> int:
        """Number of ids, V."""
        return len(self.characters)

    def encode_array(self, text: str) -> IntArray:
        """text -> ids (n,) int64, without a Python object per character."""
        points = _code_points(text)
        ids = np.searchsorted(self._points, points)
        unknown = self._points[np.minimum(ids, self.vocab_size - 1)] != points
        if unknown.any():
            at = int(np.argmax(unknown))
            rule = f"text must consist of the {self.vocab_size} characters of this tokenizer"
            raise ValueError(message("encode", rule, f"{text[at]!r} at position {at}"))
        return ids.astype(np.int64)

    def encode(self, text: str) -> list[int]:
        """text -> list of ids. ValueError names the first character that is not in the table."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def decode(self, ids: ArrayLike) -> str:
        """ids (n,), a list or an array -> text. ValueError: an id outside the table."""
        return "".join(self.characters[i] for i in checked_ids(ids, self.vocab_size))

    def save(self, folder: StrPath) -> None:
        """Writes tokenizer_cmha.json into the folder, in one step."""
        write_json(os.path.join(folder, FILE_NAME), {"type": "char", "characters": self.characters})

    @classmethod
    def load(cls, folder: StrPath) -> Self:
        """The tokenizer in this folder. CheckpointError: what the file holds; OSError: it cannot be read."""
        _, values, path = _read_own(folder, ["char"])
        return cls._from_file(values, path)

    @classmethod
    def _from_file(cls, values: dict[str, Any], path: str) -> Self:
        characters = values.get("characters")
        if set(values) != {"type", "characters"} or not isinstance(characters, str) or not characters:
            rule = "a char tokenizer must have the key 'characters', a text"
            raise CheckpointError(message("load", rule, f"{quote(values)} in {path}"))
        if characters != "".join(sorted(set(characters))):
            rule = "characters must differ and be sorted"
            raise CheckpointError(message("load", rule, f"{quote(characters)} in {path}"))
        return cls(characters)

    def __repr__(self) -> str:
        return f"CharTokenizer({self.vocab_size} characters)"


class ByteTokenizer:
    """The bytes of UTF-8: 256 ids, every text has one.

    >>> cmha.ByteTokenizer().encode("é")
    [195, 169]
    """

    vocab_size = 256

    def encode_array(self, text: str) -> IntArray:
        """text -> ids (n,) int64, without a Python object per byte."""
        return np.frombuffer(utf8(text, "encode"), np.uint8).astype(np.int64)

    def encode(self, text: str) -> list[int]:
        """text -> list of ids, one for each byte of its UTF-8."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The byte of one id."""
        return bytes((token,))

    def decode(self, ids: ArrayLike) -> str:
        """ids (n,) -> text; bytes that are no UTF-8 become U+FFFD. ValueError: an id outside 0 .. 255."""
        return bytes(checked_ids(ids, 256).tolist()).decode("utf-8", errors="replace")

    def save(self, folder: StrPath) -> None:
        """Writes tokenizer_cmha.json into the folder, in one step."""
        write_json(os.path.join(folder, FILE_NAME), {"type": "byte"})

    @classmethod
    def load(cls, folder: StrPath) -> Self:
        """The tokenizer in this folder. CheckpointError: what the file holds; OSError: it cannot be read."""
        _, values, path = _read_own(folder, ["byte"])
        return cls._from_file(values, path)

    @classmethod
    def _from_file(cls, values: dict[str, Any], path: str) -> Self:
        if set(values) != {"type"}:
            rule = "a byte tokenizer must have no key but 'type'"
            raise CheckpointError(message("load", rule, f"{quote(values)} in {path}"))
        return cls()

    def __repr__(self) -> str:
        return "ByteTokenizer()"


TYPES: dict[str, type[CharTokenizer | ByteTokenizer]] = {"char": CharTokenizer, "byte": ByteTokenizer}


def load_own(folder: StrPath) -> CharTokenizer | ByteTokenizer:
    """The character or byte tokenizer of a folder."""
    kind, values, path = _read_own(folder, TYPES)
    return TYPES[kind]._from_file(values, path)


def _read_own(folder: StrPath, known: Iterable[str]) -> tuple[str, dict[str, Any], str]:
    """(type, values, path for a message) of the file of a folder's tokenizer, whose type is one of those known."""
    path = os.path.join(folder, FILE_NAME)
    values, where = read_json(path), quote_path(path)
    kind = values.get("type")
    if kind not in list(known):
        allowed = " or ".join(map(repr, known))
        raise CheckpointError(message("load", "tokenizer type is not known here", f"{quote(kind)} in {where}", allowed))
    return kind, values, where


class StreamDecoder:
    """Decodes ids as they come: a character cut in two waits for its rest, a byte that can start nothing shows at
    once::

        decoder = StreamDecoder(tokenizer)
        for token in tokens: print(decoder.feed(token), end="")
        print(decoder.finish())
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_bytes: Callable[[int], bytes] | None = getattr(tokenizer, "token_bytes", None)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that this id completes, often one character, '' while one is incomplete."""
        if self._token_bytes is None:
            return self._tokenizer.decode([token])
        (token,) = checked_ids([token], self._tokenizer.vocab_size).tolist()
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """What is left of a character that never came whole, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)

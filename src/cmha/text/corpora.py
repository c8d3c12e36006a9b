"""What a model learns from: the text inside every Python, the user's texts, or files of token ids; and its two parts.

    open_data     paths -> Corpus: training and validation ids that share no token, and the tokenizer that made them
    Texts         files and folders of text, read in pieces, so that a text may be larger than memory
    text_ids      the ids of texts, piece by piece
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cmha.errors import message, quote, quote_path
from cmha.text.token_files import is_token_file, open_token_files, token_dtype, tokens_in_folder
from cmha.text.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer

if TYPE_CHECKING:
    from _typeshed import StrPath
    from numpy.typing import NDArray

    from cmha.text.token_files import Tokens
    from cmha.types import ArrayLike

    Ids: TypeAlias = NDArray[np.integer[Any]] | Tokens  # of a corpus: in memory, or in mapped files

PIECE = 1 << 22  # bytes read at a time
VALIDATION_LIMIT = 1 << 20  # tokens: each evaluation reads them all


@dataclass(frozen=True)
class Corpus:
    """training (n,) and validation (m,) ids, arrays or Tokens in files; their tokenizer; sha256 of both, as text."""

    training: Ids
    validation: Ids
    tokenizer: Tokenizer | None
    sha256: str

    @classmethod
    def from_ids(cls, training: ArrayLike, validation: ArrayLike, tokenizer: Tokenizer | None = None) -> Corpus:
        """Of ids that are there already: arrays or lists (n,) and (m,) of integers from 0 to 2**32 - 1.

        Other numbers than integers: TypeError; another shape, an id out of this range: ValueError.
        """
        parts = _checked("training", training), _checked("validation", validation)
        digest = hashlib.sha256(str(len(parts[0])).encode())
        for ids in parts:
            digest.update(ids.astype("<u4").data)
        return cls(*parts, tokenizer, digest.hexdigest())


def _checked(name: str, ids: ArrayLike) -> NDArray[np.integer[Any]]:
    """ids as an array (n,), of the type they have."""
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of unequal length
        raise ValueError(message("train", f"{name} ids must be one row", "rows of unequal length")) from None
    if array.ndim != 1:
        raise ValueError(message("train", f"{name} ids must be one row", f"shape {array.shape}"))
    if not array.size:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(message("train", f"{name} ids must be integers", f"dtype {array.dtype}"))
    odd = array[(array < 0) | (array >= 1 << 32)]
    if odd.size:
        raise ValueError(message("train", f"{name} ids must be from 0 to 2**32 - 1", f"{odd[0]}"))
    return array


def open_data(paths: Iterable[StrPath], tokenizer: Tokenizer | str | None, block_size: int) -> Corpus:
    """The Corpus of texts or of token files; without paths, of default_text().

    tokenizer is None, "char", "byte", or a tokenizer. None means the characters of the texts, or the tokenizer that a
    token file brings; one that is given must be the one that made the ids. Texts are joined in their order, folders
    give their files sorted. Token files whose name holds the word `val` are the validation part; otherwise it is the
    last tenth. At most 2**20 tokens validate. Too little text for one window of block_size, an id outside the
    vocabulary, another tokenizer, text mixed with token files: ValueError.
    """
    training: Ids
    validation: Ids | None = None
    paths = [path for given in paths for path in tokens_in_folder(given)]
    in_files = [is_token_file(path) for path in paths]
    if any(in_files):
        if not all(in_files):
            got = quote_path(paths[in_files.index(False)])
            raise ValueError(message("train", "texts and token files do not mix", f"{got} beside token files"))
        training, validation, tokenizer, digests = open_token_files(paths, tokenizer)
    else:
        texts = Texts(paths) if paths else [default_text()]
        tokenizer = make_tokenizer(tokenizer or "char", texts)
        smallest = np.min_scalar_type(tokenizer.vocab_size - 1)  # a corpus stays in memory for hours
        ids = np.concatenate([piece.astype(smallest) for piece in text_ids(tokenizer, texts)])
        digests = [hashlib.sha256(ids.astype(token_dtype(tokenizer.vocab_size)).data).hexdigest()]
        training = ids
    if validation is None:  # the last tenth
        training, validation = split(training, block_size)
    else:
        validation = validation[:VALIDATION_LIMIT]
        check_length("training", training, block_size)
        check_length("validation", validation, block_size)
    told = f"{len(training)} {len(validation)} {' '.join(digests)}"
    return Corpus(training, validation, tokenizer, hashlib.sha256(told.encode()).hexdigest())


def default_text() -> str:
    """The language reference behind help(): about 465,000 characters of English that every Python carries."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        rule = "this Python comes without pydoc_data.topics, the default text"
        raise ValueError(message("train", rule, hint="Name a text file instead")) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


class Texts:
    """Text files one below the other; iterating gives them in pieces, which joined are the whole.

    A folder stands for every file in it, sorted by path; hidden ones are left out. A piece ends where a word does, so
    that byte-pair encoding gives the same ids as for the whole. progress, a function of a number of bytes, may be set.
    """

    def __init__(self, paths: Iterable[StrPath]) -> None:
        self.paths = [file for path in paths for file in _files(path)]
        self.progress: Callable[[int], object] = lambda count: None
        self._kept: dict[StrPath, list[str]] = {}  # what can be read only once: a pipe

    def __iter__(self) -> Iterator[str]:
        for number, path in enumerate(self.paths):
            if number:
                yield "\n"
            if not os.path.isfile(path) and path not in self._kept:
                self._kept[path] = list(_pieces(path, self.progress))
            yield from self._kept.get(path) or _pieces(path, self.progress)


def _files(path: StrPath) -> Sequence[StrPath]:
    if not os.path.isdir(path):
        return [path]
    found: list[str] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    if not found:
        raise ValueError(message("train", "a folder must hold text files", f"none in {quote_path(path)}"))
    return sorted(found)


def _pieces(path: StrPath, progress: Callable[[int], object]) -> Iterator[str]:
    """The text of one file: UTF-8, CRLF becomes LF, a byte-order mark is dropped; other bytes are a ValueError."""
    decoder, text, offset, empty = codecs.getincrementaldecoder("utf-8")(), "", 0, True
    with open(path, "rb") as file:
        while True:
            data = file.read(PIECE)
            waiting = len(decoder.getstate()[0])
            try:
                text += decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                place = offset - waiting + error.start
                got = f"byte 0x{error.object[error.start]:02x} at offset {place} of {quote_path(path)}"
                raise ValueError(message("read_text", "text must be UTF-8", got)) from None
            if offset == 0:
                text = text.removeprefix("\ufeff")
            offset += len(data)
            progress(len(data))
            end = _end_of_word(text) if data else len(text)
            if end:
                yield text[:end].replace("\r\n", "\n")
                text, empty = text[end:], False
            if not data:
                break
    if empty:
        raise ValueError(message("train", "text must not be empty", f"0 characters in {quote_path(path)}"))


def _end_of_word(text: str) -> int:
    """Where a line ends in text, else a word, as far right as possible; 0 where neither does."""
    for space in "\n ":
        at = text.rfind(space)
        while at > 0 and text[at - 1].isspace():
            at -= 1
        if at > 0:
            return at
    return 0


def make_tokenizer(wanted: Tokenizer | str, texts: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer called "char" (all characters of texts), "byte", or "bpe" (learnt from texts, vocab_size ids, 4096
    by default); what is one already is given back."""
    if not isinstance(wanted, str):
        return wanted
    if wanted == "char":
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return CharTokenizer("".join(characters))
    if wanted == "bpe":
        from cmha.text import BPETokenizer

        return BPETokenizer.train("".join(texts), vocab_size or 4096)
    if wanted != "byte":
        raise ValueError(message("train", "tokenizer must be char, byte, bpe, or an object", quote(wanted)))
    return ByteTokenizer()


def text_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[NDArray[np.integer[Any]]]:
    """texts -> pieces of ids (n,) of the type they have in a token file."""
    dtype = token_dtype(tokenizer.vocab_size)
    encode = getattr(tokenizer, "encode_array", tokenizer.encode)
    for text in texts:
        yield np.asarray(encode(text)).astype(dtype)


def split(ids: Ids, block_size: int) -> tuple[Ids, Ids]:
    """(training, validation): validation is the last tenth, at most 2**20 tokens; training ends where it begins.

    Each must hold one window and the token after it.
    """
    cut = max(len(ids) * 9 // 10, len(ids) - VALIDATION_LIMIT)
    training, validation = ids[:cut], ids[cut:]
    check_length("training", training, block_size)
    check_length("validation", validation, block_size)
    return training, validation


def check_length(name: str, ids: Sized, block_size: int) -> None:
    """A window of block_size tokens predicts the token after each, so one more is needed."""
    if len(ids) < block_size + 1:
        rule = f"{name} split must hold at least block_size + 1 = {block_size + 1} tokens"
        raise ValueError(message("train", rule, str(len(ids)), hint="Use a longer text or a smaller block_size"))

"""BPETokenizer: byte-pair encoding over bytes, as GPT-2 has it (Sennrich et al. 2016, Radford et al. 2019).

The `tokenizers` package (extra `bpe`) trains and merges; here are the strict reading of its files, special tokens that
are plain text unless asked for, and decoding through bytes, so that pieces of a character can wait for the rest.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from cmha.errors import CheckpointError, check_integer, listed, message, quote, quote_path
from cmha.files import read_json, read_text, write_json, write_text
from cmha.text.tokenizers import checked_ids, utf8

if TYPE_CHECKING:
    from types import ModuleType

    import tokenizers
    from _typeshed import StrPath

    from cmha.types import ArrayLike, IntArray


FILE_NAME, CONFIG = "tokenizer.json", "tokenizer_config.json"
OLD_NAMES = ("vocab.json", "merges.txt")
LIMIT = 100_000_000  # bytes of a vocabulary's file; GPT-2's has 1 to 4 million
END_OF_TEXT = "<|endoftext|>"  # the one special token of GPT-2; vocab.json does not say so
PIECE = 1 << 18  # characters that are encoded at a time, so that memory goes to ids and not to their descriptions
_CUT = re.compile(r"(?<=\S)[ \n]")  # no token of GPT-2's pattern has a space behind a letter: the ids stay the same


class BPETokenizer:
    """Byte-pair encoding over bytes, as GPT-2 has it (Sennrich et al. 2016, Radford et al. 2019): needs the extra
    `bpe`.

    BPETokenizer.train(text, vocab_size), or BPETokenizer.load(folder). Every text has ids, and decode(encode(text)) ==
    text unless the file asks for a normaliser or a space in front. backend: a tokenizers.Tokenizer whose model is BPE
    over bytes; others are a ValueError. ImportError: the package tokenizers is missing.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        package = _package()
        if not isinstance(backend, package.Tokenizer):
            raise TypeError(message("BPETokenizer", "needs a tokenizers.Tokenizer", type(backend).__name__))
        before = backend.pre_tokenizer
        space = "".join(piece for piece, _ in before.pre_tokenize_str(" ")) if before is not None else " "
        kinds = type(backend.model).__name__, type(backend.decoder).__name__
        if kinds != ("BPE", "ByteLevel") or space.strip("\u0120"):  # the symbol of this byte, maybe with one in front
            got = f"model {kinds[0]}, decoder {kinds[1]}, a space as {space!r}"
            raise ValueError(message("BPETokenizer", "must be BPE over bytes (ByteLevel)", got))
        backend.no_truncation()  # a limit that stands in the file would silently cut the user's text
        backend.no_padding()
        self._backend = backend
        self._config: dict[str, Any] | None = None
        self._backend.encode_special_tokens = True  # as text, is meant
        added = backend.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        self._bytes = _byte_table(backend.get_vocab(with_added_tokens=True), added)
        single = {data[0] for data in self._bytes if data is not None and len(data) == 1}
        self._missing = set() if backend.model.unk_token else set(range(256)) - single
        plain = isinstance(before, package.pre_tokenizers.ByteLevel) and before.use_regex
        only_special = len(added) == len(self.special_tokens)
        self._can_cut = plain and not before.add_prefix_space and backend.normalizer is None and only_special

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: tokenizers' own state forgets that special tokens are text."""
        state = {name: value for name, value in vars(self).items() if name != "_with_special"}
        return {**state, "_backend": self._backend.to_str()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _backend=_package().Tokenizer.from_str(state["_backend"]))
        self._backend.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        """The largest id and one more, V."""
        return len(self._bytes)

    @classmethod
    def train(cls, text: str | list[str] | list[StrPath] | tuple[StrPath, ...], vocab_size: int) -> Self:
        """Learns merges from text (a str), or from files (a list of paths), until there are vocab_size tokens.

        The first 256 are the bytes; text that runs out of pairs gives fewer tokens than asked for. No special tokens.
        Equal text gives equal merges. ValueError: empty text, or a vocab_size below 256.
        """
        package = _package()
        vocab_size = check_integer("BPETokenizer", "vocab_size", vocab_size, 256)
        if isinstance(text, list | tuple):
            text = "\n".join(map(read_text, text))
        if not utf8(text, "BPETokenizer"):
            raise ValueError(message("BPETokenizer", "text must hold at least one character", "''"))
        backend = _byte_level(package, package.models.BPE())
        trainer = package.trainers.BpeTrainer(
            vocab_size=min(vocab_size, 256 + 4 * len(text)),  # a character has at most 4 bytes to merge
            initial_alphabet=sorted(_symbols()),
            show_progress=False,
        )
        backend.train_from_iterator(_pieces(text), trainer)
        return cls(backend)

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """text -> list of ids. A special token that stands in the text (`<|endoftext|>`) is text like any other, with
        allow_special its one id."""
        ids: list[int] = self.encode_array(text, allow_special).tolist()
        return ids

    def encode_array(self, text: str, allow_special: bool = False) -> IntArray:
        """text -> ids (n,) int64, without a Python object per token."""
        data = utf8(text, "encode")
        if self._missing and not self._missing.isdisjoint(data):
            at, byte = next((i, b) for i, b in enumerate(data) if b in self._missing)
            rule = "text must consist of bytes in the vocabulary"
            raise ValueError(message("encode", rule, f"byte 0x{byte:02x} at offset {at}"))
        backend = self._with_special if allow_special and self.special_tokens else self._backend
        pieces = list(_pieces(text)) if self._can_cut and backend is self._backend else [text]
        parts = [np.zeros(0, np.int64)]
        for i in range(0, len(pieces), 8):  # enough for the package's threads
            group = backend.encode_batch_fast(pieces[i : i + 8], add_special_tokens=False)
            parts += [np.array(encoding.ids, np.int64) for encoding in group]
        return np.concatenate(parts)

    @functools.cached_property
    def _with_special(self) -> tokenizers.Tokenizer:
        backend: tokenizers.Tokenizer = _package().Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = False
        return backend

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id; the vocabulary may have holes."""
        data = self._bytes[token]
        if data is None:
            raise ValueError(message("decode", "ids must be in the vocabulary", f"{token}, which it leaves out"))
        return data

    def decode(self, ids: ArrayLike) -> str:
        """ids (n,) -> text, special tokens as they are written; bytes that are no UTF-8 become U+FFFD."""
        tokens = checked_ids(ids, self.vocab_size).tolist()
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")

    def save(self, folder: StrPath) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which AutoTokenizer of transformers reads."""
        config = self._config
        if config is None:
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            if END_OF_TEXT in self.special_tokens:
                config |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
        write_text(os.path.join(folder, FILE_NAME), self._backend.to_str(pretty=True) + "\n")
        write_json(os.path.join(folder, CONFIG), config)

    @classmethod
    def load(cls, folder: StrPath) -> Self:
        """Reads tokenizer.json, or vocab.json and merges.txt where there is none. CheckpointError: what they hold."""
        package, path = _package(), os.path.join(folder, FILE_NAME)
        if not os.path.exists(path) and os.path.exists(os.path.join(folder, OLD_NAMES[0])):
            tokenizer = cls(_read_old(package, *(os.path.join(folder, name) for name in OLD_NAMES)))
        else:
            tokenizer = cls._read(package, path)
        config = os.path.join(folder, CONFIG)
        tokenizer._config = read_json(config) if os.path.exists(config) else None
        return tokenizer

    @classmethod
    def _read(cls, package: ModuleType, path: str) -> Self:
        values = read_json(path, LIMIT)
        model = values.get("model")
        if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
            _refuse(path, "model must be BPE", quote(model.get("type") if isinstance(model, dict) else model))
        if model.get("dropout"):
            _refuse(path, "the same text must give the same ids", f"dropout={quote(model['dropout'])}")
        _check_vocabulary(model.get("vocab"), path)
        _check_merges(model.get("merges"), path)
        try:
            return cls(package.Tokenizer.from_str(json.dumps(values)))
        except ValueError as error:
            _refuse(path, *str(error).partition("] ")[2].split("; got ", 1))
        except Exception as error:  # the package's own, of no narrower type
            _refuse(path, "must be a tokenizer of the tokenizers package", quote(str(error)))

    def __repr__(self) -> str:
        return f"BPETokenizer({self.vocab_size} tokens)"


def _package() -> ModuleType:
    try:
        import tokenizers
    except ImportError:
        raise ImportError(message("bpe", "needs the package tokenizers", hint="pip install 'cmha[bpe]'")) from None
    package: ModuleType = tokenizers
    return package


def _refuse(path: str, rule: str, got: str, expected: str | None = None) -> NoReturn:
    raise CheckpointError(message("load", rule, f"{got} in {quote_path(path)}", expected)) from None


def _byte_level(package: ModuleType, model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
    """A tokenizer with GPT-2's pattern and a model."""
    backend: tokenizers.Tokenizer = package.Tokenizer(model)
    backend.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = package.decoders.ByteLevel()
    return backend


def _read_old(package: ModuleType, vocab_path: str, merges_path: str) -> tokenizers.Tokenizer:
    vocabulary = read_json(vocab_path, LIMIT)
    _check_vocabulary(vocabulary, vocab_path)
    lines = read_text(merges_path).rstrip("\n").split("\n")
    merges = [tuple(line.split(" ")) for line in lines[lines[0].startswith("#version") :] if line]
    _check_merges(merges, merges_path)
    try:
        backend = _byte_level(package, package.models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the package's own, of no narrower type
        _refuse(merges_path, "merges must fit the vocabulary", quote(str(error)))
    if END_OF_TEXT in vocabulary:
        backend.add_special_tokens([END_OF_TEXT])
    return backend


def _check_vocabulary(vocabulary: Any, path: str) -> None:
    if not isinstance(vocabulary, dict) or not vocabulary:
        _refuse(path, "a vocabulary must be an object of tokens and ids", quote(vocabulary))
    odd = [f"{quote(token)}: {quote(i)}" for token, i in vocabulary.items() if type(i) is not int or not 0 <= i < 2**24]
    if odd:
        _refuse(path, "ids must be integers", listed(odd), f"from 0 to {2**24 - 1}")
    if len(set(vocabulary.values())) < len(vocabulary):
        first: dict[int, str] = {}
        twice = [t for t, i in vocabulary.items() if first.setdefault(i, t) != t]
        _refuse(path, "ids must differ", listed(f"{vocabulary[t]} for {quote(t)}" for t in twice))


def _check_merges(merges: Any, path: str) -> None:
    """Each is two tokens, as one text or as a list; none stands twice, or its rank would be a matter of taste."""
    if not isinstance(merges, list):
        _refuse(path, "merges must be a list", quote(merges))
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else merge for merge in merges]
    for number, pair in enumerate(pairs, 1):
        two = isinstance(pair, list | tuple) and len(pair) == 2
        if not two or not type(pair[0]) is type(pair[1]) is str or "" in pair:
            _refuse(path, "a merge must be two tokens", f"{quote(merges[number - 1])} as merge {number}")
    if len(set(map(tuple, pairs))) < len(pairs):
        first: dict[tuple[str, ...], int] = {}
        number, pair = next((n, p) for n, p in enumerate(map(tuple, pairs), 1) if first.setdefault(p, n) != n)
        _refuse(path, "merges must differ", f"{quote(' '.join(pair))} as merges {first[pair]} and {number}")


def _symbols() -> dict[str, int]:
    """{character that stands for a byte in a vocabulary: byte}, GPT-2's: the printable ones are themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _byte_table(vocabulary: dict[str, int], added: Container[int]) -> list[bytes | None]:
    """[bytes of id 0, of id 1, ...], None for an id that no token has. An added token is its own text."""
    symbols = _symbols()
    table: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    latin = dict.fromkeys(range(256), "\uffff") | {ord(symbol): chr(byte) for symbol, byte in symbols.items()}
    for token, i in vocabulary.items():
        try:
            table[i] = token.encode() if i in added else token.translate(latin).encode("latin-1")
        except UnicodeEncodeError:  # a character that stands for no byte
            table[i] = token.encode()
    return table


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of about PIECE characters, cut where no token can be."""
    start = 0
    while start < len(text):
        cut = _CUT.search(text, start + PIECE)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end

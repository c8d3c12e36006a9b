"""Files of token ids, larger than memory where need be: written once by `cmha tokenize`, mapped while training.

    NAME.safetensors   cmha's own: one tensor `tokens` (n,), U16 where the vocabulary has at most 65,536 ids, else U32;
                       metadata: format, vocab_size, sha256 of the ids' bytes, tokenizer (its files, as JSON) and
                       tokenizer_sha256. Any reader of safetensors opens it; the ids start at a multiple of 8.
    NAME.bin           nanoGPT's: uint16, no header
    NAME.bin           llm.c's: 256 int32 (magic 20240520, version 1, n), then uint16 (GPT-2); or (20240801, 7, n), then
                       uint32 (Llama 3); all little-endian. Source: github.com/karpathy/llm.c, dev/data/data_common.py

A .bin says nothing of its tokenizer: it is the one given, or the one whose file lies in the same folder.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np
from tqdm import tqdm

from cmha.errors import CheckpointError, listed, message, quote, quote_path
from cmha.files import read_header, read_text, write_atomically, write_text

if TYPE_CHECKING:
    from _typeshed import StrPath
    from numpy.typing import NDArray

    from cmha.files import _Counted
    from cmha.text.tokenizers import Tokenizer
    from cmha.types import ArrayLike


FORMAT = "cmha-tokens-1"
LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # magic, version: type of an id
LLM_C_HEADER = 1024  # bytes
SUFFIXES = (".safetensors", ".bin")
CHUNK = 1 << 24  # bytes


def token_dtype(vocab_size: int) -> np.dtype[np.integer[Any]]:
    """uint16 where it holds every id, else uint32; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def is_token_file(path: StrPath) -> bool:
    return os.fspath(path).lower().endswith(SUFFIXES)


def tokens_in_folder(path: StrPath) -> list[StrPath]:
    """The token files of a folder, sorted, if it holds any; else the path itself."""
    names = sorted(filter(is_token_file, os.listdir(path))) if os.path.isdir(path) else []
    return [os.path.join(path, name) for name in names] or [path]


def progress_bar(what: str, total: int, unit: str = "B") -> tqdm[NoReturn]:
    """A bar that shows itself on a terminal, and only when the work takes more than two seconds."""
    disable = None if sys.stderr is not None else True  # None: where stderr is no terminal
    return tqdm(total=total, desc=what, unit=unit, unit_scale=True, delay=2, leave=False, disable=disable)


class Tokens:
    """Ids (n,) in mapped files, one after another. An array of positions gives an array of ids, a slice Tokens.

    Nothing is read before it is asked for. A file that has become shorter is a ValueError, not a crash.
    """

    def __init__(self, parts: list[tuple[TokenFile, int, int]]) -> None:
        self._parts = parts  # [(mapped file, first position, position after the last)]
        self._ends = np.cumsum([last - first for _, first, last in parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: slice) -> Tokens: ...
    @overload
    def __getitem__(self, index: ArrayLike) -> NDArray[np.integer[Any]]: ...
    def __getitem__(self, index: slice | ArrayLike) -> Tokens | NDArray[np.integer[Any]]:
        if isinstance(index, slice):
            return self._cut(*index.indices(len(self)))
        index = np.asarray(index)
        if index.size and not (0 <= index.min() and index.max() < len(self)):
            raise IndexError(message("tokens", f"positions must be from 0 to {len(self) - 1}", f"{index.max()}"))
        if len(self._parts) == 1:
            file, first, _ = self._parts[0]
            return file.take(index + first)
        ids, owner = np.empty(index.shape, np.int64), np.searchsorted(self._ends, index, side="right")
        for number in np.unique(owner):
            file, first, last = self._parts[number]
            here = owner == number
            ids[here] = file.take(index[here] - (self._ends[number] - last))
        return ids

    def _cut(self, start: int, stop: int, step: int) -> Tokens:
        if step != 1:
            raise ValueError(message("tokens", "a slice must have the step 1", str(step)))
        parts = []
        for (file, first, last), end in zip(self._parts, self._ends.tolist(), strict=True):
            begin, shift = end - (last - first), first - (end - (last - first))
            low, high = max(start, begin), min(stop, end)
            if low < high:
                parts.append((file, low + shift, high + shift))
        return Tokens(parts)


class TokenFile:
    """One file: its ids, checked against a vocabulary; metadata {} unless it is cmha's own."""

    def __init__(self, path: StrPath) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        with open(path, "rb") as file:
            self._size = os.fstat(file.fileno()).st_size
            start = np.frombuffer(file.read(12).ljust(12, b"\0"), "<i4").tolist()
            if os.fspath(path).lower().endswith(".safetensors"):
                self.dtype, self._offset, self.count = self._own()
            elif tuple(start[:2]) in LLM_C:
                self.dtype, self._offset, self.count = np.dtype(LLM_C[tuple(start[:2])]), LLM_C_HEADER, start[2]
            else:
                self.dtype, self._offset, self.count = np.dtype("<u2"), 0, self._size // 2
            expected = self._offset + self.count * self.dtype.itemsize
            if self.count < 1 or self._size != expected:
                got = f"{self._size:,} bytes for {self.count:,} ids of {self.dtype.itemsize} bytes"
                self._refuse("a token file must have the size that its ids need", got, f"{expected:,} bytes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._ids = np.frombuffer(self._map, self.dtype, offset=self._offset)

    def _refuse(self, rule: str, got: str, expected: str | None = None) -> NoReturn:
        raise CheckpointError(message("load", rule, f"{got} in {quote_path(self.path)}", expected))

    def _own(self) -> tuple[np.dtype[np.integer[Any]], int, int]:
        """(dtype, offset, count) by the header of safetensors."""
        header = read_header(self.path)
        self.metadata = header.pop("__metadata__", {})
        if self.metadata.get("format") != FORMAT or set(header) != {"tokens"}:
            self._refuse(f"file must hold token ids of format {FORMAT}", quote(self.metadata.get("format")))
        entry, names = header["tokens"], {"U16": "<u2", "U32": "<u4"}
        (length,) = np.fromfile(self.path, "<u8", 1).tolist()
        if entry["dtype"] not in names or len(entry["shape"]) != 1 or entry["data_offsets"][0] != 0 or length % 8:
            self._refuse("tokens must be one row of U16 or U32", quote(entry))
        return np.dtype(names[entry["dtype"]]), 8 + length, entry["shape"][0]

    def take(self, index: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
        """The ids at these positions, of any shape. Reading a mapped page behind the file's end would be a crash."""
        if self._map.size() < self._size:
            self._refuse("a token file must not become shorter while it is used", f"{self._map.size():,} bytes")
        ids: NDArray[np.integer[Any]] = self._ids[index]
        return ids

    def check(self, vocab_size: int, bar: tqdm[NoReturn]) -> str:
        """The SHA-256 of the ids, as text; an id outside the vocabulary and damage are refused."""
        digest, at = hashlib.sha256(), 0
        wanted = token_dtype(vocab_size)
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            while data := file.read(CHUNK):
                ids = np.frombuffer(data, self.dtype)
                if ids.max() >= vocab_size:
                    place = int(np.argmax(ids >= vocab_size))
                    got = f"{ids[place]} at position {at + place}"
                    self._refuse(f"ids must be from 0 to {vocab_size - 1}", got)
                digest.update(data if ids.dtype == wanted else ids.astype(wanted).data)
                at += len(ids)
                bar.update(len(data))
        if self.metadata.get("sha256", digest.hexdigest()) != digest.hexdigest():
            self._refuse("ids must have the SHA-256 of the header", digest.hexdigest(), quote(self.metadata["sha256"]))
        return digest.hexdigest()

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the file brings, or that lies beside it; None without either."""
        from cmha.text import load_tokenizer

        if not self.metadata:
            try:
                return load_tokenizer(os.path.dirname(os.path.abspath(self.path)))
            except FileNotFoundError:
                return None
        try:
            return tokenizer_from_state(self.metadata["tokenizer"])
        except (KeyError, ValueError, AttributeError, TypeError, RecursionError, OSError):
            self._refuse("a token file must hold its tokenizer", quote(self.metadata.get("tokenizer")))


def open_token_files(
    paths: Sequence[StrPath], tokenizer: Tokenizer | str | None = None
) -> tuple[Tokens, Tokens | None, Tokenizer, list[str]]:
    """(training, validation or None, tokenizer, SHA-256 of each file's ids) of token files; all ids are checked."""
    files = [TokenFile(path) for path in paths]
    if isinstance(tokenizer, str):
        rule = "a token file brings its tokenizer; --tokenizer may name its folder, or be left out"
        raise ValueError(message("train", rule, repr(tokenizer)))
    tokenizer = tokenizer or files[0].tokenizer()
    if tokenizer is None:
        hint = "Name the folder of the tokenizer that made the ids with --tokenizer"
        raise ValueError(message("train", "ids need a tokenizer", f"none in {quote_path(paths[0])}", hint=hint))
    _, wanted = tokenizer_state(tokenizer)
    for file in files:
        found = file.metadata.get("tokenizer_sha256", wanted)
        if found != wanted:
            rule = f"ids and run must have one tokenizer ({tokenizer})"
            got = f"SHA-256 {found[:12]}... in {quote_path(file.path)}"
            raise ValueError(message("train", rule, got, f"{wanted[:12]}..."))
    with progress_bar("checking ids", sum(os.path.getsize(path) for path in paths)) as bar:
        digests = [file.check(tokenizer.vocab_size, bar) for file in files]
    kept = [file for file in files if _is_validation(file.path)]
    if len(kept) == len(files):
        got = f"only {listed(quote_path(file.path) for file in kept)}, whose name holds the word `val`"
        raise ValueError(message("train", "training split must hold a token file", got))
    training = _joined([file for file in files if file not in kept])
    return training, _joined(kept) if kept else None, tokenizer, digests


def _joined(files: list[TokenFile]) -> Tokens:
    return Tokens([(file, 0, file.count) for file in files])


def _is_validation(path: StrPath) -> bool:
    """val.bin, fineweb_val_000000.bin: the word stands between other words."""
    return "val" in re.split(r"[^a-z]+", os.path.basename(os.fspath(path)).lower())


def tokenizer_state(tokenizer: Tokenizer) -> tuple[str, str]:
    """(JSON of the files that tokenizer.save writes, its SHA-256): equal tokenizers give equal text."""
    with tempfile.TemporaryDirectory(prefix="cmha-") as folder:
        tokenizer.save(folder)
        files = {name: read_text(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}
    text = json.dumps(files, sort_keys=True)
    return text, hashlib.sha256(text.encode()).hexdigest()


def tokenizer_from_state(text: str) -> Tokenizer:
    """The tokenizer of which tokenizer_state gave that text."""
    from cmha.text import load_tokenizer

    files = json.loads(text)
    odd = [name for name in files if not re.fullmatch(r"\w[\w.-]*", name)]  # no name leaves the folder
    with tempfile.TemporaryDirectory(prefix="cmha-") as folder:
        for name, content in files.items():
            write_text(os.path.join(folder, odd[0] if odd else name), content)
        return load_tokenizer(folder)


def write_tokens(path: StrPath, pieces: Iterable[NDArray[np.integer[Any]]], tokenizer: Tokenizer) -> int:
    """Writes the pieces, arrays of ids (n,), one after another as a token file at path, or nothing; returns their
    number. No more than one piece is in memory."""
    text, sha256 = tokenizer_state(tokenizer)
    dtype, digest, count = token_dtype(tokenizer.vocab_size), hashlib.sha256(), 0

    def header(count: int, digest: str) -> bytes:
        entry = {"dtype": {2: "U16", 4: "U32"}[dtype.itemsize], "shape": [count]}
        entry["data_offsets"] = [0, count * dtype.itemsize]
        metadata = {"format": FORMAT, "sha256": digest, "tokenizer": text, "tokenizer_sha256": sha256}
        metadata["vocab_size"] = str(tokenizer.vocab_size)
        return json.dumps({"__metadata__": metadata, "tokens": entry}, separators=(",", ":")).encode()

    room = len(header(1 << 60, digest.hexdigest()))
    room += -room % 8  # so that the ids start aligned

    def write(file: _Counted) -> None:
        nonlocal count
        file.write(bytes(8 + room))
        for ids in pieces:
            data = np.ascontiguousarray(ids, dtype)
            file.write(data.view(np.uint8).data)
            digest.update(data.data)
            count += len(ids)
        file.replace_start(room.to_bytes(8, "little") + header(count, digest.hexdigest()).ljust(room))

    write_atomically(path, write)
    return count

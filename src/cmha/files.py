"""Files: written whole or not at all, text read as UTF-8 whatever the locale, safetensors and JSON read strictly.

    write_atomically   temp file beside the target -> all bytes -> size -> fsync -> rename -> fsync of the folder
    save_safetensors   one file with one byte sequence for one content; read with the `safetensors` package
    read_text          UTF-8 only, CRLF -> LF, no byte-order mark; anything else is refused with its byte offset
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Mapping
from io import BufferedReader
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeVar

import numpy as np

from cmha.errors import CheckpointError, listed, message, quote, quote_path

if TYPE_CHECKING:
    from _typeshed import StrPath
    from numpy.typing import NDArray

Json = dict[str, Any]  # an object of a JSON file; what stands in it is for its reader to check
HEADER_LIMIT = 10_000_000  # bytes; a tenth of the format's own limit, as Python's json takes many times a text's size
MAX_TENSORS = 65_536
T = TypeVar("T")
_writing = threading.Lock()  # one writer at a time in a process, so a temp file of our own number is always a leftover


class _Counted:
    """A binary file that knows how many bytes it was given, so that lost ones are noticed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size = file, 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.size += memoryview(data).nbytes

    def replace_start(self, data: bytes) -> None:
        """Other bytes for the first ones: a header that can only be known when what follows it is written."""
        self._file.seek(0)
        self._file.write(data)
        self._file.seek(0, os.SEEK_END)


def write_atomically(path: StrPath, write: Callable[[_Counted], object]) -> None:
    """Calls write(file) and puts the result at path in one step: a reader sees the old file or the new one, no mixture.

    A link is followed: the file it points to is replaced. Any failure removes the temp file and is raised again, an
    OSError with path as its file name.
    """
    path = os.path.realpath(path)
    folder, name = os.path.split(path)
    short = os.fsdecode(os.fsencode(name)[:200])  # a name may have 255 bytes, and the temp name is longer
    temp = os.path.join(folder, f".{short}.tmp-{os.getpid()}")
    with _writing:
        try:
            _write_temp(temp, write)
            try:
                os.replace(temp, path)
            except BaseException:
                _remove(temp)
                raise
            _sync_folder(folder)
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(error.errno, error.strerror, path) from error  # the same class, the name asked for


def _write_temp(temp: str, write: Callable[[_Counted], object]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        descriptor = os.open(temp, flags, 0o666)
    except FileExistsError:  # left by a killed process that had our number
        os.unlink(temp)
        descriptor = os.open(temp, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            counted = _Counted(file)
            write(counted)
            file.flush()
            size = os.fstat(file.fileno()).st_size
            if size != counted.size:
                raise OSError(errno.EIO, f"the disk kept {size} of {counted.size} bytes")
            os.fsync(file.fileno())
    except BaseException:
        _remove(temp)
        raise


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _sync_folder(folder: str) -> None:
    """A rename lasts only once its folder is on the disk."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: StrPath, text: str) -> None:
    data = text.encode("utf-8")
    write_atomically(path, lambda file: file.write(data))


def write_json(path: StrPath, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def decode_text(data: bytes, source: str) -> str:
    """Bytes -> text: UTF-8, CRLF becomes LF, a byte-order mark is dropped; source names them in the error."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x} at offset {error.start} of {source}"
        raise ValueError(message("read_text", "text must be UTF-8", got)) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_text(path: StrPath) -> str:
    with open(path, "rb") as file:
        return decode_text(file.read(), quote_path(path))


def _refuse(path: StrPath, rule: str, got: str) -> NoReturn:
    raise CheckpointError(message("load", rule, f"{got} in {quote_path(path)}")) from None


def open_file(path: StrPath) -> BufferedReader:
    """For reading. A pipe or a device would be waited for, or never end."""
    if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):  # which open() itself refuses
        _refuse(path, "must be a regular file", "another kind of file")
    return open(path, "rb")


def read_json(path: StrPath, limit: int = HEADER_LIMIT) -> Json:
    """The JSON object in a file; duplicate keys, NaN and anything that is not an object are refused."""
    with open_file(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        _refuse(path, f"file must hold at most {limit} bytes", "more")
    return _parse_object(data, path)


def _parse_object(data: bytes, path: StrPath) -> Json:
    def unique(pairs: list[tuple[str, Any]]) -> Json:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    _refuse(path, "JSON keys must differ", f"{quote(key)} twice")
                seen.add(key)
        return found

    def finite(text: str) -> float:
        if not math.isfinite(float(text)):
            _refuse(path, "JSON numbers must be finite", quote(text))
        return float(text)

    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_constant=lambda text: _refuse(path, "JSON numbers must be finite", text),
            parse_float=finite,
        )
    except CheckpointError:
        raise
    except UnicodeDecodeError as error:
        _refuse(path, "JSON must be UTF-8", f"byte 0x{data[error.start]:02x} at offset {error.start}")
    except RecursionError:
        _refuse(path, "JSON must not be nested this deep", "more levels than Python's stack")
    except ValueError as error:
        _refuse(path, "file must hold JSON", str(error))
    if not isinstance(value, dict):
        _refuse(path, "JSON must be an object", f"a {type(value).__name__}")
    return value


def remove_leftovers(folder: StrPath) -> None:
    """Temp files that a killed process left in a folder which only this process writes to."""
    for name in os.listdir(folder):
        if re.fullmatch(r"\..+\.tmp-\d+", name):
            _remove(os.path.join(folder, name))


def append_text(path: StrPath, text: str) -> None:
    """Puts text behind what a file holds (made if needed) and onto the disk; a failure takes back what was written."""
    with open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        data = memoryview(text.encode("utf-8"))
        end = size + data.nbytes
        try:
            while data:
                data = data[file.write(data) :]
            if os.fstat(file.fileno()).st_size != end:
                raise OSError(errno.EIO, f"the disk kept {os.fstat(file.fileno()).st_size} of {end} bytes")
            os.fsync(file.fileno())
        except BaseException as error:
            os.ftruncate(file.fileno(), size)
            if isinstance(error, OSError) and error.filename is None:
                raise type(error)(error.errno, error.strerror, path) from error
            raise


def save_safetensors(
    path: StrPath, tensors: Mapping[str, Any], metadata: Mapping[str, object] | None = None, sealed: bool = False
) -> None:
    """Writes {name: float32 array} at path. Equal content gives equal bytes, and no second copy of the data is made.

    sealed: metadata gets a key "sha256", over the header without it and the data, which check_seal compares.
    The header is written here and not by the package, which puts metadata in an order that changes from run to run.
    """
    arrays: dict[str, NDArray[np.float32]] = {}
    for name in sorted(tensors):
        array = np.asarray(tensors[name])
        if array.dtype.newbyteorder("=") != np.float32:
            raise TypeError(message("save", "tensors must be float32", f"{quote(name)} of dtype {array.dtype}"))
        arrays[name] = np.ascontiguousarray(array, dtype="<f4").reshape(array.shape)
    header: Json = {}
    offset = 0
    if metadata:
        header["__metadata__"] = {key: str(metadata[key]) for key in sorted(metadata)}
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    if sealed:
        seal = hashlib.sha256(_header_bytes(header))
        for array in arrays.values():
            seal.update(array.reshape(-1).view(np.uint8).data)
        header["__metadata__"]["sha256"] = seal.hexdigest()
    text = _header_bytes(header)
    text += b" " * (-len(text) % 8)  # so that the data starts aligned

    def write(file: _Counted) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            if array.size:
                file.write(array.reshape(-1).view(np.uint8).data)

    write_atomically(path, write)


def _header_bytes(header: Json) -> bytes:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def check_seal(path: StrPath) -> dict[str, str]:
    """The metadata of a sealed file, every byte of which is as it was written."""
    header = read_header(path)
    metadata: dict[str, str] = header.get("__metadata__", {})
    written = metadata.pop("sha256", None)
    seal = hashlib.sha256(_header_bytes(header))
    with open(path, "rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while piece := file.read(1 << 20):
            seal.update(piece)
    if seal.hexdigest() != written:
        _refuse(path, "content must have the SHA-256 it was written with", f"{seal.hexdigest()}, not {written},")
    return metadata


def read_header(path: StrPath) -> Json:
    """The header of a safetensors file, checked against the size of the file before a byte of it is parsed."""
    with open_file(path) as file:
        return header_of(file, path)[0]


def header_of(file: BufferedReader, path: StrPath) -> tuple[Json, int]:
    """(header, byte at which the data starts)"""
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        _refuse(path, "file must start with 8 bytes of header length", f"{size} bytes")
    length = int.from_bytes(file.read(8), "little")
    if length > min(HEADER_LIMIT, size - 8):
        rule = f"header must fit in the file of {size} bytes and in {HEADER_LIMIT} bytes"
        _refuse(path, rule, f"a header length of {length}")
    data = file.read(length)
    if len(data) < length:
        _refuse(path, "file must not shrink while it is read", f"{len(data)} of {length} bytes")
    header = _parse_object(data, path)
    if len(header) > MAX_TENSORS + 1:
        _refuse(path, f"file must hold at most {MAX_TENSORS} tensors", f"{len(header)} entries")
    odd = [quote(name) for name, entry in header.items() if not _is_entry(name, entry)]
    if odd:
        _refuse(path, "header entries must hold dtype, shape and data_offsets", listed(odd))
    return header, 8 + length


def _is_entry(name: str, entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    if name == "__metadata__":
        return all(isinstance(value, str) for value in entry.values())
    whole = [entry.get("shape"), entry.get("data_offsets")]
    return (
        set(entry) == {"dtype", "shape", "data_offsets"}
        and isinstance(entry["dtype"], str)
        and all(isinstance(part, list) and all(type(n) is int and 0 <= n < 2**63 for n in part) for part in whole)
        and len(entry["shape"]) <= 8
        and len(entry["data_offsets"]) == 2
    )


def read_metadata(path: StrPath) -> dict[str, str]:
    """The text entries of a safetensors file; {} where there are none."""
    metadata: dict[str, str] = read_header(path).get("__metadata__", {})
    return metadata


def load_safetensors(path: StrPath) -> dict[str, NDArray[Any]]:
    """{name: array} of a safetensors file. Whatever is wrong with the file is a CheckpointError that names it."""
    from safetensors.numpy import load_file

    read_header(path)
    return as_checkpoint_error(load_file, path)


def as_checkpoint_error(call: Callable[[StrPath], T], path: StrPath) -> T:
    """call(path) of the safetensors package; its refusals become ours."""
    from safetensors import SafetensorError

    try:
        return call(path)
    except OSError:
        raise
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = " ".join(str(error).split())[:120]
        _refuse(path, "file must be valid safetensors", text)

"""A safetensors file read a few rows at a time, whatever its precision, as float32."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cmha.errors import CheckpointError, message, quote, quote_path
from cmha.files import as_checkpoint_error, header_of, open_file

if TYPE_CHECKING:
    from _typeshed import StrPath
    from numpy.typing import NDArray

BLOCK = 1 << 23  # bytes of a file that are in memory at a time
FLOATS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}  # NumPy has no bfloat16: the upper half of a float32


class TensorFile:
    """A safetensors file, open: `shapes` and `sizes` (bytes) of its tensors by name, and their rows, block by block.

    The safetensors package checks the layout (sizes, overlaps, holes, the end of the file). It maps files into memory,
    where a file that shrinks kills the process, and NumPy's part of it knows no bfloat16: so the bytes are read here.
    """

    def __init__(self, path: StrPath) -> None:
        self.path, current = path, False
        while not current:
            self._file = open_file(path)
            try:
                header, self._start = header_of(self._file, path)
                as_checkpoint_error(_check_layout, path)
                current = os.path.samestat(os.stat(path), os.fstat(self._file.fileno()))
            finally:
                if not current:  # refused; or a writer has put another file in its place, and that one was checked
                    self.close()
        self._entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self._entries.items()}
        self.sizes = {name: e["data_offsets"][1] - e["data_offsets"][0] for name, e in self._entries.items()}

    def close(self) -> None:
        self._file.close()

    def _refuse(self, rule: str, got: str) -> NoReturn:
        raise CheckpointError(message("load", rule, f"{got} in {quote_path(self.path)}"))

    def fault(self, name: str) -> str | None:
        """What keeps the tensor from being read as float32, or None."""
        dtype = self._entries[name]["dtype"]
        return None if dtype in FLOATS else f"{quote(name)} is {quote(dtype)}, expected one of {', '.join(FLOATS)}"

    def blocks(self, name: str) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(first row, float32 rows) from the first row to the last; with fewer than two axes all in one."""
        entry, shape = self._entries[name], self.shapes[name] or (1,)
        dtype = np.dtype(FLOATS[entry["dtype"]])
        row = math.prod(shape[1:]) * dtype.itemsize
        step = shape[0] if len(shape) == 1 else max(1, BLOCK // max(1, row))
        for first in range(0, shape[0], step or 1):
            raw = np.empty((min(step, shape[0] - first), *shape[1:]), dtype)
            self._file.seek(self._start + entry["data_offsets"][0] + first * row)
            if raw.size and self._file.readinto(raw.reshape(-1).view(np.uint8).data) < raw.nbytes:
                self._refuse("file must not shrink while it is read", f"an end inside {quote(name)}")
            yield first, widened(raw)


def _check_layout(path: StrPath) -> None:
    from safetensors import safe_open

    with safe_open(path, "numpy"):
        pass


def widened(raw: NDArray[Any]) -> NDArray[np.float32]:
    """float32: float16 and bfloat16 (as uint16) exactly, float64 to the nearest, beyond the largest to infinity."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return raw.astype(np.float32, copy=False)

"""The folder of a run, from the side of the one who writes it: nobody else's run, locked, its log without gaps.

    log.jsonl   a line per evaluation; written, and on the disk, before the checkpoint that knows of it
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypedDict

from cmha.errors import message, quote_path
from cmha.files import append_text, remove_leftovers, write_text

if TYPE_CHECKING:
    from _typeshed import StrPath

LOG = "log.jsonl"
RUN_FILES = ("config.json", "model.safetensors", LOG, "tokenizer_cmha.json", "tokenizer.json", "checkpoints")


class Row(TypedDict):
    """A line of the log; val_loss is None on the way from one evaluation to the next."""

    step: int
    loss: float
    val_loss: float | None
    lr: float
    grad_norm: float
    tokens_per_second: float


def refuse_a_run(folder: StrPath, begun: bool = False) -> None:
    """A new run goes into a folder without files of another. begun: into one whose first save never came to an end."""
    found = [name for name in RUN_FILES if os.path.lexists(os.path.join(folder, name))]
    if found and not (begun and LOG in found):
        rule = "the folder must not hold a run or a model already"
        got = f"{quote_path(folder)} with {found[0]}"
        raise ValueError(message("train", rule, got, hint="To go on with a run, resume it"))


@contextmanager
def locked(folder: StrPath) -> Iterator[None]:
    """Inside, no other process trains in this folder; the lock leaves no file, and goes with the process."""
    os.makedirs(folder, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
                got = f"another one in {quote_path(folder)}"
                raise ValueError(message("train", "one run at a time may use a folder", got)) from None
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):  # a file system without locks
                raise
        yield
    finally:
        os.close(descriptor)


def tidy(folder: StrPath) -> None:
    """Removes temp files that a killed run left behind."""
    remove_leftovers(folder)
    if os.path.isdir(os.path.join(folder, "checkpoints")):
        remove_leftovers(os.path.join(folder, "checkpoints"))


def continue_log(folder: StrPath, last: int) -> list[Row]:
    """Cuts the log back to the lines up to step `last`, which are returned; a line cut short by a crash goes too."""
    path = os.path.join(folder, LOG)
    rows: list[Row] = []
    if not os.path.exists(path):
        return rows
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.readlines()
    for line in lines:
        try:
            row = json.loads(line)
            if (rows[-1]["step"] if rows else 0) < row["step"] <= last and line.endswith("\n"):
                rows.append(row)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    kept = [_line(row) for row in rows]
    if kept != lines:
        write_text(path, "".join(kept))
    return rows


def append_to_log(folder: StrPath, rows: Iterable[Row]) -> None:
    append_text(os.path.join(folder, LOG), "".join(map(_line, rows)))


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"

"""Where a run goes: a folder named or numbered, made, and removed where nothing came of it; and what --resume finds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from cmha.cli.options import UsageError
from cmha.errors import CheckpointError, message, quote_path

if TYPE_CHECKING:
    from _typeshed import StrPath

    from cmha.train.checkpoint import Checkpoint


def claim(out: str | None) -> tuple[str, list[str]]:
    """(the run's folder, the folders made for it, innermost first); without --out the next number in runs/."""
    if out is not None:
        return out, _make_folders(out)
    made = _make_folders("runs")
    number = max(_numbers(), default=0)
    while True:
        number += 1
        folder = os.path.join("runs", f"{number:03d}")
        try:
            os.mkdir(folder)
            return folder, [folder, *made]
        except FileExistsError:  # another run took it just now
            continue


def _numbers() -> list[int]:
    return [int(name) for name in os.listdir("runs") if name.isascii() and name.isdigit()]


def _make_folders(path: str) -> list[str]:
    made, at = [], os.path.abspath(path)
    while not os.path.lexists(at):
        made.append(at)
        at = os.path.dirname(at)
    os.makedirs(path, exist_ok=True)
    return made


def remove(folder: StrPath, made: list[str], begun: bool) -> None:
    """A run that ends before its first save, or in it, leaves nothing behind: no number taken, no --out blocked."""
    from cmha.train.run_folder import RUN_FILES

    for name in RUN_FILES if begun else ():  # none was there when the run began
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.unlink(path)
    for path in made:
        try:
            os.rmdir(path)
        except OSError:  # somebody else's files are in it
            break


def find(
    resume: str | None, out: str | None, say: Callable[[str], object]
) -> tuple[Checkpoint | None, str | None]:
    """(checkpoint or None, the folder to go on in or None) for --resume ("" without a path) and --out."""
    from cmha.train.checkpoint import Checkpoint, checkpoints, newest

    if resume is None:
        return None, out
    if resume:
        if out is not None:
            raise UsageError("--out does not go with --resume=PATH, whose run goes on in its own folder")
        if not os.path.isdir(resume):
            return Checkpoint.read(resume), None
        found = checkpoints(resume)
        if not found:
            raise ValueError(message("resume", "a run must hold a checkpoint", f"none in {quote_path(resume)}"))
        try:
            return Checkpoint.read(found[-1][1]), resume
        except CheckpointError as error:
            whole, _ = newest(resume)  # where all are damaged, its error says so
            if whole is None:  # somebody removed them just now
                raise
            hint = f"--out {resume} --resume goes on from step-{whole.step}"
            raise CheckpointError(f"{error}. {hint}") from None
    if out is None and os.path.isdir("runs") and _numbers():
        last = max(_numbers())
        out = next(path for name in sorted(os.listdir("runs")) if name.isdigit() and int(name) == last
                   for path in [os.path.join("runs", name)])  # fmt: skip
    if out is None:
        return None, None
    checkpoint, damaged = newest(out)
    if checkpoint is not None:
        for fault in damaged:
            say(f"cmha: warning: {fault}; going on from {quote_path(checkpoint.path)}")
    return checkpoint, out

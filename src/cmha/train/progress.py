"""The line on stderr while a run goes on. Numbers come before the bar: a narrow terminal loses whole fields, no digits.

     2100/5000  loss 1.873  val 1.912  00:34 left  25,625 tokens/s  |#########          |
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from tqdm.std import Bar

if TYPE_CHECKING:
    from cmha.train.run_folder import Row

SEPARATOR = "  "
LEAST_BAR = 10  # columns; a shorter one says nothing


class ProgressLine(tqdm):  # type: ignore[misc]  # tqdm comes without types
    """A tqdm whose line is made here; row is the newest one of the trainer, val_loss the last that was measured.

    done steps were there before: they count, but took no time here.
    """

    row: Row | None = None
    val_loss: float | None = None

    def __init__(self, total: int, done: int, disable: bool) -> None:
        pace = 0.2 if sys.stderr and sys.stderr.isatty() else 10.0  # seconds between two looks
        super().__init__(total=total, initial=done, disable=disable, mininterval=pace, nrows=20)  # some terminals say 0

    def say(self, text: str) -> None:
        """Text above the line."""
        try:
            self.write(text, file=sys.stderr)
        except OSError:
            pass

    def __str__(self) -> str:
        done = f"{self.n:{len(str(self.total))}}/{self.total}"
        if self.row is None:
            return fitted([done], columns())
        elapsed = self.format_dict["elapsed"]
        here = self.n - self.initial
        left = elapsed / here * (self.total - self.n) if here else 0
        fields = [done, f"loss {self.row['loss']:.3f}"]
        if self.val_loss is not None:
            fields.append(f"val {self.val_loss:.3f}")
        fields.append(f"{self.format_interval(left)} left" if self.n < self.total else self.format_interval(elapsed))
        fields.append(f"{self.row['tokens_per_second']:,.0f} tokens/s")
        line = fitted(fields, columns())
        width = columns() - len(line) - len(SEPARATOR) - 2
        if width < LEAST_BAR or not line.endswith(fields[-1]):
            return line
        return f"{line}{SEPARATOR}|{Bar(self.n / self.total, width, Bar.ASCII if self.ascii is True else Bar.UTF)}|"

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        try:
            return super().display(msg, pos)
        except OSError:  # the terminal was closed: no reason to lose a run
            return False

    def close(self) -> None:
        try:
            super().close()
        except OSError:
            pass


def columns() -> int:
    """Of stderr, less the last one, behind which some terminals begin a new line."""
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError, AttributeError):  # no terminal
        width = 0
    return (width or shutil.get_terminal_size().columns) - 1


def fitted(fields: list[str], width: int) -> str:
    """As many fields, from the first on, as there is room for; where not even two fit, the second: the loss."""
    line = fields[0]
    for field in fields[1:]:
        if len(line) + len(SEPARATOR) + len(field) > width:
            break
        line += SEPARATOR + field
    if line == fields[0] and len(fields) > 1:
        line = fields[1]
    return line if len(line) <= width else ""

"""SIGINT, SIGTERM, SIGHUP: the first asks the loop to stop after its step, a second one ends the process at once.

A closed terminal may send SIGHUP twice, from the shell and from the kernel: that is one wish, so the second is ignored.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

HANGUP = getattr(signal, "SIGHUP", None)  # not on Windows


def stop_signals() -> list[int]:
    """The signals that ask for an end; not SIGHUP where nohup has it ignored."""
    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    return numbers if HANGUP is None or signal.getsignal(HANGUP) == signal.SIG_IGN else [*numbers, HANGUP]


class StopRequest:
    """with StopRequest() as stop: ... `if stop.number: break`; number is the signal that came, else None."""

    number: int | None = None

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {}  # handlers, whose type the standard library does not name
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._before = {number: signal.signal(number, self._ask) for number in stop_signals()}
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()
        if number == HANGUP:
            signal.signal(number, signal.SIG_IGN)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        self._restore()

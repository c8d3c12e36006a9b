"""What the command needs before the package is imported: its own way of ending, already while the imports run.

`cmha` and `python -m cmha` import this package before a line of cmha.cli can run. A wrong CMHA_SIMD or a Ctrl-C in that
first moment must still end as everything does there: in one line, or in silence. As a library nothing of this happens.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType

# the handler of SIGINT that was there before
_interrupt: Callable[[int, FrameType | None], object] | int | None = None


def is_the_command() -> bool:
    """This process is `cmha` or `python -m cmha`."""
    arguments: list[str] = getattr(sys, "argv", None) or [""]
    if arguments[0] == "-m":  # while Python looks for the module
        return sys.orig_argv[-len(arguments)] in ("cmha", "-mcmha")
    return os.path.basename(arguments[0]).removesuffix(".exe") == "cmha"


def before_imports() -> None:
    global _interrupt
    if is_the_command():
        sys.excepthook = _end
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # half an import has nothing to tidy up
            _interrupt = signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def after_imports() -> None:
    if _interrupt is not None:
        signal.signal(signal.SIGINT, _interrupt)


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The command's sys.excepthook: what is raised outside of cmha.cli's own care."""
    if issubclass(kind, KeyboardInterrupt):
        sys.exit(130)
    if "--debug" in sys.argv:
        sys.__excepthook__(kind, error, trace)
    elif sys.stderr is not None:
        print("cmha: error:", " ".join(str(error).split()), file=sys.stderr)
    sys.exit(2 if issubclass(kind, ValueError) else 1)

"""What the command needs before the package is imported: its own way of ending, already while the imports run.

`cmha` and `python -m cmha` import this package before a line of cmha.cli can run. A wrong CMHA_SIMD or a Ctrl-C in that
first moment must still end as everything does there: in one line, or in silence. As a library nothing of this happens.
"""

import os
import signal
import sys

_interrupt = None  # the handler of SIGINT that was there before


def is_the_command():
    """This process is `cmha` or `python -m cmha`."""
    arguments = getattr(sys, "argv", None) or [""]
    if arguments[0] == "-m":  # while Python looks for the module
        return sys.orig_argv[-len(arguments)] in ("cmha", "-mcmha")
    return os.path.basename(arguments[0]) == "cmha"


def before_imports():
    global _interrupt
    if is_the_command():
        sys.excepthook = _end
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # half an import has nothing to tidy up
            _interrupt = signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def after_imports():
    if _interrupt is not None:
        signal.signal(signal.SIGINT, _interrupt)


def _end(kind, error, trace):
    """The command's sys.excepthook: what is raised outside of cmha.cli's own care."""
    if issubclass(kind, KeyboardInterrupt):
        sys.exit(130)
    if "--debug" in sys.argv:
        sys.__excepthook__(kind, error, trace)
    elif sys.stderr is not None:
        print("cmha: error:", " ".join(str(error).split()), file=sys.stderr)
    sys.exit(2 if issubclass(kind, ValueError) else 1)

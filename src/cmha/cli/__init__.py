"""The command line: `cmha COMMAND ...` and `python -m cmha COMMAND ...` are one program.

One file per command, loaded when it is called. Results go to stdout, progress to stderr, and a failure ends with one
line `cmha: error: ...`. Exit codes: 0 done, 2 wrong before a file is opened, 1 all else, 130, 143 and 129 for SIGINT,
SIGTERM and SIGHUP (a closed terminal), 141 when the reader of stdout has left.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from cmha.cli.options import Parser, UsageError

TOLD = (ValueError, TypeError, IndexError, ImportError, OSError, MemoryError, UsageError)  # their texts say it all
COMMANDS = {
    "train": "train a small GPT on text, and keep it",
    "tokenize": "text into a file of token ids, larger than memory if need be",
    "plot": "the loss curves of runs, as text or as a picture",
    "generate": "let a trained model write on",
    "score": "how well a model predicts a text: its perplexity",
    "convert": "turn llm.c's model file into a folder for cmha and transformers",
    "trace": "attention's eight steps, with shapes, strides and copies",
    "heads": "where every head of a model looks, as heat maps",
    "info": "how the core was built, and what it uses here",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers only there
        return _guarded(arguments)
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]  # by nohup
    before = {number: signal.signal(number, _terminate) for number in numbers if number not in ignored}
    try:
        return _guarded(arguments)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _guarded(arguments: list[str]) -> int:
    """Runs a command; whatever it ends with becomes an exit code and at most one line."""
    if sys.stdout is None:  # a result without a way out is no success
        return _fail(OSError("stdout is closed"), 1)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # any text prints in any locale
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_stdout()
        return 141
    except KeyboardInterrupt:
        return 130
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except UsageError as error:
        return _fail(error, 2) if _is_first() else 2
    except Exception as error:
        _drop_stdout()
        if "--debug" in arguments:
            raise
        shared = arguments[:1] == ["train"]  # its processes find different faults; those of any other find the same
        return _fail(error, 1) if shared or _is_first() else 1


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name not in COMMANDS:
        return _top(arguments or ["--help"])
    command = importlib.import_module(f"cmha.cli.{name}")
    parser = Parser(prog=f"cmha {name}", description=command.DESCRIPTION, epilog=command.EPILOG)
    command.add_options(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    try:
        args = parser.parse_intermixed_args(arguments[1:])
    except SystemExit:  # --help
        return 0
    return command.run(args) or 0


def _top(arguments: list[str]) -> int:
    """`cmha` alone, --help, --version, or a word that is no command."""
    commands = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="cmha",
        usage="cmha COMMAND [OPTION ...]",
        description="Multi-head attention, and the GPT around it, on a compiled CPU core.",
        epilog=f"commands:\n{commands}\n\n"
        "examples:\n"
        "  cmha train                                   learn the Python documentation, in less than a minute\n"
        '  cmha generate runs/001 --prompt "The list"   write on\n'
        "  cmha trace                                   see attention's eight steps\n"
        '  cmha heads runs/001 "The list"               see where every head looks\n\n'
        "`cmha COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    words = [word for word in arguments if not word.startswith("-")]
    if words:
        raise UsageError(f"no such command: {words[0]!r}; there are {', '.join(COMMANDS)}")
    try:
        args = parser.parse_args(arguments)
    except SystemExit:
        return 0
    if args.version:
        from cmha.threads import installed_version

        print("cmha", installed_version("cmha"))
    return 0


def _is_first() -> bool:
    """Whether this is the one of several processes under mpiexec that tells what all of them find."""
    from cmha.train.parallel import launched_rank

    return not launched_rank()


def _fail(error: Exception, code: int) -> int:
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.strerror}: {os.fspath(error.filename)!r}"
    elif isinstance(error, TOLD) and str(error):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    if sys.stderr is not None:
        try:
            print("cmha: error:", " ".join(text.split()), file=sys.stderr, flush=True)
        except OSError:  # nobody reads it
            pass
    return code


def _drop_stdout() -> None:
    """What has no way out of stdout's buffer would fail once more at exit: send it nowhere."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # a full disk, a reader that left, closed, none at all
        try:
            number = sys.stdout.fileno()
        except (OSError, ValueError, AttributeError):  # not a file
            return
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, number)
        os.close(sink)

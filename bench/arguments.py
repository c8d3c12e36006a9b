"""Arguments that are checked before anything is measured; a mistake is one line on stderr and exit code 2."""

import argparse
import math
import os
import shutil
import sys
from pathlib import Path

PICTURES = (".png", ".svg", ".pdf")


class Parser(argparse.ArgumentParser):
    def __init__(self, prog, description):
        super().__init__(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)


def positive(text):
    """An integer from 1 to 999999."""
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be an integer above 0; got {text!r}")
    return int(text)


def seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text!r}")
    return value


def existing(text):
    """A file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text!r}")
    return text


def output(text):
    """A file that can be written."""
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file; got {text!r}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot be written: {text!r}")
    return text


def picture(text):
    """A file that matplotlib can write; matplotlib itself must be there."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(PICTURES)}; got {text!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise argparse.ArgumentTypeError("a plot needs matplotlib; pip install 'cmha[plot]'") from None
    return output(text)


def python(text):
    """A program that can be run."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"no such program: {text!r}")
    return text

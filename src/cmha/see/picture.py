"""One way to write a picture with matplotlib (extra `plot`): the same file each time, and text that stays text."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cmha.errors import message
from cmha.files import write_atomically

if TYPE_CHECKING:
    from _typeshed import StrPath
    from matplotlib.figure import Figure

DOTS = 160  # per inch, of a .png


def check_matplotlib(op: str) -> None:
    """ImportError that names the extra, where there is no matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ImportError(message(op, "a picture needs matplotlib", hint="pip install 'cmha[plot]'")) from None


@contextmanager
def picture(op: str, path: StrPath, **options: Any) -> Iterator[Figure]:
    """A matplotlib Figure to draw on, written to path at the end; the ending, .png or .svg, says which kind."""
    check_matplotlib(op)
    import matplotlib
    from matplotlib.figure import Figure

    # A name or a token is no formula, and equal numbers give equal files.
    with matplotlib.rc_context({"text.parse_math": False, "svg.hashsalt": "cmha"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a text may hold letters that the font has not
        figure = Figure(**{"layout": "constrained"} | options)
        yield figure
        written, kind = io.BytesIO(), os.path.splitext(path)[1][1:].lower()
        metadata = {"svg": {"Date": None}, "png": {"Software": None}}[kind]
        figure.savefig(written, format=kind, dpi=DOTS, metadata=metadata)
    write_atomically(path, lambda file: file.write(written.getbuffer()))

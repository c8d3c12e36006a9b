"""Heat maps of attention as text: with colour where the terminal has it, else as characters."""

from __future__ import annotations

import os
import shutil
import textwrap
from typing import TYPE_CHECKING, TextIO

import numpy as np

if TYPE_CHECKING:
    from cmha.see.maps import Maps
    from cmha.types import FloatArray

RAMP = " .:-=+*#%@"  # 0 .. 1 without colour
_COLOURS = (17, 18, 19, 25, 31, 37, 73, 115, 157, 229)  # of the 256: dark blue to light yellow
_GAP = "   "


def has_colour(stream: TextIO) -> bool:
    """A terminal that is not dumb, and NO_COLOR (https://no-color.org) is not set."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def heat_maps(maps: Maps, *, colour: bool = False, width: int | None = None, encoding: str = "utf-8") -> str:
    """The maps as lines of text: a row is a query, a column the key it looks at, heads side by side as they fit.

    width: of the terminal, its own by default. A cell is one character, two columns wide with colour if that fits.
    """
    width = width or shutil.get_terminal_size().columns
    maps = maps.cut(max(1, width - 12), f"as wide as the terminal (columns: {width})")
    labels = [_encodable(label, encoding) for label in maps.labels]
    margin = min(8, max(map(len, labels)))
    cell = 2 if colour and margin + 1 + 2 * len(labels) <= width else 1
    lines = [maps.title, *([maps.note] if maps.note else []), *_legend(colour, width)]
    for layer, weights in maps.weights.items():
        lines += _layer(layer, weights, labels, margin, cell, colour, width)
    return "\n".join(lines)


def _layer(
    layer: int, weights: FloatArray, labels: list[str], margin: int, cell: int, colour: bool, width: int
) -> list[str]:
    each = cell * len(labels)
    at_once = max(1, (width - margin - 1 + len(_GAP)) // (max(each, len("head 000")) + len(_GAP)))
    lines = []
    for start in range(0, len(weights), at_once):
        heads = range(start, min(start + at_once, len(weights)))
        wide = max(each, len("head 000"))
        titles = _GAP.join(f"head {h}".ljust(wide) for h in heads)
        keys = "".join(label[0].ljust(cell) for label in labels).ljust(wide)
        lines += ["", f"layer {layer}", " " * (margin + 1) + titles.rstrip()]
        lines += [" " * (margin + 1) + _GAP.join(keys for _ in heads).rstrip()]
        for query, label in enumerate(labels):
            rows = [_row(weights[h, query], cell, colour) + " " * (wide - each) for h in heads]
            lines.append(f"{label[:margin]:>{margin}} " + _GAP.join(rows).rstrip())
    return lines


def _row(row: FloatArray, cell: int, colour: bool) -> str:
    levels = np.clip((np.nan_to_num(row) * len(RAMP)).astype(int), 0, len(RAMP) - 1)
    if not colour:
        return "".join(RAMP[i] * cell for i in levels)
    return "".join(f"\x1b[48;5;{_COLOURS[i]}m" + " " * cell for i in levels) + "\x1b[0m"


def _legend(colour: bool, width: int) -> list[str]:
    """One line, or several where the terminal would break it inside a word."""
    ramp = "".join(f"\x1b[48;5;{c}m " for c in _COLOURS) + "\x1b[0m" if colour else f"[{RAMP}]"
    scale, axes = f"0 {ramp} 1", "row: query, column: the key it looks at"
    if len(f"0 [{RAMP}] 1   {axes}") <= width:
        return [f"{scale}   {axes}"]
    return [scale, *textwrap.wrap(axes, max(16, width))]


def _encodable(label: str, encoding: str) -> str:
    """The label in the characters the terminal can write."""
    try:
        label.encode(encoding)
        return label
    except UnicodeEncodeError:
        return label.replace("\u2423", "_").encode(encoding, "backslashreplace").decode(encoding)

"""The eight steps as a table of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_HEAD = ("step", "name", "tensor", "shape", "strides", "storage", "bytes", "time")


def table(steps: Iterable[Mapping[str, Any]]) -> str:
    """One line for each of the dicts (keys as in cmha trace --json), under a line of titles."""
    rows = [_HEAD]
    for step in steps:
        shape, strides = (str(tuple(step[key])) for key in ("shape", "strides"))
        size, time = f"{step['bytes']:,}", f"{step['seconds'] * 1e6:,.0f} us"
        rows.append((str(step["step"]), step["name"], step["tensor"], shape, strides, step["storage"], size, time))
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.rjust(width) if i in (0, 6, 7) else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(cells) for cells in zip(*columns, strict=True))

"""How an error reads: `[op] rule; got what, expected what. hint`, on one line, and the checks every caller shares.

    TypeError        the wrong kind of thing              ValueError       the right kind with a wrong value or shape
    IndexError       an index                             CheckpointError  what a file holds (with its path)
    MemoryError      with size and shape                  OSError          files, passed on untouched
"""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import StrPath

QUOTED = 80  # characters of a foreign value that an error may repeat


class CheckpointError(ValueError):
    """A file holds something that cannot be used: its message names the path and what is wrong in it."""


def quote(value: object) -> str:
    """repr on one line, cut at 80 characters: a value from outside can neither flood nor forge a log line."""
    text = " ".join(line.strip() for line in repr(value).splitlines())
    return text if len(text) <= QUOTED else text[: QUOTED - 3] + "..."


def quote_path(path: StrPath) -> str:
    """repr of a path, cut to its last 80 characters: the end is what tells files apart."""
    text = repr(os.fspath(path))
    return text if len(text) <= QUOTED else text[0] + "..." + text[4 - QUOTED :]


def shape_text(name: str, shape: Sequence[int]) -> str:
    """`q (2, 4, 7, 16)`: how a shape stands in a message."""
    return f"{name} {tuple(shape)}"


def message(op: str, rule: str, got: str | None = None, expected: str | None = None, hint: str | None = None) -> str:
    """The one form of every message; got and expected are finished pieces of text."""
    text = f"[{op}] {rule}"
    if got is not None:
        text += f"; got {got}"
    if expected is not None:
        text += f", expected {expected}"
    return text if hint is None else f"{text}. {hint}"


def listed(names: Iterable[str], limit: int = 10) -> str:
    """At most ten of them, then how many more."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def check_integer(op: str, name: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    """value as an int in minimum..maximum. A float, even a whole one, is a ValueError; text or a bool a TypeError."""
    rule = f"{name} must be an integer{_range_text(minimum, maximum)}"
    is_number = isinstance(value, numbers.Number) or hasattr(value, "__index__")
    if isinstance(value, bool) or not is_number:
        raise TypeError(message(op, rule, quote(value)))
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(message(op, rule, quote(value))) from None
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        raise ValueError(message(op, rule, quote(value)))
    return number


def check_indices(op: str, name: str, values: object, n: int, least: int = 1) -> list[int]:
    """values (a list, tuple, range or 1-D array) as a list of integers from 0 to n - 1, none twice."""
    found = values.tolist() if hasattr(values, "tolist") else values
    rule = f"{name} must be a list of integers from 0 to {n - 1}, {'at least one, ' if least else ''}none twice"
    if not isinstance(found, list | tuple | range):
        raise TypeError(message(op, rule, quote(values)))
    found = [check_integer(op, f"an entry of {name}", i, 0, n - 1) for i in found]
    if len(found) < least or len(set(found)) < len(found):
        raise ValueError(message(op, rule, quote(values)))
    return found


def check_number(op: str, name: str, value: object, accepts: Callable[[float], bool], rule: str) -> float:
    """value as a finite float for which accepts(value) holds; rule says in words what is accepted."""
    text = f"{name} must be {rule}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(message(op, text, quote(value)))
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        raise ValueError(message(op, text, quote(value))) from None
    if not math.isfinite(number) or not accepts(number):
        raise ValueError(message(op, text, quote(value)))
    return number


def as_number(op: str, name: str, value: object) -> float:
    """value as a float, infinite or not; None, text, a bool, an array: a TypeError."""
    text = f"{name} must be a number"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(message(op, text, type(value).__name__))
    try:
        return float(value)
    except OverflowError:  # an int beyond every float
        raise ValueError(message(op, f"{text} that fits a float", quote(value))) from None


def check_flag(op: str, name: str, value: object) -> bool:
    """value as a bool, if it is one (Python's or NumPy's): "no" and arrays have a truth, but not the one meant."""
    if value is True or value is False:
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):  # the second is NumPy 1's
        return bool(value)
    raise TypeError(message(op, f"{name} must be a bool", quote(value)))


def _range_text(minimum: int | None, maximum: int | None) -> str:
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    if minimum is not None:
        return f" of at least {minimum}"
    return "" if maximum is None else f" of at most {maximum}"

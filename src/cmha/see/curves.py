"""Loss curves of runs, from their log.jsonl: as a picture through matplotlib, or as text for any terminal.

    read_curves   folder of a run -> Curves
    draw_text     letters and marks only, so that pipes, NO_COLOR and a locale without Unicode change nothing
    draw_file     .png or .svg
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cmha.errors import CheckpointError, message, quote_path
from cmha.files import read_text
from cmha.see.picture import picture

if TYPE_CHECKING:
    from _typeshed import StrPath

    Points: TypeAlias = list[tuple[int, float]]  # (step, loss)

MARKS = "*o+x#@%&"
LEAST_COLUMNS, ROWS = 20, 16  # of the plane
MOST = 1e100  # the largest loss in a picture: matplotlib counts with sums and squares of them


@dataclass(frozen=True)
class Curves:
    """Of one run: name, and the points (step, loss) of training and validation, in order of steps."""

    name: str
    training: Points
    validation: Points


def read_curves(folder: StrPath) -> Curves:
    """The Curves of a run. A line that a killed process left half written, at the end, is no error; others are."""
    path = os.path.join(folder, "log.jsonl")
    lines = read_text(path).split("\n")
    training: dict[int, float] = {}
    validation: dict[int, float] = {}
    for number, line in enumerate(lines[:-1], 1):  # what stands behind the last line break is not whole
        try:
            row = json.loads(line)
            step, loss, val_loss = row["step"], row["loss"], row.get("val_loss")
            if not all(math.isfinite(x) for x in (step, loss, val_loss or 0.0)):
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            rule = "a line of log.jsonl must hold step and loss"
            raise CheckpointError(message("plot", rule, f"line {number} of {quote_path(path)}")) from None
        training[step] = loss
        if val_loss is not None:
            validation[step] = val_loss
    if not training:
        raise CheckpointError(message("plot", "log.jsonl must hold a line", f"none in {quote_path(path)}"))
    return Curves(os.path.normpath(folder), sorted(training.items()), sorted(validation.items()))


def chosen_lines(runs: Sequence[Curves]) -> list[tuple[str, Points]]:
    """[(label, points)]: both curves of a single run; of several the validation, where there is one, to compare."""
    if len(runs) == 1:
        lines = [("training", runs[0].training), ("validation", runs[0].validation)]
        return [(label, points) for label, points in lines if points]
    return [(run.name, run.validation) if run.validation else (f"{run.name} (training)", run.training) for run in runs]


def draw_text(runs: Sequence[Curves], columns: int) -> str:
    """The curves as lines of at most `columns` characters (but no plane is narrower than 20), then a legend."""
    lines = chosen_lines(runs)
    steps = [step for _, points in lines for step, _ in points]
    losses = [loss for _, points in lines for _, loss in points]
    (left, right), (low, high) = (min(steps), max(steps)), (min(losses), max(losses))
    width = max(LEAST_COLUMNS, columns - 9)
    plane = [[" "] * width for _ in range(ROWS)]
    for number, (_, points) in enumerate(lines):
        before = None
        for column in range(width):
            at = left + (right - left) * column / (width - 1)
            if not points[0][0] <= at <= points[-1][0]:
                continue
            row = round(_share(high, low, _value(points, at)) * (ROWS - 1))
            start = row if before is None or before == row else before + (1 if row > before else -1)
            for between in range(min(start, row), max(start, row) + 1):  # a steep piece has no holes
                plane[between][column] = MARKS[number % len(MARKS)]
            before = row
    out = []
    for row, cells in enumerate(plane):
        label = f"{_short(_between(high, low, row / (ROWS - 1))):>7}" if row % 5 == 0 else ""
        out.append(f"{label:7} |{''.join(cells)}".rstrip())
    out.append(f"{'':7} +{'-' * width}")
    first = f"step {left} "
    out.append(f"{'':9}{first}{right:>{max(0, width - len(first))}}")
    for number, (label, points) in enumerate(lines):
        step, best = min(points, key=lambda point: point[1])
        last, lowest = (_short(loss, 4) for loss in (points[-1][1], best))
        out.append(f"{MARKS[number % len(MARKS)]} {label}: last {last}, lowest {lowest} at step {step}")
    return "\n".join(out)


def _value(points: Points, at: float) -> float:
    """The loss at this step, on a straight line between the two points around it."""
    for (a, low), (b, high) in zip(points, points[1:], strict=False):
        if a <= at <= b:
            return _between(low, high, (at - a) / (b - a))
    return points[0][1]  # there is only one


def _between(a: float, b: float, share: float) -> float:
    """From a (share 0) to b (share 1), where b - a may be more than a float can hold."""
    return a * (1 - share) + b * share


def _share(a: float, b: float, x: float) -> float:
    """The share of which _between(a, b, share) is x, from 0 to 1; 0 where a is b. Halves cannot overflow."""
    return min(max((a / 2 - x / 2) / ((a / 2 - b / 2) or 1.0), 0.0), 1.0)


def _short(loss: float, digits: int = 3) -> str:
    """A loss with so many decimals; one beyond every sensible loss by its power of ten."""
    return f"{loss:.{digits}f}" if abs(loss) < 1e6 else f"{loss:.0e}"


def draw_file(runs: Sequence[Curves], path: StrPath) -> None:
    """Writes the curves as a picture; the name's ending says which kind."""
    with picture("plot", path, figsize=(8, 5)) as figure:
        kind_of_loss = "loss" if len(runs) == 1 else "validation loss"
        axes = figure.add_subplot(xlabel="step", ylabel=f"{kind_of_loss} (nats per token)")
        for label, points in chosen_lines(runs):
            odd = next((loss for _, loss in points if abs(loss) > MOST), None)
            if odd is not None:
                raise ValueError(message("plot", f"a picture needs losses from -{MOST:g} to {MOST:g}", f"{odd:g}"))
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 30 else None, markersize=3)
        axes.grid(alpha=0.3)
        axes.legend(title=runs[0].name if len(runs) == 1 else None)

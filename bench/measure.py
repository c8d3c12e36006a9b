"""Measuring a row: every side computes it, the results are compared, then the sides are timed in turn."""

import os
import statistics
import sys
from dataclasses import dataclass, field
from functools import partial
from subprocess import CalledProcessError

import data
import machine
import numpy as np
import whole
from processes import Pool, SideError
from table import EVERY_TORCH


@dataclass
class Result:
    """What is known of a row; sides are named. Values are seconds or bytes, the median of the rounds."""

    name: str
    kind: str
    goal: float | None
    value: float | None = None  # cmha's
    share: float | None = None  # of the machine's peak
    reached: bool | None = None  # the goal
    disturbed: float | None = None  # share of the machine that other programs took meanwhile
    ratios: dict = field(default_factory=dict)  # peer's value / cmha's
    values: dict = field(default_factory=dict)
    rounds: dict = field(default_factory=dict)  # every round's value
    differences: dict = field(default_factory=dict)  # from cmha's result, as a share of its norm
    differs: dict = field(default_factory=dict)  # (difference, bound) where it is too large: no ratio then
    errors: dict = field(default_factory=dict)


def difference(a, b):
    """|a - b| / |b| of two lists of results, the largest; infinite where shapes or NaN do not fit."""
    if [x.shape for x in a] != [y.shape for y in b]:
        return float("inf")
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        x, y = x.astype(np.float64), y.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            d = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)
        worst = max(worst, d) if np.isfinite(d) else float("inf")
    return float(worst)


class Bench:
    """Measures rows with the sides that are present: {name: (side, ops)}."""

    def __init__(self, sides, args, peaks, bar, folder):
        self.sides, self.args, self.peaks, self.bar, self.folder = sides, args, peaks, bar, folder
        self.pool = Pool(args.threads)

    def measure(self, row):
        result = Result(row.name, row.kind, row.goal)
        {"time": self._time, "memory": self._memory, "import": self._whole, "size": self._whole}[row.kind](row, result)
        middle = min if self.args.best else statistics.median
        result.values = {name: middle(found) for name, found in result.rounds.items() if found}
        ours = result.values.get("cmha")
        if ours:
            result.value = ours
            result.ratios = {name: value / ours for name, value in result.values.items() if name != "cmha"}
            result.share = self._share(row, ours)
        torch = [ratio for name, ratio in result.ratios.items() if name in EVERY_TORCH]
        if row.goal and torch and not self.args.smoke:
            result.reached = min(torch) >= row.goal  # against the best that PyTorch has to offer
        return result

    def _share(self, row, value):
        if row.kind == "time":
            work = data.WORK[row.op](row.sizes)
            return sum(max(flops / self.peaks["flops"], size / self.peaks["bytes"]) for flops, size in work) / value
        return data.training_bytes(row.sizes) / value if row.kind == "memory" else None

    def _chosen(self, row):
        return [s for s, ops in self.sides.values() if row.op in ops and s.name not in row.without]

    def _attempt(self, side, result, do, **request):
        """The answer of a side, or None with the error noted; the side takes no further part in the row."""
        self.bar.set_postfix_str(f"{side.name}: {do}", refresh=sys.stderr.isatty())
        try:
            return self.pool.get(side).ask(do, **request)
        except (SideError, OSError) as error:
            result.errors[side.name] = str(error)
            self.pool.drop(side)
            return None

    def _prepare(self, row, side, result):
        path = os.path.join(self.folder, f"{side.name}.npz")
        answer = self._attempt(side, result, "prepare", row=row.name, smoke=self.args.smoke, out=path)
        if answer is None:
            return None
        with np.load(path, allow_pickle=False) as file:
            answer["results"] = [file[name] for name in file.files]
        os.remove(path)
        return answer

    def _agreeing(self, row, result):
        """The sides whose results agree with cmha's within the row's bound."""
        agreed, expected = [], None
        for side in self._chosen(row):
            answer = self._prepare(row, side, result)
            if answer is None and side.name == "cmha":
                return []
            if answer is None:
                continue
            expected = expected or answer
            if answer["digest"] != expected["digest"]:
                result.errors[side.name] = "drew other data (another NumPy?)"
                continue
            found = result.differences[side.name] = difference(expected["results"], answer["results"])
            bound = row.bound if side.bound is None else max(side.bound, row.bound)
            if found <= bound:
                agreed.append(side)
            else:
                result.differs[side.name] = found, bound
        return agreed

    def _time(self, row, result):
        self.pool.enter("smoke" if self.args.smoke else row.family)
        sides = self._agreeing(row, result)
        others = machine.Disturbance()
        for n in range(self.args.rounds):
            for side in sides[n % max(1, len(sides)) :] + sides[: n % max(1, len(sides))]:
                if side.name not in result.errors:
                    ask = partial(self._attempt, side, result, "time", seconds=self.args.seconds)
                    answer = others.watch(self.pool.get(side).child.pid, ask)
                    if answer:
                        result.rounds.setdefault(side.name, []).append(answer["best" if self.args.best else "seconds"])
        result.disturbed = others.share()

    def _memory(self, row, result):
        for side in self._chosen(row):
            self.pool.enter(f"{row.name} {side.name}")  # a process of its own, which ends with the next
            if self._prepare(row, side, result):
                answer = self._attempt(side, result, "memory", calls=3)
                if answer:
                    result.rounds[side.name] = [answer["bytes"]]
        self.pool.enter(None)

    def _whole(self, row, result):
        """Of libraries, not of sides: each once."""
        self.pool.enter(None)
        sides = {s.library: s for s, _ in reversed(self.sides.values())}
        order = [s for s, _ in self.sides.values() if sides.get(s.library) is s and not s.only]
        for _ in range(self.args.rounds if row.kind == "import" else 1):
            for side in order:
                self.bar.set_postfix_str(side.name, refresh=sys.stderr.isatty())
                measure = whole.import_seconds if row.kind == "import" else whole.installed_bytes
                try:
                    result.rounds.setdefault(side.name, []).append(measure(side, self.args.threads))
                except (OSError, ValueError, CalledProcessError) as error:
                    result.errors[side.name] = str(error)[:300]

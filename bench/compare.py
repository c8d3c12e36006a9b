"""cmha beside NumPy, PyTorch and JAX on this machine: python bench/compare.py

Every side runs in a process of its own, one at a time, in turn. A row is timed only where all results agree. PyTorch comes
twice: with its default allocator, and told to keep its pages (torch+malloc). It may live in another Python: --torch-python.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

import data
import machine
import rows
import table
import whole
from processes import Pool, SideError, known_sides, present


def parse(argv):
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", action="append", metavar="NAME", help="rows whose name contains NAME (may be repeated)")
    add("--list", action="store_true", help="print the rows' names and end")
    add("--peers", metavar="LIST", help="compare with these sides only, e.g. numpy,torch")
    add("--threads", type=_positive, default=2, metavar="N", help="threads of every side (default %(default)s)")
    add("--rounds", type=_positive, metavar="N", help="rounds per row (default 7, with --smoke 1)")
    add("--seconds", type=float, default=0.15, metavar="S", help="time of a side per round (default %(default)s)")
    add("--torch-python", metavar="PATH", help="the Python that has PyTorch (default: this one)")
    add("--jax-python", metavar="PATH", help="the Python that has JAX (default: this one)")
    add("--compile", action="store_true", help="also torch.compile (takes minutes, needs a C++ compiler)")
    add("--bf16", action="store_true", help="also PyTorch's bfloat16 autocast, for training steps")
    add("--goals", action="store_true", help="show the project's goals for the ratio to torch")
    add("--json", metavar="FILE", help="write everything measured to FILE")
    add("--plot", metavar="FILE", help="draw the ratios into FILE (needs matplotlib: the extra `plot`)")
    add("--smoke", action="store_true", help="tiny sizes, one round: does everything still run?")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.smoke else 7)
    args.seconds = 0.002 if args.smoke else args.seconds
    for path in filter(None, (args.json, args.plot)):
        if not Path(path).absolute().parent.is_dir():
            parser.error(f"no such folder: {Path(path).parent}")
    return args


def _positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer above 0; got {text!r}")
    return int(text)


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
        result = {"name": row.name, "kind": row.kind, "goal": row.goal, "value": None, "share": None, "ratios": {}, "values": {},
                  "rounds": {}, "differences": {}, "differs": {}, "errors": {}, "reached": None}  # fmt: skip
        {"time": self._time, "memory": self._memory, "import": self._whole, "size": self._whole}[row.kind](row, result)
        result["values"] = {name: statistics.median(found) for name, found in result["rounds"].items() if found}
        ours = result["values"].get("cmha")
        if ours:
            result["value"] = ours
            result["ratios"] = {name: value / ours for name, value in result["values"].items() if name != "cmha"}
            result["share"] = self._share(row, ours)
        torch = [value for name, value in result["ratios"].items() if name in ("torch", "torch+malloc", "torch.compile")]
        if row.goal and torch and not self.args.smoke:
            result["reached"] = min(torch) >= row.goal  # against the best that PyTorch has to offer
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
        self.bar.set_postfix_str(f"{side.name}: {do}")
        try:
            return self.pool.get(side).ask(do, **request)
        except (SideError, OSError) as error:
            result["errors"][side.name] = str(error)
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
            if answer is None:
                continue
            expected = expected or answer
            if answer["digest"] != expected["digest"]:
                result["errors"][side.name] = "drew other data (another NumPy?)"
                continue
            found = result["differences"][side.name] = difference(expected["results"], answer["results"])
            bound = row.bound if side.bound is None else max(side.bound, row.bound)
            if found <= bound:
                agreed.append(side)
            else:
                result["differs"][side.name] = found, bound
        return agreed

    def _time(self, row, result):
        self.pool.enter("smoke" if self.args.smoke else row.family)
        sides = self._agreeing(row, result)
        for n in range(self.args.rounds):
            for side in sides[n % max(1, len(sides)) :] + sides[: n % max(1, len(sides))]:
                if side.name not in result["errors"]:
                    answer = self._attempt(side, result, "time", seconds=self.args.seconds)
                    if answer:
                        result["rounds"].setdefault(side.name, []).append(answer["seconds"])

    def _memory(self, row, result):
        for side in self._chosen(row):
            self.pool.enter(f"{row.name} {side.name}")  # a process of its own, which ends with the next
            if self._prepare(row, side, result):
                answer = self._attempt(side, result, "memory", calls=3)
                if answer:
                    result["rounds"][side.name] = [answer["bytes"]]
        self.pool.enter(None)

    def _whole(self, row, result):
        """Of libraries, not of sides: each once."""
        self.pool.enter(None)
        sides = {s.library: s for s, _ in reversed(self.sides.values())}
        order = [s for s, _ in self.sides.values() if sides.get(s.library) is s]
        for _ in range(self.args.rounds if row.kind == "import" else 1):
            for side in order:
                self.bar.set_postfix_str(side.name)
                measure = whole.import_seconds if row.kind == "import" else whole.installed_bytes
                try:
                    result["rounds"].setdefault(side.name, []).append(measure(side, self.args.threads))
                except (OSError, ValueError, whole.subprocess.CalledProcessError) as error:
                    result["errors"][side.name] = str(error)[:300]


def chosen_rows(args):
    every = rows.smoke() if args.smoke else rows.full()
    only = [name.lower() for name in args.only or [""]]
    return [row for row in every if any(name in row.name.lower() for name in only)]


def chosen_sides(args):
    """(sides that are present, head lines about them)"""
    sides = known_sides(args.torch_python, args.jax_python, args.compile, args.bf16)
    if args.peers is not None:
        wanted = [name.strip() for name in args.peers.split(",") if name.strip()]
        unknown = [name for name in wanted if name not in [s.name for s in sides]]
        if unknown:
            raise SystemExit(f"compare.py: error: no such side: {', '.join(unknown)}; known: {', '.join(s.name for s in sides[1:])}")
        sides = [s for s in sides if s.name in ("cmha", *wanted)]
    found, versions, missing = present(sides, args.threads)
    if "cmha" not in found:
        raise SystemExit(f"compare.py: error: cmha cannot be imported by {sys.executable}: {missing['cmha']}")
    absent = [name for name in missing if name in ("numpy", "torch", "jax")]
    hint = " (--torch-python, --jax-python name another Python)" if absent else ""
    lines = {"versions": ", ".join(f"{label} {version}" for label, version in versions.items())}
    return found, lines | ({"without": f"{', '.join(absent)}{hint}"} if absent else {})


def main(argv=None):
    args = parse(argv)
    selected = chosen_rows(args)
    if args.list:
        print("\n".join(row.name for row in selected))
        return 0
    if not selected:
        raise SystemExit(f"compare.py: error: no row contains {' or '.join(map(repr, args.only))}; --list shows all")
    if args.plot:
        table.check_plot()
    sides, lines = chosen_sides(args)
    head = {**machine.describe(args.threads), **lines}
    peaks = machine.peaks(args.threads, args.smoke)
    peers = [name for name in sides if name != "cmha"]
    report = {"head": head, "load_before": machine.load(), "peaks": peaks, "peers": peers, "rounds": args.rounds, "rows": []}
    with tempfile.TemporaryDirectory(prefix="cmha-bench-") as folder, tqdm(selected, unit="row", dynamic_ncols=True) as bar:
        paper = table.Table([row.name for row in selected], peers, args.goals, lambda line: tqdm.write(line, file=sys.stdout))
        paper.head({**head, "load": f"{report['load_before']} before the first row"})
        bench = Bench(sides, args, peaks, bar, folder)
        with bench.pool:
            for row in bar:
                bar.set_description(row.name)
                report["rows"].append(bench.measure(row))
                paper.row(report["rows"][-1])
                sys.stdout.flush()
    report["load_after"] = machine.load()
    print(table.legend(peaks, args.rounds))
    print(f"Load {report['load_before']} before, {report['load_after']} after: with other programs running, only ratios mean something.")
    if args.json:
        table.write_json(args.json, report)
    if args.plot:
        table.write_plot(args.plot, report)
    return 1 if any(r["differs"] or r["errors"] for r in report["rows"]) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader of the table has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)

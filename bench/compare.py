"""cmha beside NumPy, PyTorch and JAX on this machine: python bench/compare.py

Every side runs in a process of its own, one at a time, in turn. A row is timed only where all results agree. PyTorch
comes twice: with its default allocator, and told to keep its pages (torch+malloc). It may live in another Python.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import machine
import rows
import table
from measure import Bench
from processes import known_sides, present
from tqdm import tqdm


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", action="append", metavar="NAME", help="rows whose name contains NAME (may be repeated)")
    add("--list", action="store_true", help="print the rows' names and end")
    add("--peers", metavar="LIST", help="compare with these sides only, e.g. numpy,torch")
    add("--threads", type=_positive, default=2, metavar="N", help="threads of every side (default %(default)s)")
    add("--rounds", type=_positive, metavar="N", help="rounds per row (default 7, with --smoke 1)")
    add("--seconds", type=float, default=0.15, metavar="S", help="time of a side per round (default %(default)s)")
    add("--best", action="store_true", help="best times instead of medians: for a machine that is not idle")
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
            raise SystemExit(
                f"compare.py: error: no such side: {', '.join(unknown)}; known: {', '.join(s.name for s in sides[1:])}"
            )
        sides = [s for s in sides if s.name in ("cmha", *wanted)]
    found, versions, missing = present(sides, args.threads)
    if "cmha" not in found:
        raise SystemExit(f"compare.py: error: cmha cannot be imported by {sys.executable}: {missing['cmha']}")
    absent = [name for name in missing if name in ("numpy", "torch", "jax")]
    hint = " (--torch-python, --jax-python name another Python)" if absent else ""
    lines = {"versions": ", ".join(f"{label} {version}" for label, version in versions.items())}
    return found, lines | ({"without": f"{', '.join(absent)}{hint}"} if absent else {})


def progress(selected):
    """On stderr; where that is no terminal, a line every half minute."""
    pace = 0.1 if sys.stderr.isatty() else 30
    return tqdm(selected, unit="row", dynamic_ncols=True, mininterval=pace, maxinterval=max(10, pace))


def write(line):
    """A line of the table; a bar on the same terminal makes room for it."""
    if sys.stderr.isatty():
        tqdm.write(line, file=sys.stdout)
    else:
        print(line)


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
    report = {"head": head, "load_before": machine.load(), "peaks": peaks, "peers": peers, "rounds": args.rounds}
    report["rows"] = []
    with tempfile.TemporaryDirectory(prefix="cmha-bench-") as folder, progress(selected) as bar:
        paper = table.Table([row.name for row in selected], peers, args.goals, write)
        paper.head({**head, "load": f"{report['load_before']} before the first row"})
        bench = Bench(sides, args, peaks, bar, folder)
        with bench.pool:
            for row in bar:
                bar.set_description(row.name, refresh=False)
                result = bench.measure(row)
                paper.row(result)
                report["rows"].append(asdict(result))
                sys.stdout.flush()
    report["load_after"] = machine.load()
    print(table.legend(peaks, args, report["load_before"], report["load_after"]))
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

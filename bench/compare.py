"""cmha beside NumPy, PyTorch and JAX on this machine: python bench/compare.py

Every side runs in a process of its own, one at a time, in turn. A row is timed only where all results agree. PyTorch
comes twice: with its default allocator, and told to keep its pages (torch+malloc). It may live in another Python.
"""

import os
import sys
import tempfile
from dataclasses import asdict

import machine
import rows
import table
from arguments import Parser, output, picture, positive, python, seconds
from measure import Bench
from processes import known_sides, present
from tqdm import tqdm


def parse(argv):
    parser = Parser("compare.py", __doc__)
    add = parser.add_argument
    add("--only", action="append", metavar="NAME", help="rows whose name contains NAME (may be repeated)")
    add("--list", action="store_true", help="print the rows' names and end")
    add("--peers", metavar="LIST", help="compare with these sides only, e.g. numpy,torch; cmha alone: no comparison")
    add("--threads", type=positive, default=2, metavar="N", help="threads of every side (default %(default)s)")
    add("--rounds", type=positive, metavar="N", help="rounds per row (default 7, with --smoke 1)")
    add("--seconds", type=seconds, default=0.15, metavar="S", help="time of a side per round (default %(default)s)")
    add("--best", action="store_true", help="best times instead of medians: for a machine that is not idle")
    add("--torch-python", type=python, metavar="PATH", help="the Python that has PyTorch (default: this one)")
    add("--jax-python", type=python, metavar="PATH", help="the Python that has JAX (default: this one)")
    add("--compile", action="store_true", help="also torch.compile (takes minutes, needs a C++ compiler)")
    add("--bf16", action="store_true", help="also PyTorch's bfloat16 autocast, for training steps")
    add("--goals", action="store_true", help="show the project's goals for the ratio to torch")
    add("--json", type=output, metavar="FILE", help="write everything measured to FILE")
    add("--plot", type=picture, metavar="FILE", help="draw the ratios into FILE (needs matplotlib: the extra `plot`)")
    add("--markdown", metavar="FILE", help="only print docs/how-fast.md's table from what --json wrote into FILE")
    add("--smoke", action="store_true", help="tiny sizes, one round: does everything still run?")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.smoke else 7)
    args.seconds = 0.002 if args.smoke else args.seconds
    args.selected = _chosen_rows(parser, args)
    args.sides = _chosen_sides(parser, args)
    return parser, args


def _chosen_rows(parser, args):
    every = rows.smoke() if args.smoke else rows.full()
    only = [""] if args.only is None else [name.lower() for name in args.only]
    selected = [row for row in every if any(name in row.name.lower() for name in only)]
    if not selected or args.only and not all(args.only):
        got = " or ".join(map(repr, args.only))
        parser.error(f"no row contains {got}; there are: {'; '.join(row.name for row in every)}")
    return selected


def _chosen_sides(parser, args):
    sides = known_sides(args.torch_python, args.jax_python, args.compile, args.bf16)
    if args.peers is None:
        return sides
    wanted, known = [name.strip() for name in args.peers.split(",")], [side.name for side in sides]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"no such side: {', '.join(map(repr, unknown))}; there are: {', '.join(known)}")
    return [side for side in sides if side.name in ("cmha", *wanted)]


def sides_present(parser, args):
    """(sides that are present, head lines about them)"""
    found, versions, missing = present(args.sides, args.threads)
    if "cmha" not in found:
        parser.error(f"cmha cannot be imported by {sys.executable}: {missing['cmha']}")
    for name, path in (("torch", args.torch_python), ("jax", args.jax_python)):
        if path is not None and name in missing:
            parser.error(f"{name} cannot be imported by {path}: {missing[name]}")
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
    parser, args = parse(argv)
    selected = args.selected
    if args.list:
        print("\n".join(row.name for row in selected))
        return 0
    if args.markdown is not None:
        try:
            report = table.read_json(args.markdown)
        except (OSError, ValueError) as error:
            parser.error(f"--markdown needs what --json wrote: {error}")
        print(table.markdown(report, selected))
        return 0
    sides, lines = sides_present(parser, args)
    head = {**machine.describe(args.threads), **lines}
    peaks = machine.peaks(args.threads, args.smoke)
    peers = [name for name in sides if name != "cmha"]
    report = {"head": head, "load_before": machine.load(), "peaks": peaks, "peers": peers, "rounds": args.rounds}
    report |= {"best": args.best, "rows": []}
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
                if args.json:  # after each row: what a long run has found stays when it is stopped
                    table.write_json(args.json, report)
    print(table.legend(peaks, args, report["load_before"], report["load_after"]))
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

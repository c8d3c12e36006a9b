"""cmha plot: the loss curves of runs, as a picture or in the terminal."""

from __future__ import annotations

import shutil
from argparse import Namespace
from dataclasses import replace

from cmha.cli.options import Parser, check_run, filled, printable, suffix

DESCRIPTION = """\
Draws the losses in log.jsonl over the steps: training and validation of one run, or the validation losses of several.
Without --out the plot is text; with it, a picture (needs matplotlib: pip install 'cmha[plot]').
"""
EPILOG = """\
examples:
  cmha plot runs/001
  cmha plot runs/* --out losses.png       or .svg
"""


def add_options(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--out", metavar="FILE", type=filled, help="picture to write, *.png or *.svg (default: text)")


def run(args: Namespace) -> None:
    from cmha.see.curves import draw_file, draw_text, read_curves

    if args.out is not None:
        suffix("--out", args.out, (".png", ".svg"))
    for folder in args.runs:
        check_run(folder, "log.jsonl")
    runs = [replace(curves, name=printable(curves.name)) for curves in map(read_curves, args.runs)]
    if args.out is None:
        print(draw_text(runs, shutil.get_terminal_size().columns))
    else:
        draw_file(runs, args.out)
        print(args.out)

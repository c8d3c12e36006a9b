"""cmha heads: where every head of a model looks, as heat maps in the terminal, a picture or a page."""

from __future__ import annotations

import sys
from argparse import Namespace

from cmha.cli.options import Parser, check_run, filled, integer, printable, suffix, utf8
from cmha.errors import quote

KINDS = (".html", ".png", ".svg")
DESCRIPTION = """\
Shows where the heads of a trained model look in a text: a map per head, a row for each token that looks, a column for
each token it looks at. Without --out the maps go to the terminal, in colour where it has any (NO_COLOR turns that off).
"""
EPILOG = """\
examples:
  cmha heads runs/001 "The list is a list"              all layers, in the terminal
  cmha heads runs/001 "The list is a list" --layer 0
  cmha heads runs/001 "The list is a list" --out maps.html    one page, opens in any browser, uses no network
  cmha heads runs/001 "The list is a list" --out maps.png     or maps.svg; needs pip install 'cmha[plot]'

A text longer than the model's context, or than 200 tokens, is cut at its end. Layers and heads count from 0.
"""


def add_options(parser: Parser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder of a run")
    parser.add_argument("text", metavar="TEXT", type=filled, help="what the model reads")
    parser.add_argument("--layer", metavar="N", type=integer(0), help="only this layer (default: all)")
    parser.add_argument("--out", metavar="FILE", type=filled, help="a file to write: .html, .png or .svg")


def run(args: Namespace) -> None:
    from cmha.cli.generate import check_vocabulary, tokenizer_of
    from cmha.errors import message
    from cmha.gpt import GPT
    from cmha.see.maps import attention_maps

    kind = None if args.out is None else suffix("--out", args.out, KINDS)
    text = utf8(args.text, "the text")
    check_run(args.folder, "config.json")
    gpt, tokenizer = GPT.from_pretrained(args.folder), tokenizer_of(args.folder)
    check_vocabulary("heads", args.folder, tokenizer, gpt)
    if args.layer is not None and args.layer >= gpt.cfg.n_layer:
        known = f"0 to {gpt.cfg.n_layer - 1}"
        raise ValueError(message("heads", "--layer must be one of the model's", str(args.layer), known))
    layers = None if args.layer is None else [args.layer]
    maps = attention_maps(gpt, tokenizer, text, layers, f"{printable(args.folder)}: {quote(text)}")
    if kind is None:
        from cmha.see.terminal import has_colour, heat_maps

        print(heat_maps(maps, colour=has_colour(sys.stdout), encoding=getattr(sys.stdout, "encoding", None) or "utf-8"))
    elif kind == ".html":
        from cmha.see.page import save_page

        save_page(maps, args.out)
    else:
        from cmha.see.figure import save_figure

        save_figure(maps, args.out)

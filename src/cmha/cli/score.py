"""cmha score: how well a model predicts a text."""

from __future__ import annotations

import math
import sys
from argparse import Namespace

from cmha.cli.generate import check_vocabulary, read_prompt, tokenizer_of
from cmha.cli.options import Parser, check_run, integer
from cmha.errors import message, quote_path

DESCRIPTION = """\
Prints the perplexity of a text under a model: exp of the mean of -log p(token | the tokens before it). The first token
has nothing before it and does not count. Bits per byte compare models whose tokenizers differ.
"""
EPILOG = """\
examples:
  cmha score runs/001 book.txt
  cmha score gpt2 - < book.txt
  cmha score gpt2 book.txt --stride 1024      fastest; a smaller stride gives every token more context

A text longer than the model's context is read in windows that start --stride tokens apart; a token counts in the first
window that has it.
"""


def add_options(parser: Parser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder of a run, or of a GPT-2 from elsewhere")
    parser.add_argument("file", metavar="FILE", help="a text; - is stdin")
    help = "tokens from window to window, at most the context (default: half of it)"
    parser.add_argument("--stride", metavar="N", type=integer(1), help=help)


def run(args: Namespace) -> None:
    from tqdm import tqdm

    from cmha.generate.score import pieces
    from cmha.gpt import GPT

    check_run(args.folder, "config.json")
    text = read_prompt(args.file, "score")
    gpt, tokenizer = GPT.from_pretrained(args.folder), tokenizer_of(args.folder)
    check_vocabulary("score", args.folder, tokenizer, gpt)
    ids = tokenizer.encode_array(text)
    if len(ids) < 2:
        rule = "a text must hold at least two tokens"
        raise ValueError(message("score", rule, f"{len(ids)} in {quote_path(args.file)}"))
    total, count = 0.0, len(ids) - 1
    found = pieces(gpt, ids, args.stride)
    pace = 0.1 if sys.stderr and sys.stderr.isatty() else 10  # seconds between two looks at the bar
    with tqdm(total=count, unit=" tokens", unit_scale=True, delay=1, mininterval=pace, disable=not sys.stderr) as bar:
        for logprobs in found:
            total += float(logprobs.sum(dtype="float64"))
            bar.update(len(logprobs))
    size = len(text.encode("utf-8", "surrogatepass"))
    print(f"perplexity     {_exp(-total / count):.4f}")
    print(f"bits per byte  {-total / math.log(2) / size:.4f}")
    print(f"tokens         {count:,} of {size:,} bytes")


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf

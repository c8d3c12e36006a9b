"""cmha trace: the eight steps of a real forward pass through attention, as a table or as JSON."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING

from cmha.cli.options import Parser, UsageError, check_run, filled, integer, suffix
from cmha.errors import message

if TYPE_CHECKING:
    from cmha.nn import MultiHeadAttention

MOST = 128  # elements of a picture

DESCRIPTION = """\
Runs one multi-head attention step by step and shows what each step makes: shape, strides (in elements), and whether the
memory is new, a view of what was there, or a copy. A permute is always a view; the reshape after it has to copy.
"""
EPILOG = """\
examples:
  cmha trace                                 64 wide, 4 heads, 8 rows of 32 tokens
  cmha trace --n-embd 8 --n-head 2 --batch-size 1 --block-size 3
  cmha trace --picture memory.svg            how memory moves while 2 heads are split and merged
  cmha trace runs/001 --json                 the first block of a trained model, for a program to read
"""


def add_options(parser: Parser) -> None:
    parser.add_argument("folder", nargs="?", metavar="DIR", help="the folder of a run (default: new random weights)")
    parser.add_argument("--n-embd", metavar="D", type=integer(1), help="width (default: 64)")
    parser.add_argument("--n-head", metavar="H", type=integer(1), help="heads (default: 4)")
    parser.add_argument("--batch-size", metavar="B", type=integer(1), help="rows (default: 8)")
    parser.add_argument("--block-size", metavar="T", type=integer(1), help="tokens a row (default: 32, or the model's)")
    parser.add_argument(
        "--picture", metavar="FILE", type=filled,
        help="also draw every element's way through memory (.svg, up to 128 elements; D 8, H 2, B 2, T 3 by default)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> None:
    from cmha import functional, random
    from cmha.see import eight_steps
    from cmha.see.memory_picture import save_memory_picture
    from cmha.see.table import table

    if args.folder is not None and (args.n_embd or args.n_head):
        raise UsageError("--n-embd and --n-head are the model's own where DIR is given")
    _picture_sizes(args)
    random.manual_seed(0)
    mha, block_size = _attention(args)
    shape = (args.batch_size or 8, block_size, mha.n_head * mha.head_dim)
    steps = eight_steps(mha, functional.randn(*shape))
    config = {"n_embd": shape[2], "n_head": mha.n_head, "head_dim": mha.head_dim}
    config |= {"batch_size": shape[0], "block_size": shape[1]}
    if args.picture is not None:
        save_memory_picture(args.picture, *shape[:2], mha.n_head, mha.head_dim)
    if args.json:
        print(json.dumps({"config": config, "steps": steps}))
    else:
        print(", ".join(f"{name} {value}" for name, value in config.items()))
        print()
        print(table(steps))


def _picture_sizes(args: Namespace) -> None:
    """Small sizes where a picture is asked for and none are given; refuses what nobody could tell apart."""
    if args.picture is None:
        return
    suffix("--picture", args.picture, (".svg",))
    if args.folder is not None:
        raise UsageError("--picture draws sizes, not a model: give it without DIR")
    for name, size in (("n_embd", 8), ("n_head", 2), ("batch_size", 2), ("block_size", 3)):
        setattr(args, name, getattr(args, name) or size)
    elements = args.n_embd * args.batch_size * args.block_size
    if elements > MOST:
        raise UsageError(f"--picture needs at most {MOST} elements; got B * T * D = {elements}")


def _attention(args: Namespace) -> tuple[MultiHeadAttention, int]:
    """(attention, tokens a row): of the model in DIR, or new."""
    if args.folder is not None:
        from cmha.gpt import GPT

        check_run(args.folder, "config.json", "model.safetensors")
        gpt = GPT.from_pretrained(args.folder)
        most, block_size = gpt.cfg.block_size, args.block_size or gpt.cfg.block_size
        if block_size > most:
            rule = "--block-size must fit the model's context"
            raise ValueError(message("trace", rule, str(block_size), f"at most {most}"))
        return gpt.h[0].attn, block_size
    from cmha.nn import MultiHeadAttention

    try:
        return MultiHeadAttention(args.n_embd or 64, args.n_head or 4), args.block_size or 32
    except ValueError as error:
        raise UsageError(str(error)) from None

"""cmha convert: llm.c's model file into a folder that cmha and transformers open."""

from __future__ import annotations

import os
from argparse import Namespace

from cmha.cli.options import Parser
from cmha.errors import quote_path

DESCRIPTION = """\
Turns a model file of llm.c (.bin, float32 or bfloat16) into a folder with config.json and model.safetensors, GPT-2's
layout, which `cmha generate` and transformers open. Rows that pad the vocabulary are left out.
"""
EPILOG = """\
examples:
  cmha convert gpt2_124M.bin gpt2            then put GPT-2's tokenizer.json beside it

nanoGPT's .pt is a pickle, which can run code, and is not read: docs/bring-your-gpt2.md has the lines that convert it
with your own PyTorch.
"""


def add_options(parser: Parser) -> None:
    parser.add_argument("source", metavar="SRC", help="llm.c's model file")
    parser.add_argument("folder", metavar="DIR", help="folder to write; it must not hold a model")


def run(args: Namespace) -> None:
    from cmha.gpt.llmc import read_llmc
    from cmha.gpt.pretrained import CONFIG, INDEX, WEIGHTS

    for name in (CONFIG, WEIGHTS, INDEX):
        if os.path.lexists(os.path.join(args.folder, name)):
            raise ValueError(f"a model is there already: {quote_path(os.path.join(args.folder, name))}")
    model = read_llmc(args.source)
    model.save_pretrained(args.folder)
    print(f"{model.describe()}, vocabulary {model.cfg.vocab_size:,}: {os.path.join(args.folder, WEIGHTS)}")

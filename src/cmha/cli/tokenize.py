"""cmha tokenize: text in, one file of token ids out, which `cmha train` reads without loading it."""

from __future__ import annotations

import os
from argparse import Namespace

from cmha.cli.options import TOKENIZERS, Parser, UsageError, check_tokenizer, filled, integer, suffix
from cmha.errors import message, quote_path

DESCRIPTION = """\
Writes the token ids of texts into one file: 2 bytes an id (4 where the vocabulary has more than 65,536), and a header
with the tokenizer. Neither text nor ids have to fit in memory. Training on the file is training on the texts, bit for
bit. The file is safetensors with one tensor `tokens`, so other programs read it too.
"""
EPILOG = """\
examples:
  cmha tokenize corpus.txt --out corpus.safetensors              its own characters
  cmha tokenize folder/ --tokenizer byte --out bytes.safetensors every file in a folder, sorted by path
  cmha tokenize new.txt --tokenizer runs/001 --out new.safetensors
  cmha train corpus.safetensors

With char and bpe the texts are read twice, first for the tokenizer.
"""
SUFFIX = ".safetensors"


def add_options(parser: Parser) -> None:
    parser.add_argument("text", nargs="+", metavar="TEXT", help="text files or folders of them, UTF-8")
    parser.add_argument("--out", metavar="FILE", type=filled, help=f"file to write, named *{SUFFIX}")
    parser.add_argument(
        "--tokenizer", metavar="T", type=filled, default="char",
        help="char (the texts' own characters), byte (256 byte values), bpe (learnt from the texts, in memory; "
        "pip install 'cmha[bpe]'), or the folder of a run or a tokenizer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--vocab-size", metavar="V", type=integer(257, 2**24), help="of bpe (default: 4096)")


def run(args: Namespace) -> None:
    from cmha.text import load_tokenizer
    from cmha.text.corpora import Texts, make_tokenizer, text_ids
    from cmha.text.token_files import is_token_file, progress_bar, write_tokens

    if args.out is None:
        raise UsageError(f"--out is required: a file to write, named *{SUFFIX}")
    suffix("--out", args.out, (SUFFIX,))
    check_tokenizer(args)
    if os.path.lexists(args.out):
        raise ValueError(message("tokenize", "--out must not be there already", quote_path(args.out)))
    tokenizer = args.tokenizer if args.tokenizer in TOKENIZERS else load_tokenizer(args.tokenizer)
    texts = Texts(args.text)
    for path in texts.paths:
        if is_token_file(path):
            rule = "a text must not hold token ids already"
            raise ValueError(message("tokenize", rule, quote_path(path), hint="`cmha train` takes it as it is"))
    size = sum(os.path.getsize(path) for path in texts.paths)
    with progress_bar("reading", size) as bar:
        texts.progress = bar.update
        tokenizer = make_tokenizer(tokenizer, texts, args.vocab_size)
    with progress_bar("writing ids", size) as bar:
        texts.progress = bar.update
        count = write_tokens(args.out, text_ids(tokenizer, texts), tokenizer)
    print(f"{count:,} tokens of {tokenizer.vocab_size:,} kinds, {os.path.getsize(args.out):,} bytes")
    print(args.out)

"""cmha generate: a model writes on, character by character as it goes."""

import sys

from cmha.cli.options import check_run, filled, integer, not_negative, number, utf8
from cmha.errors import CheckpointError, message, quote_path

DESCRIPTION = """\
Lets a trained model continue a text. Prints the prompt and what follows it; the seed it drew goes to stderr, and with
--seed the same text comes again, bit for bit.
"""
EPILOG = """\
examples:
  cmha generate runs/001 --prompt "The list"
  cmha generate runs/001 --prompt "def " --temperature 0        always the likeliest character
  cmha generate runs/001 --max-new-tokens 1000 --seed 7 > out.txt

A prompt that starts with a dash is written --prompt=-text.
"""


def add_options(parser):
    share = number(lambda x: 0 < x <= 1, "above 0 and at most 1")
    parser.add_argument("folder", metavar="DIR", help="the folder of a run")
    add = parser.add_argument
    add("--prompt", metavar="TEXT", type=filled, default="\n", help="text to continue (default: a new line)")
    add("--max-new-tokens", metavar="N", type=integer(0), default=400, help="tokens to write (default: %(default)s)")
    add(
        "--temperature", metavar="X", type=not_negative, default=0.8,
        help="below 1 careful, above 1 wild, 0 always the likeliest token (default: %(default)s)",
    )  # fmt: skip
    add("--top-k", metavar="K", type=integer(1), help="draw among the K likeliest (default: all)")
    add("--top-p", metavar="P", type=share, help="draw among the likeliest that reach this probability (default: all)")
    add("--seed", metavar="N", type=integer(0), help="of the draws (default: a new one each time)")


def run(args):
    from cmha.generate import draw_seed
    from cmha.gpt import GPT
    from cmha.text import StreamDecoder, load_tokenizer

    prompt = utf8(args.prompt, "the prompt")
    check_run(args.folder, "config.json", "model.safetensors", "tokenizer_cmha.json")
    tokenizer = load_tokenizer(args.folder)
    gpt = GPT.from_pretrained(args.folder)
    if tokenizer.vocab_size != gpt.cfg.vocab_size:
        got = f"{tokenizer.vocab_size} and {gpt.cfg.vocab_size} in {quote_path(args.folder)}"
        raise CheckpointError(message("generate", "tokenizer and model must have one vocabulary", got))
    seed = draw_seed() if args.seed is None else args.seed
    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": seed}
    tokens = gpt.stream([tokenizer.encode(prompt)], args.max_new_tokens, **options)  # refuses now what it will refuse
    if args.seed is None and sys.stderr is not None:
        print(f"seed {seed}", file=sys.stderr, flush=True)
    decoder = StreamDecoder(tokenizer)
    print(prompt, end="", flush=True)
    for token in tokens:
        print(decoder.feed(token), end="", flush=True)
    print(decoder.finish())

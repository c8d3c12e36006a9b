"""cmha generate: a model writes on, character by character as it goes."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cmha.cli.options import (
    Parser,
    UsageError,
    check_run,
    filled,
    for_screen,
    integer,
    integers,
    not_negative,
    number,
    positive,
    utf8,
)
from cmha.errors import CheckpointError, message, quote_path

if TYPE_CHECKING:
    from cmha.gpt import GPT
    from cmha.text import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer

DESCRIPTION = """\
Lets a trained model continue a text. Prints the prompt and what follows it; the seed it drew goes to stderr, and with
--seed the same text comes again, bit for bit. Several prompts are continued together, and their texts are printed one
below the other with a line of dashes between; each text is the one that the prompt's number and the seed give.
"""
EPILOG = """\
examples:
  cmha generate runs/001 --prompt "The list"
  cmha generate runs/001 --prompt "def " --temperature 0        always the likeliest token
  cmha generate runs/001 --max-new-tokens 1000 --seed 7 > out.txt
  cmha generate gpt2 --prompt "Q: Why? A:" --stop "Q:"          until it would say this
  cmha generate gpt2 --prompt Once --num-beams 4                beam search, without drawing
  cmha generate gpt2 --prompt-file - < letter.txt               a whole text as the prompt

A prompt that starts with a dash is written --prompt=-text. Filters work in this order, each on what the last one left:
repetition penalty, temperature, top-k, top-p, min-p.
"""
TEMPERATURE = 0.8
DRAWING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def add_options(parser: Parser) -> None:
    share = number(lambda x: 0 < x <= 1, "above 0 and at most 1")
    parser.add_argument("folder", metavar="DIR", help="the folder of a run, or of a GPT-2 from elsewhere")
    add = parser.add_argument
    add("--prompt", metavar="TEXT", type=filled, action="append", default=[],
        help="text to continue; may be repeated (default: a new line)")  # fmt: skip
    add("--prompt-file", metavar="FILE", help="a file whose whole text is the prompt; - is stdin")
    add("--max-new-tokens", metavar="N", type=integer(0), default=400, help="tokens to write (default: %(default)s)")
    add("--temperature", metavar="X", type=not_negative,
        help=f"below 1 careful, above 1 wild, 0 always the likeliest token (default: {TEMPERATURE})")  # fmt: skip
    add("--top-k", metavar="K", type=integer(1), help="draw among the K likeliest (default: all)")
    add("--top-p", metavar="P", type=share, help="draw among the likeliest that reach this probability (default: all)")
    add("--min-p", metavar="P", type=number(lambda x: 0 <= x <= 1, "from 0 to 1"),
        help="draw among those with at least this share of the likeliest one's probability (default: all)")  # fmt: skip
    add("--repetition-penalty", metavar="X", type=positive,
        help="above 1: tokens that were there become less likely (default: 1)")  # fmt: skip
    add("--stop", metavar="TEXT", type=filled, action="append", default=[],
        help="end before this text; may be repeated")  # fmt: skip
    add("--stop-id", metavar="N", type=integer(0), action="append", default=[],
        help="end at this token; may be repeated (default: <|endoftext|> where the tokenizer has it)")  # fmt: skip
    add("--num-beams", metavar="N", type=integer(1), default=1, help="beam search with N beams instead of drawing")
    add("--length-penalty", metavar="X", type=number(lambda x: -10 <= x <= 10, "a number from -10 to 10"),
        help="of beam search: above 0 prefers longer texts (default: 1)")  # fmt: skip
    add("--logprobs", action="store_true", help="print a line for each token: id, log-probability, text")
    add("--seed", metavar="N", type=integers(0), action="extend",
        help="of the draws (default: a new one each time); one for each prompt, as N,N,... or repeated, gives every "
        "text as a run of its prompt alone with that seed")  # fmt: skip


def run(args: Namespace) -> None:
    from cmha.generate import draw_seed
    from cmha.gpt import GPT
    from cmha.text.token_files import progress_bar

    _check(args)
    prompts = [utf8(text, "the prompt") for text in args.prompt]
    stops = [utf8(text, "the stop text") for text in args.stop]
    check_run(args.folder, "config.json")
    prompts += [read_prompt(args.prompt_file)] if args.prompt_file is not None else []
    gpt, tokenizer = GPT.from_pretrained(args.folder), tokenizer_of(args.folder)
    check_vocabulary("generate", args.folder, tokenizer, gpt)
    prompts = prompts or ["\n"]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    options, drawn = _options(args, stops, tokenizer, draw_seed)
    write = _Lines if args.logprobs else _Text
    rows: list[Iterable[tuple[int, float]]]
    if len(prompts) > 1 or args.num_beams > 1:
        beams = {"num_beams": args.num_beams}
        beams |= {} if args.length_penalty is None else {"length_penalty": args.length_penalty}
        with progress_bar("writing", len(prompts) * args.max_new_tokens, " tokens") as bar:
            options["progress"] = bar.update
            whole, likely = gpt.generate(ids, args.max_new_tokens, return_logprobs=True, **options, **beams)
        rows = [zip(row[len(i) :], x, strict=True) for row, i, x in zip(whole, ids, likely, strict=True)]
        _tell(drawn)
    else:
        rows = [gpt.stream(ids, args.max_new_tokens, return_logprobs=True, **options)]  # refuses now what it will
        _tell(drawn)
    for place, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        if place:
            print("-" * 40)
        write(tokenizer, stops, options["stop"]).all(prompt, row)


def _check(args: Namespace) -> None:
    """What does not fit together is wrong usage, before a file is opened."""
    given = [name for name in DRAWING if getattr(args, name) is not None]
    if args.num_beams > 1 and given:
        raise UsageError(f"--num-beams draws nothing, so it goes without --{given[0].replace('_', '-')}")
    prompts = max(1, len(args.prompt) + (args.prompt_file is not None))
    if args.seed is not None and len(args.seed) not in (1, prompts):
        raise UsageError(f"--seed must be one number, or one for each prompt; got {len(args.seed)} for {prompts}")
    if args.num_beams == 1 and args.length_penalty is not None:
        raise UsageError("--length-penalty is of beam search: give --num-beams")


def _options(
    args: Namespace, stops: list[str], tokenizer: Tokenizer, draw_seed: Callable[[], int]
) -> tuple[dict[str, Any], int | None]:
    """(the options of gpt.generate, the seed if it was drawn here)"""
    end = getattr(tokenizer, "special_tokens", {}).get("<|endoftext|>")
    stop = args.stop_id or ([] if end is None else [end])
    options: dict[str, Any] = {"stop": stop, "stop_strings": stops, "tokenizer": tokenizer}
    if args.num_beams > 1:
        return options, None
    seeds = [draw_seed()] if args.seed is None else args.seed
    options |= {name: getattr(args, name) for name in ("top_k", "top_p", "min_p")}
    options["seed"] = seeds[0] if len(seeds) == 1 else seeds
    options["temperature"] = TEMPERATURE if args.temperature is None else args.temperature
    options["repetition_penalty"] = 1.0 if args.repetition_penalty is None else args.repetition_penalty
    return options, seeds[0] if args.seed is None else None


def read_prompt(name: str, op: str = "generate") -> str:
    """The text of a file or, by the name -, of stdin."""
    from cmha.files import decode_text, read_text

    if name != "-":
        text = read_text(name)
    elif sys.stdin is None:
        raise OSError("stdin is closed")
    else:
        text = decode_text(sys.stdin.buffer.read(), "stdin")
    if not text:
        raise ValueError(message(op, "a text must hold at least one character", f"none in {quote_path(name)}"))
    return text


def tokenizer_of(folder: str) -> BPETokenizer | CharTokenizer | ByteTokenizer:
    """The tokenizer of a folder; one without is told so."""
    from cmha.text import load_tokenizer

    try:
        return load_tokenizer(folder)
    except FileNotFoundError as error:
        name = quote_path(error.filename or "")
        raise ValueError(f"not a run: {quote_path(folder)} holds no tokenizer; got no {name}") from None


def check_vocabulary(op: str, folder: str, tokenizer: Tokenizer, gpt: GPT) -> None:
    """Every id of the tokenizer is one of the model, whose vocabulary may be padded."""
    if tokenizer.vocab_size > gpt.cfg.vocab_size:
        got = f"{tokenizer.vocab_size} and {gpt.cfg.vocab_size} in {quote_path(folder)}"
        raise CheckpointError(message(op, "the tokenizer must not have more ids than the model", got))


def _tell(seed: int | None) -> None:
    if seed is not None and sys.stderr is not None:
        print(f"seed {seed}", file=sys.stderr, flush=True)


class _Text:
    """Prints a prompt and the text behind it as it comes, without half characters and without what ended it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], stop_ids: Iterable[int]) -> None:
        from cmha.text import TextUntil

        self.tokenizer, self.stop_ids = tokenizer, frozenset(stop_ids)
        self.text = TextUntil(tokenizer, stops)

    def all(self, prompt: str, row: Iterable[tuple[int, float]]) -> None:
        print(for_screen(prompt), end="", flush=True)
        for token, _ in row:
            if token in self.stop_ids:
                break
            print(for_screen(self.text.feed(token)), end="", flush=True)
        print(for_screen(self.text.finish()))


class _Lines(_Text):
    """Prints a line for each new token, the one that ended the text included."""

    def all(self, prompt: str, row: Iterable[tuple[int, float]]) -> None:
        for token, logprob in row:
            text = self.tokenizer.decode([token]) if token < self.tokenizer.vocab_size else "\ufffd"
            print(f"{token}\t{logprob:.6f}\t{text!r}", flush=True)
            self.text.feed(token)
            if token in self.stop_ids or self.text.ended:  # an array of rows goes on with this id
                break

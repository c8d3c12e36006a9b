"""What every command's parser shares: strict values, no abbreviations, nothing twice, errors as one line."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NoReturn

from cmha.errors import quote, quote_path

TOKENIZERS = ("char", "byte", "bpe")


class UsageError(Exception):
    """The command line itself is wrong: exit code 2, before any file is opened."""


# Control characters as their pictures, but for line break and tab: what a model writes must not steer a terminal.
_CONTROLS: dict[int, int] = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
_CONTROLS |= dict.fromkeys(range(128, 160), 0xFFFD)


def for_screen(text: str) -> str:
    """text, made safe to show if stdout is a terminal; a file or a pipe gets it as it is."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


def printable(text: str) -> str:
    """text with control characters as Python escapes: a folder's name, which may hold any, goes into a title."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class Parser(argparse.ArgumentParser):
    optional_values: tuple[str, ...] = ()  # options that take a value only behind "=": alone they stand for ""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self.register("action", None, _StoreOnce)
        self.register("action", "store", _StoreOnce)
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")  # Python 3.14's, which knows that -1e3 is a number

    def parse_intermixed_args(  # type: ignore[override]  # only as it is called here
        self, args: list[str], namespace: None = None
    ) -> Namespace:
        """Python's own `--option [VALUE]` would take the word behind it, which may be a file."""
        end = args.index("--") if "--" in args else len(args)
        args = [f"{word}=" if word in self.optional_values else word for word in args[:end]] + args[end:]
        return super().parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def print_help(self, file: Any = None) -> None:
        """argparse is silent where its text cannot be written."""
        print(self.format_help(), end="", file=file)


class _StoreOnce(argparse.Action):
    """Stores a value; an option given twice is refused, where argparse would silently take the last."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if option_string is not None:
            given = namespace.__dict__.setdefault("_given", set())
            if self.dest in given:
                raise argparse.ArgumentError(self, "given twice")
            given.add(self.dest)
        setattr(namespace, self.dest, values)


def integer(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """The type of an option: digits only, so neither 1e3 nor 2.0."""
    limits = f"an integer of at least {least}" if most == 2**63 - 1 else f"an integer from {least} to {most}"

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise argparse.ArgumentTypeError(f"must be {limits}; got {quote(text)}")
        value = int(text) if len(text) <= 1000 else most + 1  # Python itself reads only so many digits
        if value > most:
            raise argparse.ArgumentTypeError(f"must be an integer from {least} to {most}; got {quote(text)}")
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {limits}; got {quote(text)}")
        return value

    return parse


def integers(least: int, most: int = 2**63 - 1) -> Callable[[str], list[int]]:
    """The type of an option that takes one or several integers with commas between them."""
    one = integer(least, most)
    return lambda text: [one(part) for part in text.split(",")]


def number(accepts: Callable[[float], bool], rule: str) -> Callable[[str], float]:
    """The type of an option: a finite number for which accepts(x) holds; rule says that in words."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not accepts(value):
            raise argparse.ArgumentTypeError(f"must be {rule}; got {quote(text)}")
        return value

    return parse


def filled(text: str) -> str:
    """The type of an option: any text but ''."""
    if not text:
        raise argparse.ArgumentTypeError("must hold at least one character; got ''")
    return text


def positive(text: str) -> float:
    return number(lambda x: x > 0, "a finite number above 0")(text)


def not_negative(text: str) -> float:
    return number(lambda x: x >= 0, "a finite number of at least 0")(text)


def suffix(option: str, path: str, known: tuple[str, ...]) -> str:
    """The one of the known endings that the file's name has, which must be more than that."""
    name = os.path.basename(path).lower()
    for ending in known:
        if name.endswith(ending) and name != ending:
            return ending
    raise UsageError(f"{option} must name a file {' or '.join(f'*{ending}' for ending in known)}; got {quote(path)}")


def utf8(text: str, name: str) -> str:
    """An argument's own bytes as UTF-8, whatever the locale made of them."""
    from cmha.files import decode_text

    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:  # not from a command line
        return text
    return decode_text(data, name)


def check_run(folder: str, *names: str) -> None:
    """Refuses what is not the folder of a run, which holds files of these names, before one of them is opened."""
    if not os.path.lexists(folder):
        raise ValueError(f"no such run: {quote_path(folder)}")
    if not os.path.isdir(folder):
        raise ValueError(f"not a run: {quote_path(folder)} is not a folder")
    for name in names:
        if not os.path.exists(os.path.join(folder, name)):
            raise ValueError(f"not a run: {quote_path(folder)} holds no {name}")


def check_tokenizer(args: Namespace) -> None:
    """--tokenizer names a kind or a folder; --vocab-size goes with the kind that learns one."""
    if args.tokenizer is not None and args.tokenizer not in TOKENIZERS and not os.path.isdir(args.tokenizer):
        raise UsageError(f"--tokenizer must be {', '.join(TOKENIZERS)} or a folder; got {quote(args.tokenizer)}")
    if args.vocab_size is not None and args.tokenizer != "bpe":
        raise UsageError("--vocab-size goes with --tokenizer bpe alone")

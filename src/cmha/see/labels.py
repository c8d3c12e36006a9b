"""Tokens as labels: every character that could hide, break a line or run on is spelled out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cmha.text import Tokenizer


def token_labels(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """One label per id: text as it is, a space as \\u2423, line breaks and other invisible characters as Python escapes
    (\\n, \\x1b), a backslash doubled, bytes that are no whole character as \\xe2."""
    return [visible(_text(tokenizer, token)) for token in ids]


def _text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token; bytes that are no character by themselves become lone surrogates."""
    if hasattr(tokenizer, "token_bytes"):
        return str(tokenizer.token_bytes(token), "utf-8", "surrogateescape")
    return tokenizer.decode([token])


def visible(text: str) -> str:
    return "".join(_character(c) for c in text) or "\u2205"


def _character(c: str) -> str:
    if c == " ":
        return "\u2423"
    if "\udc80" <= c <= "\udcff":  # surrogateescape: a byte
        return f"\\x{ord(c) - 0xDC00:02x}"
    if c == "\\" or not c.isprintable():
        return c.encode("unicode_escape").decode("ascii")
    return c

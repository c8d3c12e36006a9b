"""Text that ends before a stop string: cut anywhere, and no character of it shown too early."""

import numpy as np
import pytest

from cmha import ByteTokenizer, CharTokenizer
from cmha.text import TextUntil


def read(text, stops, tokenizer=None):
    """(pieces, whether it ended) of a text whose ids come one at a time."""
    until = TextUntil(tokenizer or ByteTokenizer(), stops)
    pieces = [until.feed(token) for token in (tokenizer or ByteTokenizer()).encode(text)]
    return [*pieces, until.finish()], until.ended


@pytest.mark.parametrize(
    "text, stops, shown",
    [
        ("abc", [], "abc"), ("abc", ["c"], "ab"), ("abc", ["x"], "abc"), ("aab", ["ab"], "a"),
        ("abab", ["abc"], "abab"),
        ("a\u20acb", ["\u20ac"], "a"), ("xaby", ["ab", "xa"], ""), ("aaaaab", ["aab"], "aaa"),
        ("ab\n\ncd", ["\n\n"], "ab"),
        ("STO", ["STOP"], "STO"), ("one STOP two STOP", ["STOP"], "one "), ("abcd", ["bcd", "c"], "ab"),
    ],
)  # fmt: skip
def test_text_ends_before_the_first_stop_string(text, stops, shown):
    for tokenizer in (ByteTokenizer(), CharTokenizer(text)):
        pieces, ended = read(text, stops, tokenizer)
        assert "".join(pieces) == shown and ended == any(s in text for s in stops)
        assert all("\ufffd" not in piece for piece in pieces)


def test_only_what_could_begin_a_stop_string_waits():
    pieces, _ = read("a-b--c", ["--!"])
    assert pieces == ["a", "", "-b", "", "", "--c", ""]


def test_any_text_and_any_stop_strings():
    rng = np.random.default_rng(0)
    for _ in range(300):
        sizes = 12, rng.integers(1, 4), rng.integers(1, 4)
        text, *stops = ("".join(rng.choice(["a", "b", "\u20ac"], n)) for n in sizes)
        pieces, ended = read(text, stops)
        places = []  # a stop string ends the text where it becomes whole
        for end in range(len(text) + 1):
            places = places or [text[:end].find(s) for s in stops if s in text[:end]]
        assert "".join(pieces) == (text[: min(places)] if places else text) and ended == bool(places)


def test_an_id_without_text_and_half_a_character():
    until = TextUntil(CharTokenizer("ab"), ["b"])
    assert until.feed(0) + until.feed(7) + until.feed(1) + until.feed(0) + until.finish() == "a\ufffd" and until.ended
    until = TextUntil(ByteTokenizer(), ["\ufffd"])
    assert until.feed(0xE2) == "" and until.finish() == "" and until.ended

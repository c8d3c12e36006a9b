"""Tokenizers, streaming decoding, reading and splitting text."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmha.errors import CheckpointError
from cmha.files import decode_text, read_text
from cmha.text import ByteTokenizer, CharTokenizer, StreamDecoder, load_tokenizer
from cmha.text.corpora import Texts, check_length, default_text, open_data, split, text_ids
from cmha.train.batches import training_batch, validation_batches

EMOJI = "\U0001f600"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def one_line(error):
    assert str(error.value).startswith("[") and "\n" not in str(error.value) and len(str(error.value)) <= 300
    return str(error.value)


def test_char_ids_follow_code_points():
    tokenizer = CharTokenizer("hello " + EMOJI)
    assert tokenizer.vocab_size == 6
    assert tokenizer.encode(f"ho {EMOJI}") == [2, 4, 0, 5]
    assert tokenizer.decode(np.array([2, 4, 0, 5])) == f"ho {EMOJI}"


@settings(deadline=None, derandomize=True, max_examples=60)
@given(texts)
def test_round_trip(text):
    for tokenizer in (ByteTokenizer(), CharTokenizer(text + "x")):
        ids = tokenizer.encode(text)
        assert all(type(i) is int for i in ids) and tokenizer.decode(ids) == text
        assert next(text_ids(tokenizer, [text])).tolist() == ids


def test_unknown_character_is_named_with_its_place():
    with pytest.raises(ValueError) as error:
        CharTokenizer("abc").encode("cab" + EMOJI)
    assert repr(EMOJI) in one_line(error) and "position 3" in one_line(error)
    with pytest.raises(ValueError, match="position 1"):
        ByteTokenizer().encode("a\ud800")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("abc")])
@pytest.mark.parametrize("place", [-1, 3])
def test_id_outside_the_table_is_named(tokenizer, place):
    bad = -1 if place < 0 else tokenizer.vocab_size
    with pytest.raises(ValueError) as error:
        tokenizer.decode([0, 1, bad, 2])
    assert f"got {bad} at position 2" in one_line(error)
    with pytest.raises(TypeError):
        tokenizer.decode([0.0, 1.0])
    with pytest.raises(ValueError, match="shape"):
        tokenizer.decode([[0, 1]])


def test_b63_empty_and_minimal_texts():
    with pytest.raises(ValueError) as error:
        CharTokenizer("")
    one_line(error)
    with pytest.raises(TypeError):
        CharTokenizer(None)
    for tokenizer in (ByteTokenizer(), CharTokenizer("a")):
        assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    assert CharTokenizer("   ").vocab_size == 1
    assert CharTokenizer("ab").encode("ba") == [1, 0]


class PairTokenizer:
    """Ids of two bytes, as byte-pair encoding makes them."""

    table = [b"\xf0\x9f", b"\x98\x80", b"\xff", b" x"]
    vocab_size = 4

    def token_bytes(self, token):
        return self.table[token]

    def decode(self, ids):
        return b"".join(self.table[i] for i in ids).decode("utf-8", "replace")


def pieces(tokenizer, ids):
    decoder = StreamDecoder(tokenizer)
    return [decoder.feed(i) for i in ids] + [decoder.finish()]


def test_b64_a_character_cut_in_two_waits_for_its_rest():
    assert pieces(PairTokenizer(), [0, 1, 3]) == ["", EMOJI, " x", ""]
    assert pieces(ByteTokenizer(), [0xF0, 0x9F, 0x98, 0x80, 0x20, 0x78]) == ["", "", "", EMOJI, " ", "x", ""]
    assert pieces(PairTokenizer(), [3, 2, 3]) == [" x", "\ufffd", " x", ""]  # FF shows at once
    assert pieces(PairTokenizer(), [3, 0]) == [" x", "", "\ufffd"]  # a tail cut off
    assert pieces(CharTokenizer("a" + EMOJI), [1, 0]) == [EMOJI, "a", ""]
    with pytest.raises(ValueError, match="256 at position 0"):
        StreamDecoder(ByteTokenizer()).feed(256)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.sampled_from([0x20, 0x7F, 0x80, 0x98, 0x9F, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xFF])))
def test_b64_the_pieces_join_to_the_whole(ids):
    assert "".join(pieces(ByteTokenizer(), ids)) == ByteTokenizer().decode(ids)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("a\n\"\u20ac" + EMOJI)])
def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for loaded in (load_tokenizer(tmp_path), type(tokenizer).load(str(tmp_path))):
        assert type(loaded) is type(tokenizer) and loaded.encode(EMOJI) == tokenizer.encode(EMOJI)
    other = ByteTokenizer if isinstance(tokenizer, CharTokenizer) else CharTokenizer
    with pytest.raises(CheckpointError, match="type"):
        other.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", '"char"', '{"type": 3}', '{"type": "bpe"}', '{"type": "char"}',
        '{"type": "char", "characters": ""}', '{"type": "char", "characters": "ba"}',
        '{"type": "char", "characters": "aa"}', '{"type": "char", "characters": ["a"]}',
        '{"type": "byte", "more": 1}', '{"type": "byte", "type": "byte"}', '{"type": NaN}', "[" * 200_000, "\ufeff{}",
        '{"type": "char", "characters": "a", "x": 1}', '{"type": ["char"]}',
    ],
)  # fmt: skip
def test_bad_tokenizer_file_is_one_clear_error(content, tmp_path):
    (tmp_path / "tokenizer_cmha.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        load_tokenizer(tmp_path)
    assert "tokenizer_cmha.json" in one_line(error)


def test_missing_tokenizer_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer_cmha\.json"):
        load_tokenizer(tmp_path)


def test_text_is_utf8_with_plain_line_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n\xe2\x82\xac")
    assert read_text(path) == "a\nb\rc\n\u20ac"
    path.write_bytes(b"abc\r\n\xff")
    with pytest.raises(ValueError) as error:
        read_text(path)
    assert "a.txt" in one_line(error) and "0xff at offset 5" in one_line(error)
    assert decode_text(b"", "the prompt") == ""


def test_texts_are_joined_in_order_and_empty_ones_refused(tmp_path):
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("two\n")
    (tmp_path / "empty").write_text("")
    assert "".join(Texts([tmp_path / "b", tmp_path / "a"])) == "two\n\none"
    assert list(Texts([tmp_path / "a"])) == ["one"]
    with pytest.raises(ValueError, match="empty"):
        list(Texts([tmp_path / "a", tmp_path / "empty"]))


def test_default_text_is_the_same_every_time():
    text = default_text()
    assert text == default_text() and len(text) > 300_000 and "\r" not in text


@pytest.mark.parametrize("length", [0, 1, 10, 16])
def test_b42_too_short_a_split_is_named(length):
    ids = np.arange(length)
    for call in (lambda: training_batch(ids, 3, 16, seed=0, step=0), lambda: list(validation_batches(ids, 3, 16))):
        with pytest.raises(ValueError) as error:
            call()
        assert "17" in one_line(error) and f"got {length}" in one_line(error) and "split" in one_line(error)


def test_b42_windows_reach_both_ends():
    x, y = training_batch(np.arange(17), 5, 16, seed=1, step=2)
    assert (x == np.arange(16)).all() and (y == np.arange(1, 17)).all()
    starts = {int(x[0, 0]) for step in range(40) for x, _ in [training_batch(np.arange(18), 1, 16, seed=1, step=step)]}
    assert starts == {0, 1}
    with pytest.raises(ValueError, match=r"validation split .* = 17 tokens; got 10"):
        split(np.arange(100), 16)
    with pytest.raises(ValueError, match=r"training split .*; got 0"):
        split(np.arange(0), 16)
    train, validation = split(np.arange(170), 16)
    assert len(train) == 153 and len(validation) == 17 and validation[0] == 153
    check_length("validation", validation, 16)


def test_batches_are_a_function_of_seed_and_step():
    ids = np.arange(1000, dtype=np.uint16)
    first = training_batch(ids, 7, 11, seed=3, step=5)
    again = training_batch(ids, 7, 11, seed=3, step=5)
    assert first[0].shape == (7, 11) and first[0].dtype == np.int64
    assert (first[0] == again[0]).all() and (first[1] == first[0] + 1).all()
    assert (training_batch(ids, 7, 11, seed=3, step=6)[0] != first[0]).any()
    assert (training_batch(ids, 7, 11, seed=4, step=5)[0] != first[0]).any()
    assert (training_batch(ids, 3, 11, seed=3, step=5)[0] == first[0][:3]).all()


def test_validation_covers_every_window_once():
    batches = list(validation_batches(np.arange(100), 3, 8))
    x = np.concatenate([x for x, _ in batches])
    assert [len(x) for x, _ in batches] == [3, 3, 3, 3]
    assert (x.reshape(-1) == np.arange(96)).all()
    assert (np.concatenate([y for _, y in batches]) == x + 1).all()


def test_encoded_corpus_is_small(tmp_path):
    (tmp_path / "text").write_text("abc" * 10)
    assert open_data([tmp_path / "text"], "byte", 2).training.dtype == np.uint8


def test_json_file_keeps_characters_readable(tmp_path):
    CharTokenizer("\u20ac").save(tmp_path)
    text = (tmp_path / "tokenizer_cmha.json").read_text(encoding="utf-8")
    assert "\u20ac" in text and json.loads(text)["type"] == "char"

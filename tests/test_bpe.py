"""Byte-pair encoding: GPT-2's ids, training, files, special tokens, streaming."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmha import BPETokenizer, ByteTokenizer, CharTokenizer, CheckpointError
from cmha.text import StreamDecoder, bpe, load_tokenizer
from cmha.text.corpora import default_text, text_ids

from .models import gpt2_vocabulary

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra bpe")
EMOJI = "\U0001f600"
SPECIAL = "<|endoftext|>"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return load_tokenizer(gpt2_vocabulary(tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def small():
    return BPETokenizer.train(default_text()[:30_000], 300)


SYMBOLS = {byte: symbol for symbol, byte in bpe._symbols().items()}


def old_files(folder, merges, more=(), first="#version: 0.2\n", end="\n"):
    """vocab.json and merges.txt of the 256 bytes, these merges, and more tokens."""
    tokens = [SYMBOLS[b] for b in range(256)] + [merge.replace(" ", "") for merge in merges] + list(more)
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(dict.fromkeys(tokens))}))
    (folder / "merges.txt").write_bytes((first + "".join(merge + end for merge in merges)).encode())
    return folder


# --- ids ------------------------------------------------------------------------------------------------------------

def test_gpt2s_own_ids(gpt2):
    """F7, B66: the published ids."""
    assert gpt2.vocab_size == 50257 and gpt2.special_tokens == {SPECIAL: 50256}
    known = {
        "Hello world": [15496, 995], "Hello,": [15496, 11], "": [], " ": [220], "\n\n": [628],
        "The quick brown fox": [464, 2068, 7586, 21831], "it's": [270, 338], EMOJI: [47249, 222],
    }  # fmt: skip
    for text, expected in known.items():
        assert gpt2.encode(text) == expected and gpt2.decode(np.array(expected, np.int64)) == text


def test_b66_the_lowest_rank_merges_first(tmp_path):
    tokenizer = BPETokenizer.load(old_files(tmp_path, ["b c", "a b", "a a"]))
    for pieces in ("a bc", "a bc a bc", "aa aa", "aa a", "ab", "ab a"):
        assert [tokenizer.decode([i]) for i in tokenizer.encode(pieces.replace(" ", ""))] == pieces.split()


def test_b62_special_tokens_are_text_unless_asked_for(gpt2, tmp_path):
    assert gpt2.encode(SPECIAL) == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.encode(SPECIAL, allow_special=True) == [50256]
    text = f"a{SPECIAL}b{SPECIAL}"
    assert gpt2.encode(text, allow_special=True) == [64, 50256, 65, 50256]
    assert 50256 not in gpt2.encode(text)
    assert gpt2.decode(gpt2.encode(text)) == gpt2.decode(gpt2.encode(text, allow_special=True)) == text
    backend = tokenizers.Tokenizer.from_str(BPETokenizer.load(old_files(tmp_path, ["a b"]))._backend.to_str())
    backend.add_special_tokens(["<|x|>", "<|x|>y"])
    tokenizer = BPETokenizer(backend)
    assert tokenizer.encode("<|x|>y<|x|>ab", allow_special=True) == [258, 257, 256]  # the longest wins
    assert max(tokenizer.encode("<|x|>y<|x|>ab")) == 256


@settings(deadline=None, derandomize=True, max_examples=200)
@given(text=texts)
def test_f7_every_text_comes_back(small, text):
    assert small.decode(small.encode(text)) == text
    assert next(text_ids(small, [text])).tolist() == small.encode(text)


ODD = ["a\0b", "e\u0301", "\ufffd", "\u200b", "\ufeff", "\r\n\t ", "\x1c\x85\u2028", "\u4e2d\u6587", EMOJI * 3, "'s 'T"]


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_f7_odd_characters_come_back(text, gpt2, small):
    for tokenizer in (gpt2, small):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text


def test_f7_known_ids_always_decode(gpt2, small):
    rng = np.random.default_rng(3)
    for tokenizer in (gpt2, small):
        for _ in range(30):
            ids = rng.integers(0, tokenizer.vocab_size, 40)
            text = tokenizer.decode(ids)
            assert text == b"".join(map(tokenizer.token_bytes, ids.tolist())).decode("utf-8", "replace")
    assert gpt2.decode([47249]) == "\ufffd" and gpt2.decode([47249, 222]) == EMOJI
    for bad in (50257, -1):
        with pytest.raises(ValueError, match=rf"^\[decode\] .*got {bad} at position 1"):
            gpt2.decode([5, bad])
    with pytest.raises(TypeError):
        gpt2.decode([1.0])


def test_long_texts_are_cut_where_no_token_is(gpt2, monkeypatch):
    text = default_text()[:20_000] + "  \n\n a\u00a0 b\x1c c\u2003\n" * 50
    whole = gpt2._backend.encode(text).ids
    for size in (1, 2, 7, 1000):
        monkeypatch.setattr(bpe, "PIECE", size)
        assert "".join(bpe._pieces(text)) == text
        assert gpt2.encode(text) == whole


def test_what_is_no_text_is_refused(gpt2):
    for bad in (None, b"abc", 3, ["a"]):
        with pytest.raises(TypeError, match="text must be a str"):
            gpt2.encode(bad)
    with pytest.raises(ValueError, match="surrogate.*position 1"):
        gpt2.encode("a\ud800")
    with pytest.raises(TypeError, match="tokenizers.Tokenizer"):
        BPETokenizer("abc")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match="model WordLevel"):
        BPETokenizer(words)
    with pytest.raises(ValueError, match="over bytes"):
        BPETokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()))  # without bytes in front, spaces would vanish


def test_a_byte_outside_the_vocabulary_is_named(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "c": 9}')
    (tmp_path / "merges.txt").write_text("a b\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("abba") == [2, 1, 0] and tokenizer.decode([2, 9]) == "abc"
    with pytest.raises(ValueError, match="byte 0x78 at offset 2"):
        tokenizer.encode("abx")
    with pytest.raises(ValueError, match="got 5, which it leaves out"):
        tokenizer.decode([0, 5])


@pytest.mark.parametrize("unit", ["a", " ", "^", "\n", "\u00e9", "0", "'", "ab \n"])
def test_f7_adversarial_texts_end(unit, gpt2):
    """Time is linear (measured: 0.3 to 1.6 s for a million); a quadratic encoder would not come back from these."""
    text = (unit * 200_000)[:200_000]
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text and len(ids) <= len(text)


# --- training -------------------------------------------------------------------------------------------------------

def test_b63_empty_and_minimal_texts_train():
    with pytest.raises(ValueError, match="at least one character"):
        BPETokenizer.train("", 260)
    for size in (255, 0, -1):
        with pytest.raises(ValueError, match=f"at least 256; got {size}"):
            BPETokenizer.train("abc", size)
    for bad in (None, 3, b"abc"):
        with pytest.raises(TypeError):
            BPETokenizer.train(bad, 300)
    for text, size, merges in (("ab", 300, 1), ("a", 300, 0), ("abab", 256, 0), ("ab", 10**12, 1)):
        tokenizer = BPETokenizer.train(text, size)
        assert tokenizer.vocab_size == 256 + merges and tokenizer.decode(tokenizer.encode(text)) == text
    assert 256 < BPETokenizer.train("   ", 260).vocab_size <= 258
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == "" and tokenizer.special_tokens == {}


def test_training_is_a_function_of_the_text(tmp_path, monkeypatch):
    text = default_text()[:60_000]
    first = BPETokenizer.train(text, 500)
    monkeypatch.setattr(bpe, "PIECE", 100)
    again = BPETokenizer.train(text, 500)
    assert first._backend.to_str() == again._backend.to_str() and first.vocab_size == 500
    assert len(first.encode(text)) < 0.6 * len(text)
    (tmp_path / "a.txt").write_bytes(text[:30_000].encode() + b"\r\n")
    (tmp_path / "b.txt").write_text(text[30_000:], encoding="utf-8")
    files = BPETokenizer.train([tmp_path / "a.txt", str(tmp_path / "b.txt")], 500)
    assert files._backend.to_str() == BPETokenizer.train(text[:30_000] + "\n\n" + text[30_000:], 500)._backend.to_str()


# --- streaming ------------------------------------------------------------------------------------------------------

def test_b64_half_a_character_waits(gpt2):
    decoder = StreamDecoder(gpt2)
    assert [decoder.feed(i) for i in (15496, 47249, 222, 2087)] == ["Hello", "", EMOJI, " added"]
    assert decoder.feed(47249) == "" and decoder.finish() == "\ufffd"


def test_b64_the_pieces_join_to_the_whole(gpt2, small):
    rng = np.random.default_rng(5)
    for tokenizer in (gpt2, small):
        for _ in range(30):
            ids = rng.integers(0, tokenizer.vocab_size, 25).tolist() + tokenizer.encode(EMOJI)[:1]
            decoder = StreamDecoder(tokenizer)
            assert "".join(map(decoder.feed, ids)) + decoder.finish() == tokenizer.decode(ids)


# --- files ----------------------------------------------------------------------------------------------------------

def test_saved_and_loaded(gpt2, small, tmp_path):
    for tokenizer in (gpt2, small):
        tokenizer.save(tmp_path)
        for again in (load_tokenizer(tmp_path), BPETokenizer.load(str(tmp_path))):
            assert again.vocab_size == tokenizer.vocab_size and again.special_tokens == tokenizer.special_tokens
            assert again.encode("Hello <|endoftext|>") == tokenizer.encode("Hello <|endoftext|>")
    config = {"model_max_length": 1024, "pad_token": "x"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "new").mkdir()
    load_tokenizer(tmp_path).save(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "tokenizer_config.json").read_text()) == config  # handed on as it was


def test_a_limit_in_the_file_cuts_no_text(small, tmp_path):
    backend = tokenizers.Tokenizer.from_str(small._backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("a long line of text") == small.encode("a long line of text")


def test_a_folder_has_one_tokenizer(small, tmp_path):
    small.save(tmp_path)
    CharTokenizer("abc").save(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer_cmha\.json and tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert isinstance(load_tokenizer(tmp_path), CharTokenizer)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        BPETokenizer.load(tmp_path)
    ByteTokenizer().save(tmp_path)
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)


def test_f6_old_files_with_crlf_and_byte_order_mark(tmp_path):
    plain = BPETokenizer.load(old_files(tmp_path, ["a b", "ab c"]))
    for first, end in (("", "\n"), ("\ufeff#version: 0.2\r\n", "\r\n"), ("#version: 0.2\n", "\n\n")):
        again = BPETokenizer.load(old_files(tmp_path, ["a b", "ab c"], first=first, end=end))
        assert again.encode("abcab") == plain.encode("abcab") == [257, 256]


OLD = {
    "merges.txt": ["a", "a b c", "a b\na b", "a  b", " b", "a b\nx\ty", "a zz", b"\xff b"],
    "vocab.json": ["", "[]", "{}", '{"a": "0"}', '{"a": -1}', '{"a": 1.0}', '{"a": true}', '{"a": 0, "a": 1}',
                   '{"a": 0, "b": 0}', '{"a": NaN}', "[" * 100_000, '{"a": 4294967296}', '{"b": 3}'],
}  # fmt: skip


@pytest.mark.parametrize(("name", "content"), [(name, c) for name in OLD for c in OLD[name]], ids=ascii)
def test_f6_bad_old_files_are_one_clear_error(name, content, tmp_path):
    old_files(tmp_path, ["a b"])
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"^\[\w+\] ") as error:
        load_tokenizer(tmp_path)
    assert isinstance(error.value, CheckpointError) or content == b"\xff b"  # text that is no UTF-8
    assert any(n in str(error.value) for n in OLD) and "\n" not in str(error.value) and len(str(error.value)) < 400


def bad_new_files(small):
    """[(what, text)] of tokenizer.json"""
    good = json.loads(small._backend.to_str())

    def changed(**changes):
        return json.dumps({**good, **changes})

    def model(**changes):
        return changed(model={**good["model"], **changes})

    merges, vocab = good["model"]["merges"], good["model"]["vocab"]
    return {
        "empty": "", "list": "[]", "nothing": "{}", "half": changed()[:-100], "deep": "[" * 100_000,
        "no model": changed(model=None), "model text": changed(model="BPE"), "other model": model(type="Unigram"),
        "dropout": model(dropout=0.5), "vocab list": model(vocab=[]), "vocab empty": model(vocab={}),
        "id text": model(vocab={**vocab, "x1": "5"}), "id twice": model(vocab={**vocab, "x1": 5}),
        "id huge": model(vocab={**vocab, "x1": 2**40}), "id negative": model(vocab={**vocab, "x1": -1}),
        "merges missing": model(merges=None), "merge of one": model(merges=[*merges, ["a"]]),
        "merge of three": model(merges=[*merges, "a b c"]), "merge twice": model(merges=[*merges, merges[3]]),
        "merge unknown": model(merges=[*merges, ["a", "\u00f0zz"]]), "merge of numbers": model(merges=[[1, 2]]),
        "no decoder": changed(decoder=None), "no bytes": changed(pre_tokenizer=None),
        "other decoder": changed(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
        "unknown decoder": changed(decoder={"type": "Other"}), "version": changed(version="9"),
        "added odd": changed(added_tokens=[{"id": "x"}]), "added list": changed(added_tokens=3),
        "same key": '{"model": 1, "model": 2}', "nan": '{"model": NaN}', "nul": "\0" * 50,
    }  # fmt: skip


def test_f6_bad_new_files_are_one_clear_error(small, tmp_path):
    for what, text in bad_new_files(small).items():
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"^\[load\] .*tokenizer\.json'") as error:
            load_tokenizer(tmp_path)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400, what
    for content in (b"\xff{}", b"[]", b"{"):
        small.save(tmp_path)
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    for call in (lambda: BPETokenizer.train("abc", 300), lambda: BPETokenizer.load(tmp_path)):
        with pytest.raises(ImportError, match=r"pip install 'cmha\[bpe\]'"):
            call()

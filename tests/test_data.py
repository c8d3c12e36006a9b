"""Corpora and files of token ids: what may be trained on, what is refused, and that no byte of it is lost."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from cmha.cli import main
from cmha.errors import CheckpointError
from cmha.text import BPETokenizer, ByteTokenizer, CharTokenizer, corpora
from cmha.text.corpora import Texts, make_tokenizer, open_data, text_ids
from cmha.text.token_files import TokenFile, Tokens, token_dtype, write_tokens
from cmha.train.batches import training_batch, validation_batches

from .checking import needs_linux, needs_posix

TEXT = "one fish, two fish; red fish, blue fish.\n\n\tcaf\u00e9 \u201cyes\u201d\n" * 40
BYTES = ByteTokenizer()


def one_line(error):
    assert str(error.value).startswith("[") and "\n" not in str(error.value) and len(str(error.value)) <= 300
    return str(error.value)


def llm_c(path, ids, magic=20240520, version=1, dtype="<u2", count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype).tobytes())
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(corpora, "PIECE", 7)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(["a", "b\u0301", " ", "\n", "\r\n", "\r", "\u00a0", "\u3000", "\U0001f600", "word"])))
def test_pieces_join_to_the_text_and_end_where_a_word_does(tmp_path_factory, parts):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes("".join(["x", *parts]).encode())
    before, corpora.PIECE = corpora.PIECE, 5
    try:
        pieces = list(Texts([path]))
    finally:
        corpora.PIECE = before
    assert "".join(pieces) == path.read_bytes().decode().replace("\r\n", "\n")
    for left, right in zip(pieces, pieces[1:], strict=False):
        assert not left[-1].isspace() and right[0].isspace()


def test_a_folder_is_its_files_sorted_without_hidden_ones(tmp_path, small_pieces):
    for name, content in {"b.txt": "2", "a/z.md": "1\r\n", ".git/x": "no", ".hidden": "no", "c": "\ufeff3"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert "".join(Texts([tmp_path])) == "1\n\n2\n3"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="folder must hold text files; got none in .*empty"):
        Texts([tmp_path / "empty"])


@pytest.mark.parametrize("place", [0, 6, 7, 8, 30])
def test_bytes_that_are_no_utf8_are_named_with_their_offset(tmp_path, small_pieces, place):
    data = bytearray(("\u20ac" * 20).encode())
    data[place] = 0xFF
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(ValueError) as error:
        list(Texts([tmp_path / "bad"]))
    first = place - place % 3  # the character that is broken
    assert f"at offset {first} of" in one_line(error) or f"0xff at offset {place} of" in one_line(error)
    (tmp_path / "cut").write_bytes(data[:2] if place > 1 else b"\xe2")
    with pytest.raises(ValueError, match="0xe2 at offset 0 of"):
        list(Texts([tmp_path / "cut"]))


@needs_posix
def test_a_pipe_is_read_once_and_given_as_often_as_asked(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = subprocess.Popen([sys.executable, "-c", f"open({str(tmp_path / 'pipe')!r}, 'w').write('abc' * 60)"])
    corpus = open_data([tmp_path / "pipe"], None, 5)
    assert writer.wait() == 0 and corpus.tokenizer.characters == "abc"
    assert len(corpus.training) == 162 and len(corpus.validation) == 18


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_training_on_the_token_file_is_training_on_the_text(text, tmp_path, tokenizer, capsys, small_pieces):
    """The same ids, split, hash and tokenizer, so the same run; and other programs can read the file."""
    out = str(tmp_path / "ids.safetensors")
    assert main(["tokenize", str(text), str(text), "--out", out, "--tokenizer", tokenizer]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == out
    from_text, from_file = open_data([text, text], tokenizer, 12), open_data([out], None, 12)
    assert from_text.sha256 == from_file.sha256 and repr(from_text.tokenizer) == repr(from_file.tokenizer)
    assert [len(from_text.training), len(from_text.validation)] == [len(from_file.training), len(from_file.validation)]
    for step in range(3):
        for a, b in zip(*(training_batch(c.training, 5, 12, seed=1, step=step) for c in (from_text, from_file)),
                        strict=True):  # fmt: skip
            assert a.tobytes() == b.tobytes() and a.dtype == b.dtype
    whole = load_file(out)["tokens"]
    assert whole.dtype == np.uint16 and from_text.tokenizer.decode(whole) == TEXT + "\n" + TEXT
    assert TokenFile(out)._offset % 8 == 0
    assert main(["tokenize", str(text), str(text), "--out", out + "2.safetensors", "--tokenizer", tokenizer]) == 0
    with open(out, "rb") as one, open(out + "2.safetensors", "rb") as two:
        assert one.read() == two.read()


def test_bpe_ids_of_pieces_are_those_of_the_whole(text, tmp_path, capsys, small_pieces):
    """Learnt from the texts, kept in the file, and wrong ids for nobody: a piece ends where a word does."""
    pytest.importorskip("tokenizers", reason="the extra `bpe`")
    out = str(tmp_path / "ids.safetensors")
    assert main(["tokenize", str(text), "--out", out, "--tokenizer", "bpe", "--vocab-size", "270"]) == 0
    assert " of 270 kinds" in capsys.readouterr().out
    corpus = open_data([out], None, 12)
    assert isinstance(corpus.tokenizer, BPETokenizer)
    assert load_file(out)["tokens"].tolist() == corpus.tokenizer.encode(TEXT) != list(TEXT.encode())
    corpus.tokenizer.save(tmp_path)  # beside a .bin, as nanoGPT's users have it
    load_file(out)["tokens"].tofile(tmp_path / "train.bin")
    again = open_data([tmp_path / "train.bin"], None, 12)
    assert TEXT.startswith(again.tokenizer.decode(again.training[np.arange(9)]))
    assert open_data([text], BPETokenizer.train(TEXT, 270), 12).sha256 == corpus.sha256 == again.sha256


def test_a_wide_vocabulary_takes_four_bytes(tmp_path):
    class Wide(CharTokenizer):
        vocab_size = 70_000

    assert [token_dtype(n).itemsize for n in (65_536, 65_537)] == [2, 4]
    write_tokens(tmp_path / "w.safetensors", [np.array([69_999, 3]), np.array([65_536])], Wide("ab"))
    assert load_file(tmp_path / "w.safetensors")["tokens"].tolist() == [69_999, 3, 65_536]


def test_nanogpt_and_llm_c_files(tmp_path):
    """uint16 without a header; 256 int32 and uint16 or uint32. A file called val validates, the others train."""
    tokenizer, ids = CharTokenizer("".join(map(chr, range(300)))), np.arange(250)
    nano, llm = tmp_path / "nano", tmp_path / "llm"
    nano.mkdir(), llm.mkdir()
    ids.astype("<u2").tofile(nano / "train.bin")
    ids[:40].astype("<u2").tofile(nano / "val.bin")
    (nano / "input.txt").write_text("the text that they were made of")
    tokenizer.save(nano)
    for corpus in (open_data([nano], None, 16), open_data([nano / "val.bin", nano / "train.bin"], tokenizer, 16)):
        assert corpus.training[np.arange(250)].tolist() == ids.tolist()
        assert corpus.validation[np.arange(40)].tolist() == ids[:40].tolist()
    llm_c(llm / "fine_train_000001.bin", ids[:100])
    llm_c(llm / "fine_train_000002.bin", ids[100:], 20240801, 7, "<u4")
    llm_c(llm / "fine_val_000000.bin", ids[:40])
    corpus = open_data([llm], tokenizer, 16)
    assert corpus.training[np.arange(250)].tolist() == ids.tolist() and len(corpus.validation) == 40
    inputs, targets = training_batch(corpus.training, 64, 16, seed=0, step=0)  # windows cross the border of the files
    assert (targets == inputs + 1).all() and ((inputs[:, :1] < 100) & (targets[:, -1:] >= 100)).any()
    alone = open_data([llm / "fine_train_000001.bin"], tokenizer, 8)
    assert len(alone.training) == 90 and alone.validation[np.arange(10)].tolist() == list(range(90, 100))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_tokens_in_several_files_are_one_row(tmp_path_factory, sizes, data):
    folder, rows = tmp_path_factory.mktemp("rows"), np.arange(sum(sizes), dtype="<u2") * 7
    files = []
    for number, part in enumerate(np.split(rows, np.cumsum(sizes)[:-1])):
        part.tofile(folder / f"{number}.bin")
        files.append((TokenFile(folder / f"{number}.bin"), 0, len(part)))
    tokens = Tokens(files)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    cut = tokens[start:stop][1:] if stop > start else tokens[start:stop]
    expected = rows[start:stop][1:]
    assert len(cut) == len(expected) and len(tokens[::1]) == len(rows)
    if len(cut):
        index = np.arange(2 * len(cut)).reshape(2, -1) % len(cut)
        assert cut[index].tolist() == expected[index].tolist() and int(cut[0]) == expected[0]
    for outside in (len(cut), -1):
        with pytest.raises(IndexError):
            cut[outside]


@pytest.mark.parametrize("length", [170, 1000, 4 * 2**20])
def test_b42_no_training_window_holds_a_validation_token(length, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "VALIDATION_LIMIT", 1 << 18)
    path = tmp_path / "ids.bin"
    (np.arange(length) >= max(length * 9 // 10, length - 2**18)).astype("<u2").tofile(path)
    corpus = open_data([path], BYTES, 16)
    last = np.arange(len(corpus.training) - 17, len(corpus.training))
    assert not corpus.training[last].any() and len(corpus.training) + len(corpus.validation) == length
    assert sum(x.size for x, _ in validation_batches(corpus.validation, 50, 16)) <= 2**18
    assert all(x.all() and y.all() for x, y in validation_batches(corpus.validation, 4096, 16))
    for step in range(20):
        inputs, targets = training_batch(corpus.training, 50, 16, seed=0, step=step)
        assert not inputs.any() and not targets.any()


@pytest.mark.parametrize("length", [0, 1, 16, 17, 160])
def test_b42_too_little_data_names_the_split(length, tmp_path):
    (tmp_path / "ids.bin").write_bytes(bytes(2 * length))
    (tmp_path / "text").write_bytes(b"a" * length)
    for path in ("ids.bin", "text"):
        with pytest.raises(ValueError) as error:
            open_data([tmp_path / path], BYTES, 16)
        if length:
            assert "split must hold at least block_size + 1 = 17 tokens; got" in one_line(error)
        else:
            assert path in one_line(error)
    np.zeros(100, "<u2").tofile(tmp_path / "train.bin")
    np.zeros(16, "<u2").tofile(tmp_path / "val.bin")
    with pytest.raises(ValueError, match="validation split .* got 16"):
        open_data([tmp_path / "train.bin", tmp_path / "val.bin"], BYTES, 16)
    with pytest.raises(ValueError, match="training split must hold a token file; got only .*val.bin.*word `val`"):
        open_data([tmp_path / "val.bin"], BYTES, 15)


def test_an_id_outside_the_vocabulary_is_named_before_the_run(tmp_path):
    ids = np.zeros(5000, "<u2")
    ids[4321] = 256
    ids.tofile(tmp_path / "train.bin")
    with pytest.raises(CheckpointError) as error:
        open_data([tmp_path / "train.bin"], BYTES, 16)
    assert "ids must be from 0 to 255; got 256 at position 4321 in" in one_line(error)


def test_another_tokenizer_is_refused_by_its_hash(text, tmp_path):
    out, tokenizer = tmp_path / "ids.safetensors", make_tokenizer("char", [TEXT])
    write_tokens(out, text_ids(tokenizer, [TEXT]), tokenizer)
    other = CharTokenizer(tokenizer.characters[1:] + "\u20ac")  # as many, not the same
    with pytest.raises(ValueError, match="one tokenizer .*; got SHA-256 .*, expected"):
        open_data([out], other, 12)
    assert open_data([out], CharTokenizer(TEXT), 12).tokenizer.characters == tokenizer.characters
    for name in ("char", "byte"):
        with pytest.raises(ValueError, match="brings its tokenizer"):
            open_data([out], name, 12)
    with pytest.raises(ValueError, match="do not mix; got .*text.txt"):
        open_data([out, text], None, 12)
    np.zeros(500, "<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(ValueError, match="ids need a tokenizer; got none in .*--tokenizer"):
        open_data([tmp_path / "train.bin"], None, 12)


def own_file(path, change=lambda header: None, data=bytes(40)):
    """A token file with a header of our making."""
    files = json.dumps({"tokenizer_cmha.json": '{"type": "byte"}'})
    header = {"__metadata__": {"format": "cmha-tokens-1", "tokenizer": files}}
    header["tokens"] = {"dtype": "U16", "shape": [20], "data_offsets": [0, 40]}
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("change", [
    lambda h: h["tokens"].update(dtype="F32"), lambda h: h["tokens"].update(shape=[4, 5]),
    lambda h: h["tokens"].update(shape=[21]), lambda h: h["tokens"].update(shape=[19]),
    lambda h: h["tokens"].update(shape=[2**62]), lambda h: h["tokens"].update(data_offsets=[2, 42]),
    lambda h: h.update(more=h["tokens"]), lambda h: h.pop("tokens"), lambda h: h.pop("__metadata__"),
    lambda h: h["__metadata__"].update(format="pt"), lambda h: h["__metadata__"].update(sha256="0" * 64),
    lambda h: h["__metadata__"].pop("tokenizer"), lambda h: h["__metadata__"].update(tokenizer="[]"),
    lambda h: h["__metadata__"].update(tokenizer='{"../evil.json": "x"}'),
    lambda h: h["__metadata__"].update(tokenizer='{"tokenizer_cmha.json": 3}'),
    lambda h: h["__metadata__"].update(tokenizer='{"other.json": "{}"}'),
    lambda h: h["__metadata__"].update(tokenizer="[" * 100_000),
])  # fmt: skip
def test_f5_a_token_file_that_is_not_one_is_one_error(tmp_path, change):
    path = tmp_path / "own.safetensors"
    own_file(path)
    assert len(open_data([path], None, 1).training) == 18
    own_file(path, change)
    with pytest.raises(CheckpointError) as error:
        open_data([path], None, 1)
    assert "own.safetensors" in one_line(error) and os.listdir(tmp_path) == ["own.safetensors"]


def test_f5_truncated_and_flipped_files(tmp_path):
    """Whatever is cut off or changed in an id: an error that names the file."""
    path, tokenizer = tmp_path / "own.safetensors", CharTokenizer("abc")
    write_tokens(path, [np.arange(30) % 3], tokenizer)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="own.safetensors"):
            open_data([path], tokenizer, 1)
    for at in range(len(whole) - 60, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match="own.safetensors"):
            open_data([path], tokenizer, 1)


def test_llm_c_and_nanogpt_sizes_are_checked(tmp_path):
    path = tmp_path / "x.bin"
    for wrong in (11, 9, 0, -1):
        llm_c(path, range(10), count=wrong)
        with pytest.raises(CheckpointError, match="size that its ids need"):
            open_data([path], BYTES, 1)
    path.write_bytes(bytes(33))
    with pytest.raises(CheckpointError, match="33 bytes for 16 ids of 2 bytes in .*x.bin.*expected 32 bytes"):
        open_data([path], BYTES, 1)


def test_a_file_cut_short_while_it_is_used_is_an_error_and_no_crash(tmp_path):
    path = tmp_path / "train.bin"
    np.zeros(1 << 16, "<u2").tofile(path)
    corpus = open_data([path], BYTES, 16)
    os.truncate(path, 100)
    with pytest.raises(CheckpointError, match="must not become shorter"):
        training_batch(corpus.training, 4, 16, seed=0, step=0)


@needs_linux
def test_memory_stays_small_beside_a_large_file(tmp_path):
    """150 MB of ids are opened, checked, hashed and trained from with less than 75 MB more than before."""
    path = tmp_path / "train.bin"
    with open(path, "wb") as file:
        for _ in range(75):
            file.write(bytes(2_000_000))
    code = (
        "import resource, sys; from cmha.text import ByteTokenizer; from cmha.text.corpora import open_data; "
        "from cmha.train.batches import training_batch as batch; "
        "top = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; before = top(); "
        "ids = open_data([sys.argv[1]], ByteTokenizer(), 64).training; "
        "[batch(ids, 8, 64, seed=0, step=n) for n in range(20)]; print(top() - before)"
    )
    grown = int(subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True).stdout)
    assert grown < 75_000  # KiB; 44,000 were measured


def test_a_word_that_names_no_kind_of_tokenizer_is_one_error():
    with pytest.raises(ValueError, match=r"\[train\] tokenizer must be char, byte, bpe.*; got 'words'"):
        open_data([], "words", 8)


def test_tokenize_refuses_before_it_writes(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.safetensors").write_bytes(b"mine")
    (tmp_path / "bad.txt").write_bytes(TEXT.encode() + b"\xff")
    before = sorted(os.listdir(tmp_path))
    for code, arguments in [
        (2, [text]), (2, [text, "--out", "x.bin"]), (2, [text, "--out", "x.safetensors", "--tokenizer", "bpe2"]),
        (2, ["--out", "x.safetensors"]), (1, [text, "--out", "there.safetensors"]),
        (1, ["bad.txt", "--out", "x.safetensors"]), (1, [text, "bad.txt", "--out", "x.safetensors"]),
        (1, ["missing", "--out", "x.safetensors"]),
        (1, ["bad.txt", "--out", "x.safetensors", "--tokenizer", "byte"]),
    ]:  # fmt: skip
        assert main(["tokenize", *map(str, arguments)]) == code
        assert capsys.readouterr().err.startswith("cmha: error: ")
        assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "there.safetensors").read_bytes() == b"mine"

"""Files cut, flipped and made by hand: a loader raises what is documented, at once, or gives the same model."""

import json
import struct
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cmha import GPT, BPETokenizer, CheckpointError, GPTConfig, cli
from cmha.files import HEADER_LIMIT, load_safetensors
from cmha.gpt.llmc import read_llmc
from cmha.text import load_tokenizer

from .checking import bits
from .test_convert import write_llmc
from .test_files import BAD_FILES, ENTRY, file_bytes
from .test_pretrained import shard

DOCUMENTED = (CheckpointError, OSError, MemoryError)


def weights(gpt):
    return bits(*(p.detach() for p in gpt.parameters()))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a model.safetensors of 2 kB, its weights, and room for damaged copies."""
    folder = tmp_path_factory.mktemp("small")
    gpt = GPT(GPTConfig(5, 4, 1, 1, 4))
    rng = np.random.default_rng(0)  # no bias is zero: a config that says there is none must not fit
    gpt.load_state_dict({name: rng.standard_normal(t.shape, np.float32) for name, t in gpt.state_dict().items()})
    gpt.save_pretrained(folder)
    assert 2000 < (folder / "model.safetensors").stat().st_size < 3000
    return folder, weights(gpt)


def outcome(folder):
    """The weights a folder gives, or None where it is refused as documented."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dropout rates that differ
        try:
            return weights(GPT.from_pretrained(folder))
        except DOCUMENTED as error:
            assert str(error) and "\n" not in str(error) and len(str(error)) < 2000
            return None


def damaged(path, data, folder, pieces):
    """For each piece in place of path's data: what comes out; path is whole again in the end."""
    try:
        for piece in pieces:
            path.write_bytes(piece)
            yield outcome(folder)
    finally:
        path.write_bytes(data)


def flips(data, numbers):
    for n in numbers:
        flipped = bytearray(data)
        flipped[n // 8] ^= 1 << n % 8
        yield bytes(flipped)


SAMPLE = [13, pytest.param(1, marks=pytest.mark.full)]  # every 13th, or all of them


@pytest.mark.parametrize("step", SAMPLE)
def test_f5_every_truncation_is_refused(step, small):
    folder, _ = small
    path = folder / "model.safetensors"
    data = path.read_bytes()
    assert set(damaged(path, data, folder, (data[:n] for n in range(0, len(data), step)))) == {None}
    assert set(damaged(path, data, folder, (data + b"\0" * n for n in (1, 7, 4096)))) == {None}


@pytest.mark.parametrize("step", SAMPLE)
def test_f5_every_header_bit_flip_is_refused_or_harmless(step, small):
    folder, whole = small
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    found = list(damaged(path, data, folder, flips(data, range(0, 8 * header, step))))
    assert set(found) <= {None, whole} and found.count(None) > 0.9 * len(found)


@pytest.mark.parametrize("step", SAMPLE)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_f6_a_damaged_json_is_refused_or_the_same_model(name, step, small, tmp_path):
    GPT.from_pretrained(small[0]).save_pretrained(tmp_path)
    shard(tmp_path)
    path, data = tmp_path / name, (tmp_path / name).read_bytes()
    pieces = [*flips(data, range(0, 8 * len(data), step)), *(data[:n] for n in range(0, len(data) - 2, step))]
    found = list(damaged(path, data, tmp_path, pieces))
    assert set(found) == {None, small[1]}


MORE_BAD_FILES = {
    **{f"offsets {value!r}": file_bytes({"a": {**ENTRY, "data_offsets": value}}, b"\0" * 8)
       for value in ([True, 8], [0.0, 8], ["0", "8"], [0], [0, 8, 8], {}, None, [-8, 0], [2**63, 2**64], [0, 2**62])},
    **{f"shape {value!r}": file_bytes({"a": {**ENTRY, "shape": value}}, b"\0" * 8)
       for value in ([2**63], [1, 1], [], {}, None, "2", [[2]], [None], [2, 2**61], [3], [0])},
    **{f"dtype {value!r}": file_bytes({"a": {**ENTRY, "dtype": value}}, b"\0" * 8)
       for value in ("", "f32", "F64", "F16", "\u20ac", 32, None, ["F32"], "F32" * 1000)},
    **{f"metadata {value!r}": file_bytes({"__metadata__": value}) for value in (None, [], "x", {"a": None}, {"a": {}})},
    "no dtype": file_bytes({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8),
    "entry null": file_bytes({"a": None}), "entry a number": file_bytes({"a": 3}),
    "100,000 tensors": file_bytes({str(i): {**ENTRY, "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}),
    "header above the limit": file_bytes(b"{" + b" " * HEADER_LIMIT + b"}"),
    "infinite": file_bytes(b'{"a": 1e999}'), "long number": file_bytes(b'{"a": ' + b"9" * 10_000 + b"}"),
    "deep objects": file_bytes(b'{"a":' * 50_000), "two headers": file_bytes(b"{}{}"), "nul": file_bytes(b"\0" * 16),
    "byte-order mark": file_bytes(b"\xef\xbb\xbf{}"), "utf-16": file_bytes("{}".encode("utf-16")),
    "a pickle": b"\x80\x04\x95" + b"\0" * 100, "a zip": b"PK\3\4" + b"\0" * 100, "text": b"hello world, a text",
}  # fmt: skip


@pytest.mark.parametrize("name", [*BAD_FILES, *MORE_BAD_FILES], ids=lambda name: name[:30])
def test_f5_bad_files_made_by_hand(name, small, tmp_path):
    """Refused through both readers, and without memory that the file does not justify."""
    data, path = (BAD_FILES | MORE_BAD_FILES)[name], tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_bytes((small[0] / "config.json").read_bytes())
    path.write_bytes(data)
    if len(data) < 2**20:  # it makes a header of 6 MB slow
        tracemalloc.start()
    try:
        for read, target in ((load_safetensors, path), (GPT.from_pretrained, tmp_path)):
            with pytest.raises(CheckpointError, match=r"^\[\w+\] .*model\.safetensors'") as error:
                read(target)
            assert "\n" not in str(error.value) and len(str(error.value)) < 600
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a/b", "../a", "\0", "x" * 1_000_000, "a\nb", "\u202e", "", "__metadata_"])
def test_f5_odd_names_are_unknown_tensors(name, small, tmp_path):
    (tmp_path / "config.json").write_bytes((small[0] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(file_bytes({name: ENTRY}, b"\0" * 8))
    assert outcome(tmp_path) is None
    with pytest.raises(CheckpointError, match="missing wte.weight"):
        GPT.from_pretrained(tmp_path)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.binary(max_size=300), st.booleans())
def test_f5_any_bytes(small, data, as_header):
    folder, _ = small
    path = folder / "model.safetensors"
    assert list(damaged(path, path.read_bytes(), folder, [file_bytes(data) if as_header else data])) == [None]


JSON = st.recursive(st.none() | st.booleans() | st.integers(-2, 2**64) | st.floats() | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3))


@settings(deadline=None, derandomize=True, max_examples=120)
@given(st.data())
def test_f6_any_value_at_any_place(small, data):
    """One value of config.json, of a tensor's entry, or all of it, is anything that JSON can say."""
    folder, whole = small
    name = data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    path = folder / name
    before = path.read_bytes()
    if name == "config.json":
        value = json.loads(before)
        value[data.draw(st.sampled_from(sorted(value)))] = data.draw(JSON)
        piece = json.dumps(value).encode()
    else:
        end = 8 + struct.unpack("<Q", before[:8])[0]
        value = json.loads(before[8:end])
        entry = value[data.draw(st.sampled_from(sorted(value)))]
        entry[data.draw(st.sampled_from(sorted(entry)))] = data.draw(JSON)
        piece = file_bytes(value, before[end:])
    assert set(damaged(path, before, folder, [piece])) <= {None, whole}


@pytest.mark.parametrize("step", SAMPLE)
def test_f6_damaged_tokenizers_are_refused_or_usable(step, tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra bpe")
    BPETokenizer.train("the cat sat on the mat", 262).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.dumps(json.loads(path.read_text(encoding="utf-8"))).encode()
    pieces = [*flips(data, range(0, 8 * len(data), 7 * step)), *(data[:n] for n in range(0, len(data), 3 * step))]
    refused = 0
    for piece in pieces:
        path.write_bytes(piece)
        try:
            tokenizer = load_tokenizer(tmp_path)
            tokenizer.decode(range(tokenizer.vocab_size))
        except ValueError as error:  # an id the vocabulary leaves out is one
            assert str(error).startswith("[") and "\n" not in str(error)
            refused += 1
    assert 0 < refused < len(pieces)


@pytest.mark.parametrize("step", SAMPLE)
def test_f5_damaged_llmc_files(step, tmp_path):
    path = tmp_path / "model.bin"
    write_llmc(path, GPT(GPTConfig(5, 4, 1, 1, 4)))
    data = path.read_bytes()
    pieces = [*flips(data, range(0, 8 * 32, 1)), *(data[:n] for n in range(0, len(data), 3 * step))]
    for piece in pieces:
        path.write_bytes(piece)
        try:
            read_llmc(path)  # a flip in an unpadded vocabulary may only move the padding
        except CheckpointError as error:
            assert str(error).startswith("[convert] ") and "model.bin" in str(error)


def test_a_bad_folder_is_one_line_in_the_command(small, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((small[0] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 9)
    assert cli.main(["trace", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("cmha: error: [load] ") and err.count("\n") == 1

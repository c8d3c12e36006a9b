"""Atomic writing and strict reading."""

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file

from cmha.errors import CheckpointError, check_integer, check_number, listed, message, quote
from cmha.files import load_safetensors, read_metadata, save_safetensors, write_atomically, write_text

from .checking import needs_posix


def sample():
    rng = np.random.default_rng(5)
    tensors = {"b": rng.normal(size=(2, 3)), "a": rng.normal(size=7), "empty": np.zeros((0, 3)), "one": np.array(2.5)}
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def file_bytes(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_safetensors_round_trip_and_equal_bytes(tmp_path):
    metadata = {key: key for key in "zyxwvut"}
    save_safetensors(tmp_path / "one", sample(), metadata)
    save_safetensors(tmp_path / "two", dict(reversed(sample().items())), dict(reversed(metadata.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    for loaded in (load_safetensors(tmp_path / "one"), load_file(tmp_path / "one")):
        assert loaded.keys() == sample().keys()
        assert all(loaded[name].tobytes() == array.tobytes() for name, array in sample().items())
        assert all(loaded[name].shape == array.shape for name, array in sample().items())
    assert read_metadata(tmp_path / "one") == metadata
    save_safetensors(tmp_path / "three", {})
    assert read_metadata(tmp_path / "three") == {} and load_safetensors(tmp_path / "three") == {}


def test_b71_strided_arrays_are_saved_by_value(tmp_path):
    x = np.array([[1, 2], [3, 4]], np.float32)
    special = np.array([0x80000000, 0x7F800000, 0x7FC00001, 0xFF800000], np.uint32).view(np.float32)
    arrays = {
        "t": x.T, "slice": np.arange(16, dtype=np.float32).reshape(2, 8)[:, ::2], "fortran": np.asfortranarray(x),
        "expand": np.broadcast_to(np.float32([1, 2]), (4, 2)), "reverse": x[::-1], "special": special,
        "big-endian": x.astype(">f4"),
    }  # fmt: skip
    save_safetensors(tmp_path / "x", arrays)
    for name, array in load_safetensors(tmp_path / "x").items():
        assert array.tobytes() == np.ascontiguousarray(arrays[name].astype("<f4")).tobytes(), name
    with pytest.raises(TypeError, match="float32"):
        save_safetensors(tmp_path / "y", {"x": np.zeros(3)})
    assert os.listdir(tmp_path) == ["x"]


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD_FILES = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "length 0": struct.pack("<Q", 0),
    "length max": b"\xff" * 8,
    "length 2^40": struct.pack("<Q", 2**40),
    "length one too many": file_bytes(b"{}", length=3),
    "length over the limit": struct.pack("<Q", 100_000_001) + b"{}",
    "array": file_bytes(b"[]"),
    "null": file_bytes(b"null"),
    "half": file_bytes(b"{"),
    "not utf-8": file_bytes(b'{"\xff": 1}'),
    "deep": file_bytes(b"[" * 100_000),
    "nan": file_bytes(b'{"a": NaN}'),
    "same name twice": file_bytes(b'{"a": %b, "a": %b}' % ((json.dumps(ENTRY).encode(),) * 2), b"\0" * 8),
    "entry is a list": file_bytes({"a": []}),
    "shape of floats": file_bytes({"a": {**ENTRY, "shape": [2.0]}}, b"\0" * 8),
    "shape of bools": file_bytes({"a": {**ENTRY, "shape": [True]}}, b"\0" * 8),
    "shape of text": file_bytes({"a": {**ENTRY, "shape": ["2"]}}, b"\0" * 8),
    "negative shape": file_bytes({"a": {**ENTRY, "shape": [-2]}}, b"\0" * 8),
    "rank 9": file_bytes({"a": {**ENTRY, "shape": [1] * 8 + [2]}}, b"\0" * 8),
    "product wraps": file_bytes({"a": {**ENTRY, "shape": [2**62, 2**62, 4]}}, b"\0" * 8),
    "reversed offsets": file_bytes({"a": {**ENTRY, "data_offsets": [8, 0]}}, b"\0" * 8),
    "past the end": file_bytes({"a": {**ENTRY, "data_offsets": [0, 8]}}, b"\0" * 7),
    "trailing bytes": file_bytes({"a": ENTRY}, b"\0" * 9),
    "overlap": file_bytes({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, b"\0" * 12),
    "gap": file_bytes({"a": ENTRY, "b": {**ENTRY, "data_offsets": [12, 20]}}, b"\0" * 20),
    "unknown dtype": file_bytes({"a": {**ENTRY, "dtype": "F33"}}, b"\0" * 8),
    "extra key": file_bytes({"a": {**ENTRY, "x": 1}}, b"\0" * 8),
    "metadata of numbers": file_bytes({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_b69_bad_file_is_one_error_that_names_it(name, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD_FILES[name])
    with pytest.raises(CheckpointError) as error:
        load_safetensors(path)
    text = str(error.value)
    assert text.startswith("[load] ") and "bad.safetensors" in text and "\n" not in text and len(text) < 400


def test_every_truncation_is_refused(tmp_path):
    save_safetensors(tmp_path / "whole", sample())
    data, path = (tmp_path / "whole").read_bytes(), tmp_path / "cut"
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(CheckpointError):
            load_safetensors(path)


def test_every_header_bit_flip_is_refused_or_harmless(tmp_path):
    save_safetensors(tmp_path / "whole", {"a": np.arange(3, dtype=np.float32)}, {"k": "v"})
    data, path = (tmp_path / "whole").read_bytes(), tmp_path / "flipped"
    for bit in range((len(data) - 12) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            load_safetensors(path)
        except CheckpointError:
            pass


def test_missing_file_stays_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_safetensors(tmp_path / "none")
    with pytest.raises(FileNotFoundError) as error:
        write_text(tmp_path / "no" / "folder", "x")
    assert error.value.filename == str(tmp_path / "no" / "folder")


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("x")])
def test_a_failed_write_leaves_the_old_file_and_no_temp(failure, tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")

    def write(file):
        file.write(b"half")
        raise failure

    with pytest.raises(type(failure)) as error:
        write_atomically(path, write)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    if isinstance(failure, OSError):
        assert error.value.filename == str(path)


def test_lost_bytes_are_noticed(tmp_path, monkeypatch):
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result([*real(fd)[:6], 1, *real(fd)[7:]]))
    with pytest.raises(OSError, match="kept 1 of 3 bytes"):
        write_text(tmp_path / "file", "abc")
    assert os.listdir(tmp_path) == []


def test_the_order_is_write_sync_rename_sync(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name: (calls.append(name), real(*a)))
    write_text(tmp_path / "file", "abc")
    assert calls == ["fsync", "replace", "fsync"]


@needs_posix
def test_targets_of_every_kind(tmp_path):
    (tmp_path / "sub").mkdir()
    with pytest.raises(OSError):
        write_text(tmp_path / "sub", "x")
    long = "\u00e9" * 127 + "x"  # 255 bytes
    write_text(tmp_path / long, "long")
    assert (tmp_path / long).read_text() == "long"
    (tmp_path / "link").symlink_to(tmp_path / "sub" / "real")
    write_text(tmp_path / "link", "through")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "sub" / "real").read_text() == "through"
    leftover = tmp_path / f".name.tmp-{os.getpid()}"
    leftover.write_text("a killed process had our number")
    write_text(tmp_path / "name", "new")
    assert (tmp_path / "name").read_text() == "new"
    assert not [name for name in os.listdir(tmp_path) + os.listdir(tmp_path / "sub") if "tmp" in name]


def test_message_form():
    assert message("op", "rule") == "[op] rule"
    assert message("op", "rule", "3", "4", "Try 4") == "[op] rule; got 3, expected 4. Try 4"
    assert len(quote("x" * 1000)) == 80 and "\n" not in quote("a\nb")
    assert listed("abc") == "a, b, c" and listed(map(str, range(12))).endswith("9 and 2 more")


def test_checked_numbers():
    assert check_integer("op", "n", np.int32(3), 0, 5) == 3
    for bad in (-1, 6, 2.5, float("nan"), np.float64(2)):
        with pytest.raises(ValueError, match="from 0 to 5"):
            check_integer("op", "n", bad, 0, 5)
    for bad in (True, "3", None, [1]):
        with pytest.raises(TypeError, match="n must be an integer"):
            check_integer("op", "n", bad)
    assert check_number("op", "p", 1, lambda x: x > 0, "positive") == 1.0
    for bad in (0.0, float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="p must be positive"):
            check_number("op", "p", bad, lambda x: x > 0, "positive")
    for bad in (True, "3", None, 1j):
        with pytest.raises(TypeError):
            check_number("op", "p", bad, lambda x: x > 0, "positive")

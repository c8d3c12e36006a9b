"""Log-probabilities of a text, in windows where it is longer than the context."""

import sys

import numpy as np
import pytest

import cmha

from . import reference
from .checking import array, same_bits
from .models import ids, tiny, weights64


def test_score_is_the_float64_log_softmax():
    gpt, text = tiny(), ids(1, 8)
    expected = reference.log_softmax(reference.gpt(weights64(gpt), text, 2, 2))[0]
    found = gpt.score(text[0])
    assert found.shape == (7,) and found.dtype == np.float32
    np.testing.assert_allclose(found, expected[np.arange(7), text[0, 1:]], rtol=1e-5, atol=1e-5)
    _, loss = gpt(text[:, :-1], text[:, 1:])
    assert abs(-found.mean(dtype=np.float64) - loss.item()) < 1e-6


@pytest.mark.parametrize("stride", [1, 2, 4, 5, 8, None])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 10, 21])
def test_a_long_text_is_read_in_windows(length, stride):
    """Each id from the first window that has it."""
    gpt, text = tiny(), ids(length, seed=length)
    step, expected, start = stride or 4, [], 0
    while len(expected) < length - 1:
        with cmha.no_grad():
            logits = gpt(text[None, start : start + 8]).log_softmax(-1)
        new = [array(logits)[0, t - 1 - start, text[t]] for t in range(len(expected) + 1, min(start + 9, length))]
        expected, start = expected + new, start + step
    same_bits(gpt.score(text, stride=stride), np.array(expected, np.float32))


def test_chunks_change_no_bit(monkeypatch):
    gpt, text = tiny(), ids(21)
    whole = gpt.score(text, stride=3)
    for chunk in (1, 3, 5):
        monkeypatch.setattr(sys.modules["cmha.generate.score"], "CHUNK", chunk)
        same_bits(gpt.score(text, stride=3), whole)


def test_rows_lists_and_tensors():
    gpt, text = tiny(), ids(3, 6)
    rows = gpt.score(text)
    assert rows.shape == (3, 5)
    for i in range(3):
        same_bits(rows[i], gpt.score(text[i].tolist()))
    ragged = gpt.score([[1, 2, 3], [4], [5, 6]])
    assert [len(row) for row in ragged] == [2, 0, 1]
    same_bits(ragged[0], gpt.score(cmha.tensor([1, 2, 3])))
    gpt.train()
    gpt.dropout.p = 0.5
    same_bits(gpt.score([1, 2, 3]), ragged[0])
    assert gpt.training


@pytest.mark.parametrize("bad", [[], [[]], [1, 11], [-1], [0.5, 1.0], "text", 3])
def test_what_is_no_text_is_refused(bad):
    with pytest.raises((ValueError, TypeError), match=r"^\[generate\] ids must be "):
        tiny().score(bad)


@pytest.mark.parametrize("stride", [0, 9, 1.5, True])
def test_stride_out_of_range(stride):
    with pytest.raises((ValueError, TypeError), match=r"^\[score\] stride must be an integer from 1 to 8; got "):
        tiny().score([1, 2], stride=stride)

"""Every refused call: the right type, one line of the agreed form with the shapes in it, and nothing changed."""

import re

import numpy as np
import pytest

import cmha
from cmha import nn

from .checking import array, bits
from .refused import REFUSED, material

FORM = re.compile(r"\[[\w .]+\] [^A-Z\n][^\n]*; got [^\n]+")


def samples(tensors):
    return {name: (bits(t), t.shape, t.requires_grad) for name, t in tensors.items()}


@pytest.mark.parametrize("sample", [pytest.param(r, id=r.op) for r in REFUSED])
def test_refusal(sample):
    tensors, threads = material(), cmha.get_num_threads()
    before = samples(tensors)
    with pytest.raises(sample.error) as caught:
        sample.call(tensors)
    text = str(caught.value)
    assert not isinstance(caught.value, AssertionError)
    if not isinstance(caught.value, MemoryError):
        assert FORM.fullmatch(text), f"not of the form '[op] rule; got ...': {text}"
    assert len(text) <= 300 and "\n" not in text
    for word in sample.words:
        assert word in text, f"{word!r} is not in: {text}"
    assert samples(tensors) == before and tensors["g"].grad is None
    assert cmha.get_num_threads() == threads


def test_outside_text_is_quoted_and_cut():
    """A value from outside cannot fill the log or start a line of its own."""
    with pytest.raises((TypeError, ValueError)) as caught:
        cmha.tensor("line\nbreak" * 1000)
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


def test_ten_faults_are_listed_together():
    """Everything wrong with a dict of weights is named in one message."""
    layer = nn.MultiHeadAttention(8, 2)
    before = bits(*(p.detach() for p in layer.parameters()))
    weights = {name: array(t) for name, t in layer.state_dict().items()}
    del weights["c_q.weight"]
    weights["c_k.bias"] = np.zeros(9, dtype=np.float32)
    weights["c_x.bias"] = np.zeros(8, dtype=np.float32)
    with pytest.raises(ValueError) as caught:
        layer.load_state_dict(weights)
    for word in ("c_q.weight", "c_k.bias", "c_x.bias"):
        assert word in str(caught.value)
    assert bits(*(p.detach() for p in layer.parameters())) == before


def test_memory_error_names_size_and_shape():
    """B13's neighbour: a size that cannot be had is an error with its shape, not a crash or a small block."""
    with pytest.raises((MemoryError, ValueError), match=r"\(1048576, 1048576, 64\)"):
        cmha.zeros((2**20, 2**20, 64))


def test_item_assignment_is_refused():
    x = cmha.tensor([1.0, 2.0])
    with pytest.raises(TypeError):
        x[0] = 5.0
    before = x
    x += 1                                              # makes a new tensor
    assert before.tolist() == [1, 2] and x.tolist() == [2, 3]

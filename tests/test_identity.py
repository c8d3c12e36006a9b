"""The same bits: any number of threads, alone or in a batch, any alignment, every instruction set, every run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cmha
from cmha import _core, no_grad
from cmha.tensor import make

from . import digests
from .cases import op
from .checking import array, bits, gradients, leaf, same_bits
from .models import ids, tiny

ROOT = Path(__file__).resolve().parent.parent


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- threads (D2) ---------------------------------------------------------------------------------------------------

def test_training_with_1_2_3_4_threads():
    """Wide enough that matmul, softmax and the sums go to all threads."""
    found = set()
    for n in (1, 2, 3, 4):
        cmha.set_num_threads(n)
        found.add(digests.train(3, vocab_size=1031, block_size=32, n_embd=96))
    assert len(found) == 1


@pytest.mark.parametrize("n", [2, 3, 4])
def test_kernels_with_more_threads(n):
    """Small work stays on one thread; the committed digests hold whatever was asked for."""
    committed = json.loads(digests.FILE.read_text(encoding="utf-8"))
    cmha.set_num_threads(n)
    for name in ("attention_forward", "attention_backward", "matmul", "layer_norm_backward", "embedding_backward"):
        assert digests.digest(digests.KERNELS[name]()) == committed[name]


def test_two_runs_of_20_steps():
    """D1, D6."""
    assert digests.train(20) == digests.train(20)


# --- fusion ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows, n_in, n_out", [(1, 401, 37), (3, 5, 1), (7, 0, 5), (131, 65, 33)])
@pytest.mark.parametrize("bias", [True, False])
def test_what_follows_a_product_changes_no_bit(rows, n_in, n_out, bias):
    shapes = [(rows, n_in), (n_in, n_out), (n_out,)][: 3 if bias else 2]
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    residual, dy = normal(rows, n_out, seed=8), normal(rows, n_out, seed=9)
    linear, with_gelu, with_residual = (op("linear", n) for n in ("linear", "linear_gelu", "linear_residual"))
    pairs = [(lambda *x: make(with_gelu, *x), lambda *x: make(linear, *x).gelu(), inputs),
             (lambda *x: make(with_residual, *x), lambda r, *x: r + make(linear, *x), [residual, *inputs])]  # fmt: skip
    for fused, single, arguments in pairs:
        same_bits(fused(*map(leaf, arguments)), single(*map(leaf, arguments)))
        both = (gradients(call, [leaf(a) for a in arguments], dy) for call in (fused, single))
        for one, two in zip(*both, strict=True):
            same_bits(one, two)


# --- batches (D3) ---------------------------------------------------------------------------------------------------

def with_constants(name, *shapes):
    constants = [cmha.tensor(normal(*s, seed=i + 1)) for i, s in enumerate(shapes)]
    return lambda x: make(op(name), x, *constants)


BATCHED = {
    "linear": (with_constants("linear", (37, 67), (67,)), (37,)),
    "matmul": (lambda x: x @ cmha.tensor(normal(401, 19, seed=1)), (5, 401)),
    "softmax": (lambda x: x.softmax(), (1037,)),
    "layer_norm": (with_constants("layer_norm", (67,), (67,)), (67,)),
    "gelu": (lambda x: x.gelu(), (37,)),
    "attention": (lambda x: cmha.scaled_dot_product_attention(x, x, x, is_causal=True), (2, 37, 16)),
}


@pytest.mark.parametrize("name", BATCHED)
def test_a_row_does_not_see_its_neighbours(name):
    """Value and gradient of row i of a batch of 1 .. 9, in any position, are those of the row alone."""
    call, shape = BATCHED[name]
    x, dy = normal(9, *shape), None
    alone = []
    for i in range(9):
        t = leaf(x[i:i + 1])
        y = call(t)
        dy = normal(9, *y.shape[1:], seed=5) if dy is None else dy
        alone.append((array(y)[0], array(gradients(call, [leaf(x[i:i + 1])], dy[i:i + 1])[0])[0]))
    for rows in [list(range(n)) for n in range(2, 10)] + [[4, 2, 7], [8, 8, 1, 0]]:
        y, g = call(leaf(x[rows])), gradients(call, [leaf(x[rows])], dy[rows])[0]
        for place, i in enumerate(rows):
            same_bits(array(y)[place], alone[i][0])
            same_bits(array(g)[place], alone[i][1])


def test_a_sequence_does_not_see_its_neighbours():
    gpt, tokens = tiny(n_embd=64, n_head=4, block_size=32), ids(9, 32)
    with no_grad():
        alone = [array(gpt(tokens[i:i + 1]))[0] for i in range(9)]
        for rows in [[0, 1], [3, 2, 1], list(range(9))]:
            together = array(gpt(tokens[rows]))
            for place, i in enumerate(rows):
                same_bits(together[place], alone[i])


def test_alignment_changes_no_bit():
    """D4: inputs that start 0 .. 15 floats into a larger buffer."""
    a, b = normal(7, 401), normal(401, 33, seed=1)
    found = set()
    for shift in range(16):
        x, w = (cmha.tensor(np.concatenate([np.zeros(shift, np.float32), m.ravel()]))[shift:].reshape(m.shape)
                for m in (a, b))
        y = x @ w
        found.add(bits(y, x.softmax(), y.gelu(), x.sum(axis=1), x.sum(axis=0)))
    assert len(found) == 1


# --- instruction sets (D9) ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("variant", ["base", "avx2", "avx512", "neon"])
def test_every_instruction_set(variant):
    """Kernels at small sizes and three training steps in a process of their own; base is slow, and that is its use."""
    if not _core.has_variant(variant):
        pytest.skip(f"this processor or this build has no {variant}")
    committed = json.loads(digests.FILE.read_text(encoding="utf-8"))
    env = os.environ | {"CMHA_SIMD": variant}
    run = subprocess.run([sys.executable, "-m", "tests.digests", "--train"], cwd=ROOT, env=env, capture_output=True,
                         text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found.pop("train") == digests.train()
    assert [n for n in committed if found[n] != committed[n]] == []


def test_an_unknown_instruction_set_is_refused():
    run = subprocess.run([sys.executable, "-c", "import cmha"], cwd=ROOT, env=os.environ | {"CMHA_SIMD": "sse9"},
                         capture_output=True, text=True, timeout=60)
    assert run.returncode != 0 and "sse9" in run.stderr

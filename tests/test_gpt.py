"""The model: GPT-2's formula, its sizes, its initialisation, its weights on disk."""

import json

import numpy as np
import pytest

import cmha
from cmha import GPT, GPTConfig, no_grad

from . import reference
from .checking import EPS, array, bits, check, leaf, same_bits
from .models import ids, tiny, weights64

# --- values ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 32},
                                     {"n_head": 1}, {"output_projection": False}], ids=str)
def test_logits_against_float64(changes):
    """N8: max |error| <= 16 EPS sqrt(L) max |logit|, and the largest logit in the same place."""
    gpt = tiny(**changes)
    tokens = ids(3, gpt.cfg.block_size)
    with no_grad():
        got = array(gpt(tokens))
    expected = reference.gpt(weights64(gpt), tokens, gpt.cfg.n_layer, gpt.cfg.n_head)
    size = np.sqrt(gpt.cfg.n_layer) * abs(expected).max()
    check(got, expected, size, 16)
    top = np.sort(expected, axis=-1)
    clear = top[..., -1] - top[..., -2] > 2 * 16 * EPS * size
    assert (got.argmax(-1) == expected.argmax(-1))[clear].all() and clear.mean() > 0.9


def test_loss_and_its_gradients_against_float64():
    """G2: every parameter, the tied one with both its uses, along 32 random directions of all of them together."""
    gpt, tokens, targets = tiny(), ids(2, 8), ids(2, 8, seed=1)
    targets[0, :3] = -1
    logits, loss = gpt(tokens, targets)
    w = weights64(gpt)
    assert abs(loss.item() - reference.gpt_loss(w, tokens, targets, 2, 2)) < 1e-5
    assert logits.shape == (2, 8, 11)
    loss.backward()
    gradient = {name: array(p.grad).astype(np.float64) for name, p in gpt.named_parameters()}
    check_model_gradient(w, gradient, tokens, targets)


def check_model_gradient(w, gradient, tokens, targets, n=32, h=1e-5):
    rng = np.random.default_rng(3)
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    for _ in range(n):
        v = {name: rng.standard_normal(g.shape) for name, g in gradient.items()}
        plus, minus = (reference.gpt_loss({name: w[name] + s * h * v[name] for name in v}, tokens, targets, 2, 2)
                       for s in (1, -1))
        got = sum((gradient[name] * v[name]).sum() for name in v)
        size = np.sqrt(sum((x**2).sum() for x in v.values()))
        assert abs(got - (plus - minus) / (2 * h)) <= 1e-5 * norm * size


def test_future_tokens_change_nothing():
    """N9 causality, at every position, bit for bit."""
    gpt, tokens = tiny(), ids(2, 8)
    with no_grad():
        full = array(gpt(tokens))
        for t in range(1, 8):
            other = tokens.copy()
            other[:, t:] = (other[:, t:] + 1) % 11
            same_bits(array(gpt(other))[:, :t], full[:, :t])
            same_bits(gpt(tokens[:, :t]), full[:, :t])


def test_gelu_is_the_tanh_form():
    """B45."""
    x = cmha.tensor([1.0, -3.0, 2.5, 3.0])
    assert np.abs(array(x.gelu()) - [0.84119199, -0.00363739, 2.48491573, 2.99636261]).max() < 5e-7
    far = array(cmha.tensor([20.0, -20.0, 1e4, -1e4, 1e13, -1e13]).gelu())
    assert far.tolist() == array(cmha.tensor([20.0, 0.0, 1e4, 0.0, 1e13, 0.0])).tolist()
    x = leaf(np.array([1e13, -1e13, 0], np.float32))
    x.gelu().sum().backward()
    assert x.grad.tolist() == [1, 0, 0.5]


def test_a_step_from_the_step_by_step_path_and_back():
    """mha.fused changes bits, not values."""
    gpt, tokens = tiny(), ids(2, 8)
    with no_grad():
        fused = array(gpt(tokens))
        for block in gpt.h:
            block.attn.fused = False
        steps = array(gpt(tokens))
    check(steps, fused.astype(np.float64), abs(fused).max(), 64)


# --- sizes and starting values --------------------------------------------------------------------------------------

def count(config):
    """GPT-2's parameters by hand: embeddings, L blocks of 12 D^2 + 13 D, the final norm."""
    D = config.n_embd
    return (config.vocab_size + config.block_size) * D + config.n_layer * (12 * D * D + 13 * D) + 2 * D


def test_parameter_counts():
    """B46: the tied table counts once."""
    assert GPT(GPTConfig(5, 4, 1, 1, 4)).num_parameters() == 288
    config = GPTConfig.gpt2()
    assert (config.vocab_size, config.block_size) == (50257, 1024)
    assert (config.n_layer, config.n_head, config.n_embd) == (12, 12, 768)
    assert count(config) == 124_439_808
    config = GPTConfig.gpt2_medium()
    assert (config.n_layer, config.n_head, config.n_embd) == (24, 16, 1024) and count(config) == 354_823_168
    config = GPTConfig.tiny()
    assert (config.n_embd, config.n_head, config.block_size, config.n_layer, config.vocab_size) == (64, 4, 32, 2, 65)
    gpt = GPT(config)
    assert gpt.num_parameters() == count(config) == sum(p.size for p in gpt.parameters())
    for preset in (GPTConfig.char, GPTConfig.baby):
        config = preset()
        assert config.n_embd % config.n_head == 0


def test_the_tied_table():
    """B46: one parameter, its gradient the sum of both uses, still one after a step and after load."""
    gpt = GPT(GPTConfig(5, 4, 1, 1, 4))
    tables = [p for p in gpt.parameters() if p.shape == (5, 4)]
    assert len(tables) == 1
    opt = cmha.AdamW(gpt.parameters(), lr=0.1)
    for _ in range(2):
        _, loss = gpt(ids(1, 4, vocab_size=5), ids(1, 4, vocab_size=5, seed=1))
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert len([p for p in gpt.parameters() if p.shape == (5, 4)]) == 1
    with no_grad():
        check(gpt(ids(1, 4, vocab_size=5)), reference.gpt(weights64(gpt), ids(1, 4, vocab_size=5), 1, 1), 10, 16)


def test_initial_values_are_gpt2s():
    """Normal 0.02; residual projections 0.02 / sqrt(2 L); biases 0, gains 1; the first loss about ln V."""
    cmha.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=65, block_size=32, n_layer=3, n_head=4, n_embd=64))
    for name, p in gpt.named_parameters():
        a = array(p)
        if name.endswith("bias"):
            assert (a == 0).all(), name
        elif a.ndim == 1:
            assert (a == 1).all(), name
        else:
            wanted = 0.02 / np.sqrt(6) if name.endswith("c_proj.weight") else 0.02
            assert abs(a.std() / wanted - 1) < 0.08 and abs(a.mean()) < 5 * wanted / np.sqrt(a.size), name
    tokens = ids(4, 32, vocab_size=65)
    _, loss = gpt(tokens, ids(4, 32, vocab_size=65, seed=1))
    assert abs(loss.item() - np.log(65)) < 0.1
    cmha.manual_seed(0)
    again = GPT(gpt.cfg)
    assert bits(*(p.detach() for p in again.parameters())) == bits(*(p.detach() for p in gpt.parameters()))


def test_dropout_in_training_only():
    gpt, plain = tiny(dropout=0.5), tiny()
    tokens = ids(2, 8)
    with no_grad():
        same_bits(gpt(tokens), plain(tokens))
        gpt.train()
        assert bits(gpt(tokens)) != bits(gpt(tokens)) and bits(gpt(tokens)) != bits(plain(tokens))


# --- ids, context ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [lambda a: a, lambda a: a.tolist(), cmha.tensor, lambda a: a.astype(np.int32),
                                  lambda a: np.asfortranarray(a), lambda a: a.astype(np.uint8)],
                         ids=["int64", "lists", "Tensor", "int32", "fortran", "uint8"])
def test_ids_of_every_kind(make):
    gpt, tokens = tiny(), ids(2, 5)
    with no_grad():
        expected, _ = gpt(tokens, tokens)
        same_bits(gpt(make(tokens)), expected)
        same_bits(gpt(make(tokens), make(tokens))[0], expected)


BAD_IDS = {
    "too large": (np.full((1, 3), 11), (IndexError, ValueError), "11"),
    "negative": (np.full((1, 3), -1), (IndexError, ValueError), "-1"),
    "floats": (np.zeros((1, 3)), TypeError, "float"), "bools": (np.zeros((1, 3), bool), TypeError, "bool"),
    "too long": (np.zeros((1, 9), int), ValueError, "9"), "one axis": (np.zeros(3, int), ValueError, "(3,)"),
    "three axes": (np.zeros((1, 3, 1), int), ValueError, "(1, 3, 1)"), "text": ("abc", (TypeError, ValueError), ""),
    "beyond int64": (np.full((1, 2), 2**63, np.uint64), (IndexError, ValueError), "9223372036854775808"),
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_refused_ids(name):
    gpt, (bad, error, word) = tiny(), BAD_IDS[name]
    with pytest.raises(error, match=r"^\[[\w .]+\] .*; got ") as caught:
        gpt(bad)
    assert word in str(caught.value) and len(str(caught.value)) <= 300


@pytest.mark.parametrize("targets", [ids(2, 4), ids(1, 5), np.full((2, 5), 11), np.full((2, 5), -2), np.zeros((2, 5))])
def test_refused_targets(targets):
    with pytest.raises((ValueError, IndexError, TypeError), match=r"^\[[\w .]+\] .*; got "):
        tiny()(ids(2, 5), targets)


def test_ignored_targets_count_for_nothing():
    """B35."""
    logits = leaf(np.zeros((2, 2), np.float32))
    loss = cmha.cross_entropy(logits, cmha.tensor([0, -1]))
    assert abs(loss.item() - 0.6931472) < 1e-6
    loss.backward()
    assert logits.grad.tolist() == [[-0.5, 0.5], [0, 0]]
    logits = leaf(np.zeros((2, 2), np.float32))
    loss = cmha.cross_entropy(logits, cmha.tensor([-1, -1]))
    loss.backward()
    assert loss.item() == 0 and logits.grad.tolist() == [[0, 0], [0, 0]]


def test_crop_block_size():
    gpt, tokens = tiny(), ids(1, 5)
    with no_grad():
        before = array(gpt(tokens))
        gpt.crop_block_size(5)
        same_bits(gpt(tokens), before)
    assert gpt.cfg.block_size == 5
    with pytest.raises(ValueError):
        gpt(ids(1, 6))
    for bad in (6, 0, -1):
        with pytest.raises(ValueError):
            gpt.crop_block_size(bad)


# --- on disk --------------------------------------------------------------------------------------------------------

def test_saved_and_loaded(tmp_path):
    gpt, tokens = tiny(), ids(2, 8)
    gpt.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "gpt2" and (config["n_embd"], config["n_head"], config["n_layer"]) == (12, 2, 2)
    assert config["activation_function"] == "gelu_new"
    again = GPT.from_pretrained(tmp_path / "model")
    assert not again.training
    with no_grad():
        same_bits(again(tokens), gpt(tokens))
    assert again.num_parameters() == gpt.num_parameters()
    assert not [p for p in tmp_path.rglob("*") if "tmp" in p.name]


def test_hugging_face_names_and_layouts(tmp_path):
    """B74: c_attn joined in the order q, k, v; Conv1D weights (in, out); a square c_proj is not transposed."""
    from safetensors.numpy import load_file, save_file

    gpt, tokens = tiny(), ids(2, 8)
    gpt.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {name.removeprefix("transformer."): a for name, a in tensors.items()}
    w = {name: array(t) for name, t in gpt.state_dict().items()}
    joined = np.concatenate([w[f"h.0.attn.c_{p}.weight"] for p in "qkv"], axis=1)
    same_bits(plain["h.0.attn.c_attn.weight"], joined)
    same_bits(plain["h.1.attn.c_proj.weight"], w["h.1.attn.c_proj.weight"])
    assert plain["h.0.mlp.c_fc.weight"].shape == (12, 48) and plain["wte.weight"].shape == (11, 12)
    for prefix in ("", "transformer."):
        renamed = {prefix + name: a for name, a in plain.items() if name != "lm_head.weight"}
        save_file(renamed, tmp_path / "model.safetensors")
        with no_grad():
            same_bits(GPT.from_pretrained(tmp_path)(tokens), gpt(tokens))


def test_refused_targets_leave_the_cache_as_it_was():
    gpt = GPT(GPTConfig(7, 5, 1, 1, 4))
    cache = gpt.new_cache(1)
    with pytest.raises(IndexError):
        gpt([[1, 2]], [[1, 9]], cache=cache)
    assert len(cache) == 0
    logits, loss = gpt([[1, 2]], [[1, 6]], cache=cache)
    assert len(cache) == 2 and logits.shape == (1, 2, 7) and loss.shape == ()

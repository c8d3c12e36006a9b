"""cmha.trace: every named intermediate of a real pass, with shape, strides, storage, bytes and time."""

import numpy as np
import pytest

import cmha
from cmha import MultiHeadAttention
from cmha.autograd import watch
from cmha.see import eight_steps
from cmha.see.memory import movement
from cmha.see.memory_picture import memory_picture

from . import reference
from .checking import array, check, same_bits
from .models import ids, is_clean, tiny
from .test_attention import make, normal

INSIDE = ["q", "k", "v", "q_heads", "k_heads", "v_heads", "scores", "masked_scores", "weights", "y_heads", "merged"]


def traced(model, *args, **options):
    with cmha.trace(model) as t:
        y = model(*args, **options)
    return t, y


def test_a_bare_attention_has_the_words_of_the_lesson():
    mha, x = make(), cmha.tensor(normal(2, 5, 12))
    t, y = traced(mha, x, is_causal=True)
    assert list(t) == ["c_q", "c_k", "c_v", *INSIDE, "c_proj", "y"] and len(t) == len(list(t))
    assert np.array_equal(t["y"].numpy(), array(y))
    q, k = (array(layer(x)).astype(np.float64) for layer in (mha.c_q, mha.c_k))
    q, k = reference.split_heads(q, 3), reference.split_heads(k, 3)
    check(t["q_heads"].numpy(), q, abs(q) + 1, 4)
    check(t["scores"].numpy(), q @ k.swapaxes(1, 2) / 2, abs(q) @ abs(k).swapaxes(1, 2) + 1, 8)
    shown = np.tril(np.ones((5, 5), bool))
    assert (t["masked_scores"].numpy()[:, ~shown] == -np.inf).all()
    assert np.array_equal(t["masked_scores"].numpy()[:, shown], t["scores"].numpy()[:, shown])
    assert np.abs(t["weights"].numpy().sum(axis=-1) - 1).max() < 1e-6
    same_bits(np.array(t["merged"]), reference.merge_heads(t["y_heads"].numpy(), 3))


def test_without_a_mask_there_are_no_masked_scores_and_dropped_weights_only_with_dropout():
    x = cmha.tensor(normal(2, 5, 12))
    t, _ = traced(make(), x)
    assert "masked_scores" not in t and "dropped_weights" not in t
    t, _ = traced(make(dropout=0.5), x)
    kept = t["dropped_weights"].numpy()
    assert ((kept == 0) | (kept == 2 * t["weights"].numpy())).all() and (kept == 0).any()


def test_storage_is_what_the_arrays_say():
    t, _ = traced(make(), cmha.tensor(normal(2, 5, 12)), is_causal=True)
    storage = {name: t[name].storage for name in t}
    copies = {"q_heads", "k_heads", "v_heads", "merged"}
    assert {name for name in t if storage[name] == "copy"} == copies
    assert storage["k"] == storage["v"] == "view"
    new = ("c_q", "q", "scores", "masked_scores", "weights", "y_heads", "c_proj")
    assert all(storage[name] == "new" for name in new)
    for name in t:
        row = t[name]
        assert row.shape == row.numpy().shape and row.bytes == row.numpy().nbytes == 4 * row.numpy().size
        assert [s * 4 for s in row.strides] == list(row.numpy().strides)
    assert all(row.seconds > 0 for row in t.rows if row.step != 2)
    one, _ = traced(make(), cmha.tensor(normal(1, 5, 12)), is_causal=True)
    assert one["q_heads"].storage == "view" and one["q_heads"].strides == (4, 12, 1)  # one row: nothing has to move


def test_a_model_has_the_path_of_every_module():
    gpt, tokens = tiny(), ids(2, 6)
    t, logits = traced(gpt, tokens)
    expected = {"wte", "dropout", "ln_f", "logits"}
    for i in range(2):
        expected |= {f"blocks.{i}.{name}" for name in ("ln_1", "attn", "ln_2", "mlp", "mlp.c_fc", "mlp.c_proj")}
        expected |= {f"blocks.{i}.attn.{name}" for name in ("c_q", "c_k", "c_v", "c_proj", *INSIDE)}
        expected |= {f"blocks.{i}", f"blocks.{i}.mlp.dropout"}
    assert set(t) == expected
    same_bits(t["logits"].numpy(), logits)
    assert t["h.1.attn.scores"] is t["blocks.1.attn.scores"] and "h.1.mlp" in t
    stream = t["dropout"].numpy()
    for i in range(2):
        stream = stream + t[f"blocks.{i}.attn"].numpy() + t[f"blocks.{i}.mlp"].numpy()
        same_bits(t[f"blocks.{i}"].numpy(), stream)
    whole = reference.gpt({n: array(p).astype(np.float64) for n, p in gpt.state_dict().items()}, tokens, 2, 2)
    assert np.abs(t["logits"].numpy() - whole).max() < 1e-4


def test_with_a_cache_the_keys_are_all_of_them_and_the_last_pass_is_kept():
    gpt, tokens = tiny(), ids(2, 6)
    whole, _ = traced(gpt, tokens)
    cache = gpt.new_cache(2)
    with cmha.trace(gpt) as t:
        gpt(tokens[:, :5], cache=cache)
        assert t["blocks.0.attn.scores"].shape == (4, 5, 5)
        gpt(tokens[:, 5:], cache=cache)
    assert t["blocks.1.attn.k"].shape == (2, 2, 6, 6) and t["blocks.1.attn.scores"].shape == (4, 1, 6)
    assert t["blocks.1.attn.k"].what == "remember: all of the cache"
    tensors = [row.tensor for row in t.steps("blocks.1.attn") if row.step == 2]
    assert tensors == ["k", "k", "v", "v", "k", "v"]
    same_bits(t["logits"].numpy()[:, 0], whole["logits"].numpy()[:, 5])


def test_gradients_flow_through_a_traced_pass():
    gpt, tokens = tiny(), ids(2, 6)
    with cmha.trace(gpt) as t:
        _, loss = gpt(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert all(p.grad is not None for p in gpt.parameters()) and t["logits"].shape == (2, 5, 11)


def test_nothing_is_left_behind():
    """Neither hooks nor names nor the single steps, also after an error inside."""
    gpt, tokens = tiny(), ids(2, 6)
    with watch() as events:
        before = array(gpt(tokens))
    with pytest.raises(ValueError), cmha.trace(gpt):
        gpt(ids(1, 9))
    cmha.trace(gpt)  # not entered
    with watch() as again:
        same_bits(gpt(tokens), before)
    assert [event[0] for event in events] == [event[0] for event in again]
    assert is_clean(gpt)


def test_the_step_by_step_layer_is_traced_as_such():
    mha = make()
    mha.fused = False
    t, y = traced(mha, cmha.tensor(normal(1, 4, 12)))
    same_bits(t["y"].numpy(), y)
    assert not mha.fused


def test_the_table_says_that_it_ran_step_by_step_and_shows_the_heads():
    t, _ = traced(MultiHeadAttention(8, 2), cmha.zeros((2, 3, 8)), is_causal=True)
    text = str(t)
    assert "run step by step: the fused kernels are off" in text
    assert len([line for line in text.splitlines() if line.strip()[:1] in set("12345678") and " us" in line]) == 24
    (copy,) = (line for line in text.splitlines() if line.strip().startswith("split: reshape (4, 3, 4)"))
    assert copy.split("copy")[1].split("|")[0].split() == 2 * (3 * ["0000"] + 3 * ["1111"])
    large, _ = traced(MultiHeadAttention(64, 2), cmha.zeros((2, 3, 64)))
    assert "head that each element" not in str(large)
    assert "nothing traced" in str(cmha.trace(MultiHeadAttention(8, 2)))


def test_a_name_that_is_not_there_lists_those_that_are():
    t, _ = traced(make(), cmha.tensor(normal(1, 4, 12)))
    with pytest.raises(KeyError, match="no such intermediate; got 'score', expected one of c_q, c_k"):
        t["score"]


@pytest.mark.parametrize("thing, kind", [(3, TypeError), (cmha.nn.Linear(2, 2), ValueError)])
def test_what_cannot_be_traced(thing, kind):
    with pytest.raises(kind, match="trace"):
        cmha.trace(thing)


def test_grouped_heads_expand_their_keys():
    rows = eight_steps(MultiHeadAttention(16, 4, n_kv_head=2), normal(2, 5, 16))
    ops = [row["name"].removeprefix("split heads: ") for row in rows if row["step"] == 3 and row["tensor"] == "k"]
    assert ops == ["reshape", "permute", "reshape", "expand", "reshape"]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)


@pytest.mark.parametrize("B, T, H, hd", [(2, 3, 2, 4), (1, 3, 2, 4), (2, 1, 2, 3), (2, 3, 1, 4), (2, 3, 4, 1)])
def test_memory_moves_where_the_numbers_say(B, T, H, hd):
    """Element n of x ends where NumPy puts it; a view leaves the memory as it was."""
    x = np.arange(B * T * H * hd).reshape(B, T, H * hd)
    stages = movement(B, T, H, hd)
    split = x.reshape(B, T, H, hd).transpose(0, 2, 1, 3)
    assert [s.what for s in (stages[0], stages[4])] == ["x", "y"]
    assert [s.in_order.tolist() for s in stages[1:5]] == [x.ravel().tolist(), *3 * [split.ravel().tolist()]]
    assert stages[-1].in_order.tolist() == x.ravel().tolist()
    for before, stage in zip(stages, stages[1:], strict=False):
        if stage.storage == "view":
            assert stage.in_memory.tolist() == before.in_memory.tolist()
        else:
            assert stage.in_memory.tolist() == stage.in_order.tolist()
    split, merge = ("view" if 1 in sizes else "copy" for sizes in ((B, T, H), (T, H, hd)))
    assert [s.storage for s in stages] == ["new", "view", "view", split, "new", "view", "view", merge]


def test_the_picture_draws_a_line_for_every_element_that_moves():
    from xml.etree import ElementTree

    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(memory_picture(2, 3, 2, 4))
    lines, cells = root.findall(f"{svg}line"), root.findall(f"{svg}g")
    assert len(lines) == 2 * 48 and len(cells) == 4 * 48
    assert lines[4].get("x1") != lines[4].get("x2") and lines[0].get("x1") == lines[0].get("x2")
    assert len(ElementTree.fromstring(memory_picture(2, 1, 2, 4)).findall(f"{svg}line")) == 0

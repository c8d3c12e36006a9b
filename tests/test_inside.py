"""What holds inside of a `with` (trace, replace, heads_off) is gone afterwards, in any order of ends and after errors;
a trace shows one whole pass, whatever else was run inside."""

import copy
import pickle
from threading import Thread

import numpy as np
import pytest

import cmha
from cmha import nn

from .checking import array, same_bits
from .models import ids, is_clean, tiny
from .test_attention import make, normal

ZERO = {"blocks.1.attn.scores": lambda scores: scores * 0.0}
CONTEXTS = {
    "trace": cmha.trace,
    "replace": lambda gpt: cmha.replace(gpt, ZERO),
    "heads_off": lambda gpt: cmha.heads_off(gpt, {0: [1]}),
}


def even(T):
    """Weights of queries that see all keys before them alike."""
    return np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]


@pytest.mark.parametrize("kind", CONTEXTS)
def test_entering_again_inside_is_refused_and_leaves_nothing(kind):
    gpt, tokens = tiny(), ids(1, 4)
    before = array(gpt(tokens))
    context = CONTEXTS[kind](gpt)
    with pytest.raises(RuntimeError, match=rf"\[{kind}\] one `with` at a time"):
        with context, context:
            pass
    assert is_clean(gpt)
    same_bits(gpt(tokens), before)
    with context:  # one after the other is fine
        gpt(tokens)
    assert is_clean(gpt)


@pytest.mark.parametrize("first", CONTEXTS)
@pytest.mark.parametrize("second", CONTEXTS)
@pytest.mark.parametrize("failing", [False, True])
def test_ends_may_come_in_any_order(first, second, failing):
    gpt, tokens = tiny(), ids(1, 4)
    before = array(gpt(tokens))
    a, b = CONTEXTS[first](gpt), CONTEXTS[second](gpt)
    a.__enter__()
    b.__enter__()
    gpt(tokens)
    error = (ValueError, ValueError("inside"), None) if failing else (None, None, None)
    a.__exit__(*error)
    assert not is_clean(gpt)
    gpt(tokens)
    b.__exit__(*error)
    assert is_clean(gpt)
    same_bits(gpt(tokens), before)
    b.__exit__(*error)  # a second end is none
    assert is_clean(gpt)


def test_two_traces_see_the_same_pass_and_each_its_own_end():
    gpt, tokens = tiny(), ids(1, 4)
    with cmha.trace(gpt) as whole, cmha.trace(gpt.h[0].attn) as part:
        gpt(tokens)
    assert set(part) <= {name.removeprefix("blocks.0.attn.") for name in whole} | {"y"}
    for name in ("scores", "merged"):
        same_bits(part[name].numpy(), whole[f"blocks.0.attn.{name}"].numpy())
        assert part[name].what == whole[f"blocks.0.attn.{name}"].what
    assert [r.what for r in part.steps()] == [r.what for r in whole.steps()]


@pytest.mark.parametrize("outside", ["trace", "replace"])
def test_a_trace_shows_what_was_replaced_in_either_order(outside):
    gpt, tokens = tiny(), ids(1, 5)
    t, change = cmha.trace(gpt), cmha.replace(gpt, ZERO | {"blocks.0.mlp": lambda y: y * 0.0, "h.1": lambda y: y + 1.0})
    with t if outside == "trace" else change, change if outside == "trace" else t:
        gpt(tokens)
    assert np.array_equal(t["blocks.1.attn.scores"].numpy(), np.zeros((2, 5, 5)))
    assert np.abs(t["blocks.1.attn.weights"].numpy() - even(5)).max() < 1e-7
    assert np.array_equal(t["blocks.0.mlp"].numpy(), np.zeros((1, 5, 12)))
    plain = t["blocks.0"].numpy() + t["blocks.1.attn"].numpy() + t["blocks.1.mlp"].numpy()
    same_bits(t["blocks.1"].numpy(), plain + np.float32(1))


def test_a_hook_registered_inside_a_trace_is_seen_by_it():
    linear_out = []
    mha, x = make(), cmha.tensor(normal(1, 4, 12))
    with cmha.trace(mha) as t:
        handle = mha.c_q.register_forward_hook(lambda module, args, y: linear_out.append(y * 2.0) or linear_out[-1])
        mha(x)
    handle.remove()
    same_bits(t["c_q"].numpy(), linear_out[0])
    same_bits(t["q"].numpy(), linear_out[0])


@pytest.mark.parametrize(
    "name, when",
    [("dropped_weights", "where dropout drops"), ("masked_scores", "where something is hidden")],
)
def test_a_replacement_that_never_comes_by_is_an_error_at_the_end(name, when):
    mha, x = make(), cmha.tensor(normal(1, 4, 12))
    with pytest.raises(ValueError, match=rf"{name} never occurred inside the `with`; it is there {when}"):
        with cmha.replace(mha, {name: lambda y: y, "scores": lambda y: y}):
            mha(x)
    assert is_clean(mha)
    with pytest.raises(KeyError, match="inside"), cmha.replace(mha, {name: lambda y: y}):
        raise KeyError("inside")  # is not covered up


def test_a_module_that_is_never_called_is_an_error_too():
    gpt = tiny()
    with pytest.raises(ValueError, match="attn_dropout never occurred .* whenever its module is called"):
        with cmha.replace(gpt, {"blocks.1.attn_dropout": lambda y: y}):
            gpt(ids(1, 4))


@pytest.mark.parametrize("again", [1, 2])
def test_backward_inside_keeps_the_whole_pass_with_checkpoints(again):
    gpt, tokens = tiny(), ids(2, 6)
    with cmha.trace(gpt) as plain:
        gpt(tokens[:, :-1], tokens[:, 1:])[1].backward()
    gpt.checkpoint_activations = True
    with cmha.trace(gpt) as t:
        for _ in range(again):
            gpt(tokens[:, :-1], tokens[:, 1:])[1].backward()
    assert list(t) == list(plain)
    rows = [[(r.where, r.what, r.tensor, r.shape, r.strides, r.storage) for r in trace.rows] for trace in (t, plain)]
    assert rows[0] == rows[1]
    for name in plain:
        same_bits(t[name].numpy(), plain[name].numpy())


def failing(module, args, out):
    raise ArithmeticError("on the way")


def test_a_pass_that_fails_leaves_nothing_in_the_next():
    gpt, tokens = tiny(), ids(1, 5)
    with cmha.trace(gpt) as plain:
        gpt(tokens)
    with cmha.trace(gpt) as t:
        handle = gpt.h[1].ln_2.register_forward_hook(failing)
        with pytest.raises(ArithmeticError):
            gpt(tokens)
        assert len(t) == 0
        handle.remove()
        cmha.ones((3, 3)) @ cmha.ones((3, 3))  # no part of any pass
        gpt(tokens)
        with pytest.raises(ValueError):
            gpt(ids(1, 9))
        gpt.h[0].ln_1(cmha.zeros((1, 2, 12)))
    assert list(t) == list(plain) and [r.what for r in t.rows] == [r.what for r in plain.rows]
    assert t["blocks.0.ln_1"].shape == (1, 5, 12)


def test_of_parts_alone_the_last_calls_are_kept():
    mha = make()
    with cmha.trace(mha) as t:
        mha.c_k(cmha.zeros((1, 2, 12)))
        with pytest.raises(ValueError):
            mha.c_v(cmha.zeros((1, 2, 11)))
        mha.c_q(cmha.zeros((1, 3, 12)))
        mha.c_k(cmha.zeros((1, 5, 12)))
    assert list(t) == ["c_k"] and t["c_k"].shape == (1, 5, 12) and len(t.rows) == 1


def test_generation_inside_shows_the_last_token():
    gpt = tiny()
    with cmha.trace(gpt) as t:
        gpt.generate(ids(1, 3), 4, temperature=0)
    assert t["blocks.1.attn.scores"].shape[1] == 1 and len(t.steps("blocks.1.attn")) < 40


def test_another_thread_does_not_disturb_a_trace():
    gpt, tokens = tiny(), ids(1, 5)
    with cmha.trace(gpt) as t:
        gpt(tokens)
        names = list(t)
        thread = Thread(target=lambda: gpt(tokens[:, :2]))
        thread.start()
        thread.join()
    assert list(t) == names and t["logits"].shape == (1, 5, 11)


@pytest.mark.parametrize("kind", CONTEXTS)
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda gpt: pickle.loads(pickle.dumps(gpt))])
def test_a_copy_made_inside_is_a_plain_model(kind, copied):
    gpt, tokens = tiny(), ids(1, 4)
    before = array(gpt(tokens))
    with CONTEXTS[kind](gpt):
        other = copied(gpt)
        if copied is not copy.copy:  # whose parts are the same
            assert is_clean(other)
            same_bits(other(tokens), before)
        assert not any(other._hooks or ())
        gpt(tokens)
    assert is_clean(gpt)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_traces_and_intermediates_say_that_they_cannot_be_copied(copied):
    t = cmha.trace(make())
    with pytest.raises(TypeError, match=r"\[trace\] what belongs to a `with` and its model can be neither copied nor"):
        copied(t)
    with t:
        t._model(cmha.zeros((1, 3, 12)))
    with pytest.raises(TypeError, match=r"\[trace\] an Intermediate .* np.array\(intermediate\) is a copy"):
        copied(t["scores"])
    assert np.array(t["scores"]).shape == (3, 3, 3)


@pytest.mark.parametrize("ask", ["__getitem__", "steps", "table"])
@pytest.mark.parametrize("name", ["nope", "", 3, [1], None])
def test_names_that_are_not_there_are_one_error(ask, name):
    gpt = tiny()
    with cmha.trace(gpt) as t:
        gpt(ids(1, 4))
    if name is None and ask != "__getitem__":
        assert getattr(t, ask)(name)
        return
    with pytest.raises(KeyError, match=r"\[trace\] no such (intermediate|attention); got .*expected one of .*blocks.0"):
        getattr(t, ask)(name)
    assert t.table("h.1.attn") == t.table("blocks.1.attn") != t.table()


MODES = {"h.0.attn": False, "h.1": True, "h.1.mlp": False, "ln_f": True}


@pytest.mark.parametrize(
    "call",
    [
        lambda gpt: cmha.head_importance(gpt, ids(2, 5)),
        lambda gpt: cmha.attention_weights(gpt, ids(2, 5)),
        lambda gpt: cmha.attention_weights(gpt, ids(2, 50)),  # fails
        lambda gpt: gpt.generate(ids(1, 3), 2),
        lambda gpt: cmha.see.eight_steps(gpt.h[1].attn, normal(1, 3, 12)),
    ],
)
def test_every_part_goes_back_to_the_mode_it_had(call):
    gpt = tiny()
    gpt.train()
    parts = dict(gpt.named_modules())
    for name, mode in MODES.items():
        parts[name].training = mode
    before = {name: part.training for name, part in parts.items()}
    try:
        call(gpt)
    except ValueError:
        pass
    assert {name: part.training for name, part in parts.items()} == before


# --- hooks that return what they cannot ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [False, 5, "text", np.zeros(2), (), [1]])
@pytest.mark.parametrize("where", ["c_q", "attn", "c_proj"])
def test_a_forward_hook_returns_none_or_an_output(value, where):
    gpt = tiny()
    module = gpt.h[0].attn if where == "attn" else getattr(gpt.h[0].attn, where)

    def odd_hook(module, args, out):
        return value

    module.register_forward_hook(odd_hook)
    kind = type(module).__name__
    with pytest.raises(TypeError, match=rf"\[hook\] the forward hook .*odd_hook of {kind}\(.* must return None or an"):
        gpt(ids(1, 4))


def test_a_forward_hook_may_turn_weights_and_all_into_y_alone_but_not_into_another_tuple():
    mha, x = make(), cmha.tensor(normal(1, 4, 12))
    y, weights = mha(x, need_weights=True)
    for value, good in ((y, True), ((y, None), True), ((y,), False), ((None, weights), False)):
        handle = mha.register_forward_hook(lambda module, args, out, value=value: value)
        if good:
            assert mha(x, need_weights=True) is value
        else:
            with pytest.raises(TypeError, match="a Tensor or a tuple of 2 that begins with one"):
                mha(x, need_weights=True)
        handle.remove()


def test_a_forward_hook_does_not_broadcast_over_the_residual():
    gpt = tiny()
    gpt.h[0].attn.register_forward_hook(lambda module, args, out: out[:, :1])
    with pytest.raises(ValueError, match=r"\[hook\] .*MultiHeadAttention\(.*shape; got \(1, 1, 12\), expected \(1, 4,"):
        gpt(ids(1, 4))


@pytest.mark.parametrize("value", [False, 5, (1, 2), (1, 2, 3), [(), {}], ((), None)])
def test_a_pre_hook_returns_none_or_arguments(value):
    def odd_hook(module, args, kwargs):
        return value

    linear = nn.Linear(3, 2)
    linear.register_forward_pre_hook(odd_hook)
    with pytest.raises(TypeError, match=r"the forward pre-hook .*odd_hook of Linear\(.* must return None or \("):
        linear(cmha.zeros((1, 3)))


def test_what_a_module_of_ones_own_returns_is_its_own_matter():
    class Two(nn.Module):
        def forward(self, x):
            return {"x": x}

    two = Two()
    two.register_forward_hook(lambda module, args, out: 3)
    assert two(1) == 3

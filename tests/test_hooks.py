"""Forward hooks, heads off, intermediates replaced, the importance of heads."""

import numpy as np
import pytest

import cmha
from cmha import nn

from .checking import array, same_bits
from .models import ids, is_clean, tiny
from .test_attention import make, normal


def test_a_hook_sees_every_call_until_it_is_removed():
    linear, x, seen = nn.Linear(3, 2), cmha.tensor(normal(4, 3)), []
    handle = linear.register_forward_hook(lambda module, args, out: seen.append((module, args, out)))
    y = linear(x)
    assert len(seen) == 1 and seen[0][0] is linear and seen[0][1] == (x,) and seen[0][2] is y
    handle.remove()
    handle.remove()
    same_bits(linear(x), y)
    assert len(seen) == 1


def test_hooks_change_what_goes_in_and_what_comes_out_in_their_order():
    linear, x = nn.Linear(3, 2), cmha.tensor(normal(4, 3))
    expected = array(linear(x * 2.0)) * np.float32(3) + np.float32(1)
    linear.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2.0,), kwargs))
    linear.register_forward_hook(lambda module, args, out: out * 3.0)
    linear.register_forward_hook(lambda module, args, out: out + 1.0)
    same_bits(linear(x), expected)


def test_hooks_on_every_module_change_no_bit():
    """Residuals and GELU are then added behind the products, not inside them: the same bits, also of gradients."""
    gpt, tokens = tiny(), ids(2, 7)
    _, loss = gpt(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    plain = [array(p.grad) for p in gpt.parameters()]
    gpt.zero_grad()
    handles = [part.register_forward_hook(lambda *_: None) for _, part in gpt.named_modules()]
    _, hooked = gpt(tokens[:, :-1], tokens[:, 1:])
    hooked.backward()
    same_bits(hooked, loss)
    for p, grad in zip(gpt.parameters(), plain, strict=True):
        same_bits(p.grad, grad)
    for handle in handles:
        handle.remove()


def test_a_hook_sees_the_output_of_its_own_module_not_the_residual_stream():
    gpt, tokens, seen = tiny(), ids(1, 5), {}
    for name, part in gpt.named_modules():
        part.register_forward_hook(lambda module, args, out, name=name: seen.update({name: (args, array(out))}))
    gpt(tokens)
    (x,), fc = seen["h.0.mlp.c_fc"]
    w, b = array(gpt.h[0].mlp.c_fc.weight), array(gpt.h[0].mlp.c_fc.bias)
    assert np.abs(fc - (array(x) @ w + b)).max() < 1e-5  # not its GELU
    (x,), attn = seen["h.0.attn.c_proj"]
    w, b = array(gpt.h[0].attn.c_proj.weight), array(gpt.h[0].attn.c_proj.bias)
    assert np.abs(attn - (array(x) @ w + b)).max() < 1e-5  # not plus x
    same_bits(seen["h.0.attn"][1], attn)
    start = array(gpt.dropout(gpt.wte(tokens) + gpt.wpe.weight[:5]))
    same_bits(seen["h.0"][1], start + attn + seen["h.0.mlp"][1])


def test_what_is_no_hook_is_refused():
    with pytest.raises(TypeError, match=r"\[hook\] a hook must be callable; got int"):
        nn.Linear(2, 2).register_forward_hook(3)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("projection", [True, False])
def test_a_head_that_is_off_adds_nothing(fused, projection):
    mha, x, hd = make(output_projection=projection), cmha.tensor(normal(2, 5, 12)), 4
    mha.fused = fused
    merged = array(make(output_projection=False)(x, is_causal=True))  # its c_q, c_k, c_v are the same draws
    merged[..., hd : 3 * hd] = 0
    expected = merged if not projection else array(mha.c_proj(cmha.tensor(merged)))
    before = array(mha(x, is_causal=True))
    with cmha.heads_off(mha, [1, 2]):
        y, weights = mha(x, is_causal=True, need_weights=True)
    assert np.abs(array(y) - expected).max() < 1e-5 and weights.shape == (2, 3, 5, 5)
    same_bits(mha(x, is_causal=True), before)


def test_heads_off_holds_with_a_cache_and_in_the_gradient():
    gpt, tokens = tiny(), ids(1, 6)
    with cmha.heads_off(gpt, {1: [0]}):
        whole = array(gpt(tokens))
        cache = gpt.new_cache(1)
        parts = [array(gpt(tokens[:, t : t + 1], cache=cache)) for t in range(6)]
        _, loss = gpt(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    same_bits(np.concatenate(parts, axis=1), whole)
    grad, hd = array(gpt.h[1].attn.c_v.weight.grad), gpt.cfg.head_dim
    assert (grad[:, :hd] == 0).all() and (grad[:, hd:] != 0).any()


def test_heads_off_refuses_what_is_not_there():
    gpt = tiny()
    for heads, kind in (({2: [0]}, ValueError), ({0: [2]}, ValueError), ([0], TypeError)):
        with pytest.raises(kind, match="heads_off"), cmha.heads_off(gpt, heads):
            pass
    assert is_clean(gpt)


def test_scores_of_zero_weigh_all_visible_keys_alike():
    gpt, tokens = tiny(), ids(1, 5)
    before = array(gpt(tokens))
    change = {"blocks.1.attn.scores": lambda scores: scores * 0.0}
    with cmha.no_grad(), cmha.replace(gpt, change), cmha.trace(gpt) as t:
        gpt(tokens)
    expected = np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None]
    assert np.abs(t["blocks.1.attn.weights"].numpy() - expected).max() < 1e-7
    assert np.abs(t["blocks.0.attn.weights"].numpy() - expected).max() > 1e-2
    same_bits(gpt(tokens), before)
    assert gpt.h[1].attn.fused


def test_outputs_of_modules_are_replaced_by_arrays_and_functions():
    gpt, tokens = tiny(), ids(2, 4)
    with cmha.replace(gpt, {"blocks.0.attn": np.zeros((2, 4, 12)), "blocks.0.mlp": lambda y: y * 0.0}):
        with cmha.trace(gpt) as t:
            gpt(tokens)
    start = array(gpt.wte(tokens) + gpt.wpe.weight[:4])
    assert np.array_equal(t["blocks.0"].numpy(), start)
    with cmha.replace(gpt, {"logits": lambda logits: logits * 2.0}):
        doubled = array(gpt(tokens))
    same_bits(doubled, array(gpt(tokens)) * np.float32(2))


def test_replace_refuses_other_names_and_shapes():
    gpt, tokens = tiny(), ids(1, 4)
    with pytest.raises(KeyError, match=r"blocks.0.attn.score'"), cmha.replace(gpt, {"blocks.0.attn.score": 0}):
        pass
    with cmha.replace(gpt, {"h.0.attn.weights": np.zeros((2, 4, 3))}):
        with pytest.raises(ValueError, match=r"must keep its shape; got \(2, 4, 3\), expected \(2, 4, 4\)"):
            gpt(tokens)
    assert gpt.h[0].attn.fused


def test_head_importance_is_the_loss_without_the_head_minus_the_loss():
    gpt, text = tiny(), ids(30)
    gpt.train()
    found = cmha.head_importance(gpt, text)
    assert found.shape == (2, 2) and gpt.training
    windows = [text[i : i + 9] for i in (0, 8, 16)] + [text[24:]]  # block_size 8, the last one shorter

    def loss():
        with cmha.no_grad():
            losses = [gpt(w[None, :-1], w[None, 1:])[1].item() * (len(w) - 1) for w in windows]
        return sum(losses) / 29

    whole = loss()
    for layer, head in np.ndindex(2, 2):
        with cmha.heads_off(gpt, {layer: [head]}):
            assert abs(found[layer, head] - (loss() - whole)) < 1e-6
    assert np.abs(found).min() > 1e-4
    same = cmha.head_importance(gpt, np.stack(windows[:3]), batch_size=2)
    assert np.abs(same - cmha.head_importance(gpt, text[:25])).max() < 1e-6


def test_head_importance_refuses_what_is_no_text():
    with pytest.raises(ValueError, match="two or more"):
        cmha.head_importance(tiny(), np.array([1]))
    with pytest.raises(TypeError, match="needs a GPT"):
        cmha.head_importance(make(), np.array([1, 2]))


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, None, True, "2"])
def test_head_importance_refuses_a_batch_size_that_is_none(batch_size):
    rule = r"\[head_importance\] batch_size must be an integer of at least 1; got "
    with pytest.raises((ValueError, TypeError), match=rule):
        cmha.head_importance(tiny(), ids(2, 5), batch_size=batch_size)


@pytest.mark.parametrize("text", [np.zeros(shape, int) for shape in ((0,), (0, 5), (2, 0), (2, 1))])
def test_head_importance_refuses_an_empty_text(text):
    with pytest.raises(ValueError, match=r"\[head_importance\] ids must be .*, two or more a row; got int64 of shape"):
        cmha.head_importance(tiny(), text)


@pytest.mark.parametrize(
    "wanted, words",
    [
        ({"layers": [1, 1]}, "layers must be a list of integers from 0 to 1, at least one, none twice; got"),
        ({"layers": []}, "at least one"),
        ({"layers": 0}, "layers must be a list .* got 0"),
        ({"layers": [2]}, "an entry of layers must be an integer from 0 to 1; got 2"),
        ({"layers": ["a"]}, "an entry of layers .* got 'a'"),
        ({"heads": False}, "heads, unless True, must be a list of integers from 0 to 1, .* got False"),
        ({"heads": None}, "heads, unless True, must be a list .* got None"),
        ({"heads": [2]}, "an entry of heads, unless True, must be an integer from 0 to 1; got 2"),
    ],
)
def test_attention_weights_refuses_what_it_cannot_give(wanted, words):
    gpt = tiny()
    with pytest.raises((ValueError, TypeError), match=rf"\[attention_weights\] .*{words}"):
        cmha.attention_weights(gpt, ids(1, 4), **wanted)
    assert is_clean(gpt)
    assert list(cmha.attention_weights(gpt, ids(1, 4), layers=range(1, 2), heads=np.array([1]))) == [1]


@pytest.mark.parametrize("heads", [{0: 0}, {0: None}, {0: "0"}, {0: [0, 0]}, {0: [0.5]}, {0: {1}}, None, 0, {"0": [0]}])
def test_heads_off_needs_lists(heads):
    for model in (tiny(), tiny(n_layer=1)):
        with pytest.raises((ValueError, TypeError), match=r"\[heads_off\] "):
            cmha.heads_off(model, heads)
    mha, x = make(), cmha.tensor(normal(1, 4, 12))
    with cmha.heads_off(mha, np.array([1, 2])), cmha.heads_off(mha, range(0, 1)), cmha.heads_off(mha, []):
        same_bits(mha(x), array(mha.c_proj(cmha.zeros((1, 4, 12)))))


@pytest.mark.parametrize(
    "changes, kind, words",
    [
        ({0: lambda x: x}, KeyError, "no such intermediate; got 0"),
        ({None: lambda x: x}, KeyError, "no such intermediate; got None"),
        ({("blocks", 0): lambda x: x}, KeyError, "no such intermediate; got"),
        (["logits"], TypeError, "needs a dict; got"),
        (None, TypeError, "needs a dict; got None"),
        ({"logits": None}, TypeError, r"\[replace\] "),
        ({"logits": "text"}, TypeError, r"\[replace\] "),
    ],
)
def test_replace_refuses_what_is_no_change_before_anything_runs(changes, kind, words):
    with pytest.raises(kind, match=words):
        cmha.replace(tiny(), changes)


@pytest.mark.parametrize("name", ["logits", "blocks.0.attn.scores"])
def test_a_function_that_returns_nothing_is_named(name):
    gpt = tiny()
    with pytest.raises(TypeError, match=rf"the function for {name} must return a tensor or an array; got None"):
        with cmha.replace(gpt, {name: lambda x: None}):
            gpt(ids(1, 4))

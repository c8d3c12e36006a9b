"""Weights of some heads and some query rows, from the fused kernel's own maxima and sums."""

import itertools

import numpy as np
import pytest

import cmha
from cmha import MultiHeadAttention, _core, ops

from . import reference
from .checking import array, check, floats, gradients, leaf, same_bits
from .models import ids, tiny
from .test_attention import make, normal

ATTEND = cmha.scaled_dot_product_attention
B, H, H_KV, T, S, HD = 2, 4, 2, 9, 13, 5
MASKS = {
    "none": None,
    "bool (T, S)": normal(T, S, seed=1) > -0.5,
    "float (B, 1, T, S)": np.where(normal(B, 1, T, S, seed=2) > 1, -np.inf, 0.3).astype(np.float32),
    "bool (1, H, 1, S)": normal(1, H, 1, S, seed=3) > -1,
    "bool (B, H, T, 1)": normal(B, H, T, 1, seed=4) > -1,
}
HEADS = [True, [2], [3, 0]]
ROWS = [None, (0, 1), (4, 9), (2, 6), (9, 9), (0, 9)]


@pytest.mark.parametrize("mask, is_causal, dropout_p", [*itertools.product(MASKS, [False, True], [0.0, 0.4])])
def test_a_part_is_cut_from_the_whole(mask, is_causal, dropout_p):
    q, k, v = (cmha.tensor(normal(B, h, n, HD, seed=n)) for h, n in ((H, T), (H_KV, S), (H_KV, S)))
    options = {"mask": MASKS[mask], "is_causal": is_causal, "dropout_p": dropout_p}

    def attend(**wanted):
        cmha.manual_seed(3)
        return ATTEND(q, k, v, **options, **wanted)

    y, whole = attend(), array(attend(need_weights=True)[1])
    _, expected = reference.attention(*floats(*map(array, (q, k, v))), MASKS[mask], is_causal)
    check(whole, expected, 1.0, 16)
    empty = expected.sum(axis=-1) == 0
    assert (whole[empty] == 0).all() and np.abs(whole[~empty].sum(axis=-1) - 1).max() < 1e-6
    for heads, rows in itertools.product(HEADS, ROWS):
        z, part = attend(need_weights=heads, weight_rows=rows)
        same_bits(z, y)
        some = whole if heads is True else whole[:, heads]
        same_bits(part, some if rows is None else some[:, :, rows[0] : rows[1]])
        assert not part.requires_grad


def test_rows_of_unequal_length_are_cut_alike():
    q, k, v = (_core.from_buffer(normal(B, H, n, HD, seed=n)) for n in (T, S, S + 1))
    v = v[:, :, :S]  # strides that are not those of a packed array
    for lengths, is_causal in itertools.product(([13, 6], [3, 1]), (False, True)):
        options = {"lengths": _core.from_buffer(np.array(lengths)), "is_causal": is_causal}
        whole = np.asarray(ops.attention(q, k, v, need_weights=(None, (0, T)), **options)[0][1])
        for heads, (start, stop) in itertools.product((None, [1, 3]), ((0, 2), (5, 9), (3, 4))):
            part = np.asarray(ops.attention(q, k, v, need_weights=(heads, (start, stop)), **options)[0][1])
            assert np.array_equal(part, (whole if heads is None else whole[:, heads])[:, :, start:stop])


@pytest.mark.parametrize("T, S", [(200, 200), (3, 150), (150, 3)])
def test_across_blocks_of_keys(T, S):
    q, k, v = (cmha.tensor(normal(1, 3, n, HD, seed=n)) for n in (T, S, S))
    _, whole = ATTEND(q, k, v, is_causal=True, need_weights=True)
    _, part = ATTEND(q, k, v, is_causal=True, need_weights=[1], weight_rows=(T // 2, T - 1))
    same_bits(part, array(whole)[:, 1:2, T // 2 : T - 1])


@pytest.mark.parametrize("fused", [True, False])
def test_the_layer_gives_them_in_training_with_everything_at_once(fused):
    """Causal, mask, key padding and dropout together; the fused weights are the steps' within their bound."""
    mha, x = make(dropout=0.3), cmha.tensor(normal(2, 5, 12))
    mha.fused = fused
    options = {"mask": normal(5, 5, seed=8) > -1, "key_mask": np.array([[True] * 5, [True, True, False, True, False]]),
               "is_causal": True}  # fmt: skip

    def run(**wanted):
        cmha.manual_seed(1)
        return mha(x, **options, **wanted)

    y, whole = run(need_weights=True)
    z, part = run(need_weights=[2, 0], weight_rows=(1, 4))
    same_bits(z, run())
    same_bits(y, z)
    same_bits(part, array(whole)[:, [2, 0], 1:4])
    state = {name: array(t).astype(np.float64) for name, t in mha.state_dict().items()}
    _, expected = reference.multi_head_attention(state, array(x).astype(np.float64), 3, **options)
    check(whole, expected, 1.0, 16)


def test_gradients_are_the_same_with_and_without():
    arrays, dy = [normal(1, H, n, HD, seed=seed) for seed, n in enumerate((6, 7, 7))], normal(1, H, 6, HD, seed=5)
    wanted = {"need_weights": [1], "weight_rows": (2, 3)}
    plain = gradients(lambda *t: ATTEND(*t, is_causal=True), [leaf(a) for a in arrays], dy)
    asked = gradients(lambda *t: ATTEND(*t, is_causal=True, **wanted)[0], [leaf(a) for a in arrays], dy)
    for a, b in zip(plain, asked, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("fused", [True, False])
def test_decoding_token_by_token_gives_the_rows_of_the_whole(fused):
    mha, x = make(), cmha.tensor(normal(2, 7, 12))
    mha.fused = fused
    with cmha.no_grad():
        _, whole = mha(x, is_causal=True, need_weights=True)
        cache = cmha.KVCache(2, 3, 4, 7)
        for t in range(7):
            _, one = mha(x[:, t : t + 1], is_causal=True, cache=cache, need_weights=[1])
            if fused:
                same_bits(one, array(whole)[:, 1:2, t : t + 1, : t + 1])
            else:
                check(one, array(whole).astype(np.float64)[:, 1:2, t : t + 1, : t + 1], 1.0, 16)


def test_decoding_with_mask_key_padding_and_dropout_at_once():
    mha, x, mask = make(dropout=0.4), cmha.tensor(normal(2, 7, 12)), normal(7, 7, seed=3) > -0.8
    keys = np.array([[True] * 7, [True, False, True, True, True, True, False]])
    state = {name: array(t).astype(np.float64) for name, t in mha.state_dict().items()}
    options = {"mask": mask, "key_mask": keys, "is_causal": True}
    _, expected = reference.multi_head_attention(state, array(x).astype(np.float64), 3, **options)

    def decode(**wanted):
        cmha.manual_seed(2)
        cache, out = cmha.KVCache(2, 3, 4, 7), []
        for t in range(7):
            seen = {"mask": mask[t : t + 1, : t + 1], "key_mask": keys[:, : t + 1], "is_causal": True}
            out.append(mha(x[:, t : t + 1], cache=cache, **seen, **wanted))
        return out

    for t, (y, (z, weights)) in enumerate(zip(decode(), decode(need_weights=[2, 0]), strict=True)):
        same_bits(z, y)
        check(weights, expected[:, [2, 0], t : t + 1, : t + 1], 1.0, 16)


@pytest.mark.parametrize(
    "wanted, kind, text",
    [
        ({"need_weights": [4]}, ValueError, "from 0 to 3; got 4"),
        ({"need_weights": [-1]}, ValueError, "got -1"),
        ({"need_weights": [1, 1]}, ValueError, "none twice"),
        ({"need_weights": []}, ValueError, "at least one"),
        ({"need_weights": ["a"]}, TypeError, "'a'"),
        ({"need_weights": 2}, TypeError, "need_weights must be a bool or a list of heads; got 2"),
        ({"need_weights": "no"}, TypeError, "a bool or a list of heads; got 'no'"),
        ({"need_weights": np.array([0.0])}, ValueError, "an entry of need_weights"),
        ({"need_weights": np.array(1)}, TypeError, "a bool or a list of heads"),
        ({"weight_rows": (0, 1)}, ValueError, "weight_rows needs need_weights"),
        ({"need_weights": True, "weight_rows": (0, 10)}, ValueError, "stop of weight_rows .* from 0 to 9; got 10"),
        ({"need_weights": True, "weight_rows": (3, 2)}, ValueError, "from 3 to 9; got 2"),
        ({"need_weights": True, "weight_rows": range(0, 4, 2)}, TypeError, "a range of step 1"),
        ({"need_weights": True, "weight_rows": 3}, TypeError, r"must be \(start, stop\) or a range of step 1; got 3"),
    ],
)
def test_what_cannot_be_asked_for(wanted, kind, text):
    q = cmha.zeros((1, H, T, HD))
    with pytest.raises(kind, match=text):
        ATTEND(q, q, q, **wanted)
    with pytest.raises(kind, match=text):
        MultiHeadAttention(8, H)(cmha.zeros((1, T, 8)), **wanted)


@pytest.mark.parametrize("layers", [None, [1]])
def test_a_whole_model_gives_the_weights_that_its_steps_have(layers):
    gpt, tokens = tiny(), ids(2, 6)
    before = array(gpt(tokens))
    found = cmha.attention_weights(gpt, tokens, layers=layers)
    assert list(found) == ([0, 1] if layers is None else layers)
    with cmha.no_grad(), cmha.trace(gpt) as t:
        gpt(tokens)
    for layer, weights in found.items():
        steps = t[f"blocks.{layer}.attn.weights"].numpy().reshape(2, 2, 6, 6)
        check(weights, steps.astype(np.float64), 1.0, 16)
    part = cmha.attention_weights(gpt, tokens, layers=[1], heads=[1], rows=(5, 6))[1]
    same_bits(part, cmha.attention_weights(gpt, tokens)[1][:, 1:2, 5:6])
    same_bits(gpt(tokens), before)


def test_behind_a_cache_whose_rows_differ_in_length():
    gpt, tokens = tiny(), ids(2, 8)

    def started():
        cache = gpt.new_cache(2)
        gpt(tokens[:, :5], cache=cache)
        cache.truncate([2, 4])
        return cache

    whole = cmha.attention_weights(gpt, tokens[:, :3], cache=started())
    part = cmha.attention_weights(gpt, tokens[:, :3], heads=[1], rows=(1, 2), cache=started())
    with cmha.trace(gpt) as t:
        gpt(tokens[:, :3], cache=started())
    for layer, weights in whole.items():
        same_bits(part[layer], weights[:, 1:2, 1:2])
        check(weights, t[f"blocks.{layer}.attn.weights"].numpy().reshape(2, 2, 3, 7).astype(np.float64), 1.0, 16)
        assert (weights[0, :, 2, 5:] == 0).all() and (weights[1, :, 2] > 0).all()


@pytest.mark.parametrize("heads", [range(1, 3), np.array([1, 2]), (1, 2), cmha.tensor([1, 2])])
@pytest.mark.parametrize("rows", [range(2, 5), np.array([2, 5]), [2, 5]])
def test_heads_and_rows_may_be_any_list_of_integers(heads, rows):
    q = cmha.tensor(normal(1, H, T, HD))
    _, weights = ATTEND(q, q, q, need_weights=heads, weight_rows=rows)
    same_bits(weights, array(ATTEND(q, q, q, need_weights=True)[1])[:, 1:3, 2:5])

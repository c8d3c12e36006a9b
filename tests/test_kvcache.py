"""The cache saves work and changes nothing, not one bit; what it refuses leaves it as it was."""

import numpy as np
import pytest

import cmha
from cmha import KVCache, no_grad

from .checking import array, bits, same_bits
from .models import ids, tiny


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(n=5, capacity=8, batch=3):
    cache = KVCache(batch, 2, 4, capacity)
    k, v = normal(batch, 2, n, 4), normal(batch, 2, n, 4, seed=1)
    with no_grad():
        cache.append(cmha.tensor(k), cmha.tensor(v))
    return cache, k, v


def step(cache, n=1, batch=3, seed=2):
    k, v = (cmha.tensor(normal(batch, 2, n, 4, seed=s)) for s in (seed, seed + 1))
    with no_grad():
        return cache.append(k, v)


def cuts(n):
    """Every way to write n as an ordered sum."""
    for pattern in range(2 ** (n - 1)):
        places = [i + 1 for i in range(n - 1) if pattern >> i & 1]
        yield np.diff([0, *places, n]).tolist()


def run(gpt, tokens, pieces, cache=None):
    cache = gpt.new_cache(len(tokens)) if cache is None else cache
    found, at = [], len(cache)
    start = 0
    with no_grad():
        for n in pieces:
            found.append(array(gpt(tokens[:, start:start + n], cache=cache)))
            start += n
    assert len(cache) == at + start
    return np.concatenate(found, axis=1)


# --- the same bits --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("batch", [1, 2])
def test_every_cut_gives_the_bits_of_the_full_pass(batch):
    """B48, D5: all 64 cuts of seven tokens, prompts of one token and chunks on a warm cache among them."""
    gpt, tokens = tiny(), ids(batch, 7)
    with no_grad():
        full = array(gpt(tokens))
    for pieces in cuts(7):
        same_bits(run(gpt, tokens, pieces), full)


def test_long_histories_cross_blocks_of_keys():
    """Keys go in blocks of 128: cuts beside, on and across the edge."""
    gpt, tokens = tiny(block_size=300, n_layer=1), ids(1, 280)
    with no_grad():
        full = array(gpt(tokens))
    for pieces in ([127, 1, 1, 1, 150], [128, 152], [1, 130, 149], [256, 1, 1, 1, 21], [279, 1]):
        same_bits(run(gpt, tokens, pieces), full)


def test_the_layer_with_a_cache():
    """Step 2 of the lesson's eight: T becomes T_total; weights of the new queries over all keys."""
    from .test_attention import make

    for options in ({}, {"n_kv_head": 1}):
        mha, x = make(12, 3, **options), normal(2, 6, 12)
        heads = options.get("n_kv_head", 3)
        for fused in (True, False):
            mha.fused = fused
            with no_grad():
                full, weights = mha(cmha.tensor(x), is_causal=True, need_weights=True)
                cache = KVCache(2, heads, 4, 6)
                first = mha(cmha.tensor(x[:, :4]), cache=cache, is_causal=True)
                second, late = mha(cmha.tensor(x[:, 4:]), cache=cache, is_causal=True, need_weights=True)
            same_bits(np.concatenate([array(first), array(second)], axis=1), full)
            assert late.shape == (2, 3, 2, 6)
            same_bits(late, array(weights)[:, :, 4:])


def test_append_returns_everything_so_far():
    cache, k, v = filled(3)
    k_all, v_all = step(cache, 2)
    assert k_all.shape == v_all.shape == (3, 2, 5, 4) and len(cache) == 5
    same_bits(array(k_all)[:, :, :3], k)
    same_bits(array(v_all)[:, :, :3], v)
    same_bits(array(k_all)[:, :, 3:], normal(3, 2, 2, 4, seed=2))


def test_batch_rows_are_rows_alone():
    """B54, D3: a neighbour changes nothing, in any position, with and without the cache."""
    gpt, tokens = tiny(), ids(4, 6)
    alone = [run(gpt, tokens[i:i + 1], [3, 1, 2]) for i in range(4)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 1], [2, 0]):
        together = run(gpt, tokens[order], [3, 1, 2])
        for place, i in enumerate(order):
            same_bits(together[place], alone[i][0])


def test_ragged_ids_are_refused():
    """B54: nothing is padded in silence."""
    gpt = tiny()
    with pytest.raises(ValueError, match=r"^\[gpt\] .*; got .*") as caught:
        gpt([[5, 7, 9], [3]])
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300


# --- moving rows, going back ----------------------------------------------------------------------------------------

def test_truncate_and_reset_go_back_in_time():
    gpt, tokens = tiny(), ids(2, 8)
    full = run(gpt, tokens, [8])
    cache = gpt.new_cache(2)
    run(gpt, tokens[:, ::-1].copy(), [6], cache)
    cache.reset()
    assert len(cache) == 0
    same_bits(run(gpt, tokens, [5], cache), full[:, :5])
    run(gpt, ids(2, 3, seed=9), [2, 1], cache)
    cache.truncate(5)
    same_bits(run(gpt, tokens[:, 5:], [3], cache), full[:, 5:])


def test_reorder_moves_rows_with_their_history():
    """B53: rows [1, 1, 0], then different tokens to each."""
    gpt, tokens, more = tiny(), ids(3, 4), ids(3, 3, seed=5)
    cache = gpt.new_cache(3)
    run(gpt, tokens, [4], cache)
    cache.reorder([1, 1, 0])
    found = run(gpt, more, [1, 2], cache)
    histories = np.concatenate([tokens[[1, 1, 0]], more], axis=1)
    for i in range(3):
        same_bits(found[i], run(gpt, histories[i:i + 1], [7])[0, 4:])


def test_a_copy_is_a_branch():
    """B53: two continuations of one history do not see each other."""
    gpt, tokens = tiny(), ids(1, 4)
    trunk = gpt.new_cache(1)
    run(gpt, tokens, [4], trunk)
    branch = trunk.copy()
    a, b = ids(1, 3, seed=1), ids(1, 3, seed=2)
    left, right = run(gpt, a, [3], trunk), run(gpt, b, [3], branch)
    same_bits(left, run(gpt, np.concatenate([tokens, a], axis=1), [7])[:, 4:])
    same_bits(right, run(gpt, np.concatenate([tokens, b], axis=1), [7])[:, 4:])


# --- what is refused ------------------------------------------------------------------------------------------------

def state(cache):
    """Length and contents: what one more key sees of the past."""
    k, v = step(cache.copy())
    return len(cache), bits(k, v)


BAD_APPENDS = {
    "too many": (3, 2, 4, 4), "wrong batch": (2, 2, 1, 4), "wrong heads": (3, 1, 1, 4), "wrong width": (3, 2, 1, 5),
    "three axes": (3, 2, 4),
}


@pytest.mark.parametrize("name", BAD_APPENDS)
def test_a_refused_append_changes_nothing(name):
    """B53: capacity 8, five are in."""
    cache, *_ = filled(5)
    before, bad = state(cache), cmha.tensor(normal(*BAD_APPENDS[name]))
    with pytest.raises(ValueError, match=r"\[[\w .]+\] .*; got "), no_grad():
        cache.append(bad, bad)
    assert state(cache) == before
    good = cmha.tensor(normal(3, 2, 1, 4))
    with pytest.raises(ValueError), no_grad():
        cache.append(good, cmha.tensor(normal(3, 2, 2, 4)))
    assert state(cache) == before
    step(cache, 3)
    assert len(cache) == 8


@pytest.mark.parametrize("rows", [[0, 1, 3], [-1, 0, 1], [], [0, 1.5, 2], "012"])
def test_a_refused_reorder_changes_nothing(rows):
    cache, *_ = filled(5)
    before = state(cache)
    with pytest.raises((ValueError, IndexError, TypeError), match=r"\[[\w .]+\] .*; got "):
        cache.reorder(rows)
    assert state(cache) == before


@pytest.mark.parametrize("n", [6, -1, 2.5, True])
def test_a_refused_truncate_changes_nothing(n):
    cache, *_ = filled(5)
    before = state(cache)
    with pytest.raises((ValueError, TypeError), match=r"\[[\w .]+\] .*; got "):
        cache.truncate(n)
    assert state(cache) == before


def test_a_refused_model_call_changes_nothing():
    """The length advances once, after the last layer."""
    gpt, tokens = tiny(), ids(2, 8)
    cache = gpt.new_cache(2)
    full = run(gpt, tokens, [8])
    run(gpt, tokens[:, :5], [5], cache)
    for bad in (ids(2, 4), ids(3, 1), np.full((2, 1), 11), np.full((2, 1), -1), np.full((2, 1), 0.5)):
        with pytest.raises((ValueError, IndexError, TypeError), match=r"\[[\w .]+\] .*; got "), no_grad():
            gpt(bad, cache=cache)
        assert len(cache) == 5
    same_bits(run(gpt, tokens[:, 5:], [3], cache), full[:, 5:])


def test_an_interrupted_model_call_changes_nothing(monkeypatch):
    gpt, tokens = tiny(), ids(2, 8)
    full, cache = run(gpt, tokens, [8]), gpt.new_cache(2)
    run(gpt, tokens[:, :5], [5], cache)
    last = list(dict(gpt.named_modules()).values())[-1] if hasattr(gpt, "named_modules") else gpt.ln_f

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(last), "forward", interrupt)
    with pytest.raises(KeyboardInterrupt), no_grad():
        gpt(tokens[:, 5:6], cache=cache)
    monkeypatch.undo()
    assert len(cache) == 5
    same_bits(run(gpt, tokens[:, 5:], [3], cache), full[:, 5:])


def test_capacity_is_kept():
    gpt = tiny()
    cache = gpt.new_cache(1, capacity=3)
    run(gpt, ids(1, 3), [3], cache)
    with pytest.raises(ValueError), no_grad():
        gpt(ids(1, 1), cache=cache)
    assert len(cache) == 3


def test_what_append_returns_is_the_memory_of_the_cache():
    """As its docstring says: valid until the cache is written again; a copy stays."""
    cache, k, _ = filled()
    k_all, _ = step(cache)
    kept = cmha.tensor(k_all)
    cache.truncate(5)
    step(cache, seed=7)
    assert not np.array_equal(array(k_all), array(kept))
    same_bits(array(kept)[:, :, :5], k)

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


# --- rows of unequal length -----------------------------------------------------------------------------------------

def test_b54_rows_of_unequal_length_are_rows_alone():
    """B54: each row's keys start at slot 0, its positions count its own tokens, nothing is padded."""
    gpt, tokens = tiny(), ids(3, 8)
    for fused in (True, False):
        for block in gpt.h:
            block.attn.fused = fused
        cache = gpt.new_cache(3)
        with no_grad():
            for row, n in enumerate((5, 1, 3)):
                gpt(tokens[row:row + 1, :n], cache=cache.row(row))
            assert cache.lengths.tolist() == [5, 1, 3] and len(cache) == 5
            found = [array(gpt(tokens[:, 5:6], cache=cache)), array(gpt(tokens[:, 6:8], cache=cache))]
        assert cache.lengths.tolist() == [8, 4, 6]
        for row, n in enumerate((5, 1, 3)):
            alone = np.concatenate([tokens[row, :n], tokens[row, 5:8]])[None]
            full = run(gpt, alone, [n + 3])
            same_bits(np.concatenate(found, axis=1)[row], full[0, n:])


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_layer_with_rows_of_unequal_length(is_causal):
    from .test_attention import make

    mha, x = make(12, 3, n_kv_head=1), normal(2, 6, 12)
    for fused in (True, False):
        mha.fused = fused
        cache = KVCache(2, 1, 4, 7)
        with no_grad():
            mha(cmha.tensor(x[:1, :4]), cache=cache.row(0), is_causal=True)
            mha(cmha.tensor(x[1:, :1]), cache=cache.row(1), is_causal=True)
            y = array(mha(cmha.tensor(x[:, 4:6]), cache=cache, is_causal=is_causal))
            for row, n in ((0, 4), (1, 1)):
                alone = KVCache(1, 1, 4, 7)
                mha(cmha.tensor(x[row:row + 1, :n]), cache=alone, is_causal=True)
                expected = mha(cmha.tensor(x[row:row + 1, 4:6]), cache=alone, is_causal=is_causal)
                same_bits(y[row], array(expected)[0])


def test_truncate_takes_a_number_for_each_row():
    gpt, tokens = tiny(), ids(2, 8)
    cache = gpt.new_cache(2)
    run(gpt, tokens, [6], cache)
    for bad in ([7, 1], [-1, 2], [1], [1, 2, 3], [1.0, 2.0], [[1, 2]]):
        with pytest.raises(ValueError, match=r"^\[kv_cache\] .*; got "):
            cache.truncate(bad)
    assert cache.lengths.tolist() == [6, 6]
    cache.truncate([2, 5])
    with no_grad():
        found = array(gpt(tokens[:, 5:6], cache=cache))
    for row, n in ((0, 2), (1, 5)):
        alone = np.concatenate([tokens[row, :n], tokens[row, 5:6]])[None]
        same_bits(found[row], run(gpt, alone, [n + 1])[0, n:])


def test_copies_of_chosen_rows_are_independent():
    """B53: branch one cache into several continuations; also of rows that differ in length."""
    gpt, tokens = tiny(), ids(2, 8)
    cache = gpt.new_cache(2)
    with no_grad():
        gpt(tokens[:1, :3], cache=cache.row(0))
        gpt(tokens[1:, :2], cache=cache.row(1))
    other = cache.copy([1, 0, 1])
    assert other.lengths.tolist() == [2, 3, 2] and cache.lengths.tolist() == [3, 2]
    with no_grad():
        found = array(gpt([[1], [2], [3]], cache=other))
        same_bits(array(gpt([[4], [5]], cache=cache))[1], run(gpt, np.array([[*tokens[1, :2], 5]]), [3])[0, 2:])
    for place, (row, n, new) in enumerate([(1, 2, 1), (0, 3, 2), (1, 2, 3)]):
        same_bits(found[place], run(gpt, np.array([[*tokens[row, :n], new]]), [n + 1])[0, n:])
    for bad in ([], [2], [-1], [0.5], 0):
        with pytest.raises((ValueError, IndexError), match=r"^\[kv_cache\] rows must be .*; got "):
            cache.copy(bad)


def test_overflow_of_one_row_changes_no_row():
    """B53: the shortest has room, the longest has not."""
    gpt, tokens = tiny(), ids(2, 8)
    cache = gpt.new_cache(2, capacity=5)
    with no_grad():
        gpt(tokens[:1, :4], cache=cache.row(0))
        before = cache.copy()
        with pytest.raises(ValueError, match=r"^\[gpt\] the cache is full; got 2 positions behind 4"):
            gpt(tokens[:, :2], cache=cache)
        assert cache.lengths.tolist() == [4, 0]
        same_bits(array(gpt(tokens[:, :1], cache=cache)), array(gpt(tokens[:, :1], cache=before)))


def test_reuse_keeps_the_beginning_in_common():
    gpt, cache = tiny(), tiny().new_cache(1)
    run(gpt, np.array([[1, 2, 3, 4, 5]]), [5], cache)
    for bad in ([[1, 2]], [0.5], "12"):
        with pytest.raises((ValueError, TypeError)):
            cache.reuse(bad)
    assert len(cache) == 5
    assert cache.copy().reuse([1, 2, 3, 4, 5, 6]) == 5
    assert cache.copy().reuse([1, 2, 3, 4, 5]) == 4  # the last one's logits are wanted
    assert cache.reuse([1, 2, 9, 4, 5, 6]) == len(cache) == 2
    same_bits(run(gpt, np.array([[9, 4]]), [2], cache), run(gpt, np.array([[1, 2, 9, 4]]), [4])[:, 2:])
    assert cache.reuse([7]) == len(cache) == 0
    with pytest.raises(ValueError, match=r"reuse needs a cache of one row; got 2"):
        gpt.new_cache(2).reuse([1])


def test_last_logits_are_those_of_a_full_pass():
    gpt, tokens = tiny(), ids(3, 7)
    with no_grad():
        full = array(gpt(tokens))
    gpt.train()
    gpt.dropout.p = 0.5
    same_bits(gpt.last_logits(tokens), full[:, 6:])
    same_bits(gpt.last_logits(tokens, 4), full[:, 3:])
    cache = gpt.new_cache(3)
    same_bits(gpt.last_logits(tokens[:, :5], 2, cache=cache), full[:, 3:5])
    same_bits(gpt.last_logits(tokens[:, 5:], cache=cache), full[:, 6:])
    assert gpt.training
    for bad in ((tokens, 8), (tokens, 0), (tokens[:, :0], 1), (tokens[:0], 1)):
        with pytest.raises(ValueError, match=r"^\[gpt\] .*; got "):
            gpt.last_logits(*bad)

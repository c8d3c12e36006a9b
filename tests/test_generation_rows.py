"""Rows of a generation: each is what it is alone, whatever its neighbours, their lengths and their ends."""

import numpy as np
import pytest

import cmha
from cmha import ByteTokenizer, CharTokenizer
from cmha.generate.sampling import check_sampling, next_token, uniform
from cmha.generate.stops import Stops

from .checking import same_bits
from .models import tiny

PROMPTS = [[5, 7, 9], [3], [1, 2, 3, 4, 5, 6, 0], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]  # the last is past the context
FULL = {"temperature": 0.9, "top_k": 8, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2}


def model():
    """Its positions are loud, so that the next id is not always the last one."""
    gpt = tiny(scale=0.2, block_size=9)
    gpt.load_state_dict(gpt.state_dict() | {"wpe.weight": gpt.wpe.weight.detach() * 4})
    return gpt


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, FULL], ids=["greedy", "sampled", "all"])
def test_b54_rows_of_unequal_length_are_rows_alone(options):
    """B54, D7: tokens and log-probabilities, across the end of the context, with rows that stop on the way."""
    gpt, seeds = model(), [11, 12, 13, 14]
    options = {"stop": [1, 8], "return_logprobs": True, **options}
    rows, logprobs = gpt.generate(PROMPTS, 14, seed=seeds, **options)
    assert len({len(row) - len(prompt) for row, prompt in zip(rows, PROMPTS, strict=True)}) > 1
    for i, prompt in enumerate(PROMPTS):
        alone, likely = gpt.generate([prompt], 14, seed=seeds[i], **options)
        assert rows[i] == alone[0].tolist() and logprobs[i] == likely[0].tolist()
        assert rows[i][: len(prompt)] == prompt
        pairs = list(gpt.stream([prompt], 14, seed=seeds[i], **options))
        assert pairs == list(zip(rows[i][len(prompt) :], logprobs[i], strict=True))


def test_a_list_ends_and_an_array_is_filled():
    gpt = model()
    rows = [gpt.generate([p], 12, temperature=0, stop=[1]).tolist()[0] for p in ([1, 2], [9, 3])]
    together, logprobs = gpt.generate([[1, 2], [9, 3]], 12, temperature=0, stop=[1], return_logprobs=True)
    longest = max(map(len, rows))
    assert together.shape == (2, longest) and logprobs.shape == (2, longest - 2) and logprobs.dtype == np.float32
    for row, alone, likely in zip(together.tolist(), rows, logprobs, strict=True):
        assert row == alone + [alone[-1]] * (longest - len(alone))
        assert (likely[len(alone) - 2 :] == 0).all() and (likely[: len(alone) - 2] < 0).all()
    assert [len(r) for r in gpt.generate([[1, 2], [9]], 0)] == [2, 1]


def test_one_seed_draws_for_each_row_and_a_list_for_each_alone():
    gpt = model()
    same = gpt.generate([[1]] * 3, 8, seed=5)
    assert len({tuple(row) for row in same.tolist()}) == 3
    assert len({tuple(row) for row in gpt.generate([[1]] * 3, 8, seed=[5, 5, 5]).tolist()}) == 1
    assert same[0].tolist() == gpt.generate([[1]], 8, seed=5)[0].tolist()
    for seed in ([1, 2], [1, 2, 3, 4], ()):
        with pytest.raises(ValueError, match=r"one int, or one for each row; got \d for 3 rows"):
            gpt.generate([[1]] * 3, 8, seed=seed)


def test_threads_change_no_token():
    gpt = tiny(scale=0.3, vocab_size=300, n_embd=400, n_head=4, block_size=20)  # wide enough for several threads
    found = []
    for threads in (1, 2, 3):
        cmha.set_num_threads(threads)
        found.append(gpt.generate([[1, 2, 3], [7], [8, 9]], 18, seed=3, return_logprobs=True))
    assert found[0] == found[1] == found[2]


def test_logprobs_are_the_score_of_the_text():
    gpt = model()
    ids, logprobs = gpt.generate([[5, 7, 9]], 6, seed=1, top_k=3, return_logprobs=True)
    same_bits(gpt.score(ids[0])[2:], logprobs[0])


def test_the_descending_order_is_that_of_a_stable_sort():
    """Inverse CDF by descending probability, then id; the oracle sorts everything."""
    rng = np.random.default_rng(0)
    for n in range(200):
        logits = np.float32(rng.integers(-3, 4, 40) * rng.choice([0.5, 30.0]))  # many ties; many that vanish
        k = int(rng.integers(1, 45))
        kept = np.argsort(-logits, kind="stable")[:k]
        x = np.full(40, -np.inf)
        x[kept] = logits[kept]
        p = np.exp(x - x.max()).astype(np.float32).astype(np.float64)
        order = np.argsort(-p, kind="stable")
        mass = np.cumsum(p[order])
        expected = order[np.searchsorted(mass, uniform(7, 0, n) * mass[-1], side="right")]
        assert next_token(logits, check_sampling(top_k=k, seed=7), n=n) == expected


# --- stop strings ---------------------------------------------------------------------------------------------------

class Fixed:
    """Draws nothing: says the bytes of a text one after the other, whatever the prompt."""

    def __init__(self, data):
        from types import SimpleNamespace

        self.data, self.cfg, self.at = data, SimpleNamespace(vocab_size=256, block_size=1), -1

    def last_logits(self, ids, count=1, *, cache=None):
        self.at += 1
        logits = np.full((len(ids), 1, 256), -9, np.float32)
        logits[:, :, self.data[self.at]] = 9
        return logits

    def new_cache(self, *sizes, **options):
        from .test_generate import TableCache

        return TableCache(np.zeros(1, np.int64))


@pytest.mark.parametrize("strings, said", [
    (["END"], "a b EN END"), ("\u20ac", "a b EN END\n\u20ac"), (["zz", " E"], "a b E"), (["nowhere"], None), ([], None),
])  # fmt: skip
def test_stop_strings_end_with_the_id_that_completes_them(strings, said):
    from cmha.generate import generate

    text = "a b EN END\n\u20ac more"
    out = generate(Fixed(text.encode()), [[69, 78, 68]], len(text.encode()), stop_strings=strings,
                   tokenizer=ByteTokenizer(), temperature=0)  # fmt: skip
    assert bytes(out[0].tolist()) == b"END" + (said if said is not None else text).encode()  # "END" before is no end


def test_stop_strings_pass_over_the_ids_of_a_padded_vocabulary():
    """They have no text; a stop string does not reach across one, as in TextUntil."""
    stops = Stops(65, None, "bc", CharTokenizer("abc"))
    assert not stops.met([64]) and not stops.met([1, 64, 2]) and stops.met([64, 1, 2]) and not stops.met([1, 2, 64])


def test_stop_strings_of_characters_and_rows():
    gpt, tokenizer = model(), CharTokenizer("abcdefghijk")
    free = gpt.generate([[1, 2], [9, 3]], 12, temperature=0)
    word = tokenizer.decode(free[0, 4:6])
    out = gpt.generate([[1, 2], [9, 3]], 12, temperature=0, stop_strings=[word], tokenizer=tokenizer)
    end = tokenizer.decode(free[0, 2:]).index(word) + 2 + 2
    assert out[0, :end].tolist() == free[0, :end].tolist() and (out[0, end:] == free[0, end - 1]).all()
    alone = gpt.generate([[9, 3]], 12, temperature=0, stop_strings=[word], tokenizer=tokenizer)
    assert out[1, : alone.shape[1]].tolist() == alone[0].tolist()


# --- a cache handed in ----------------------------------------------------------------------------------------------

def counting(gpt, monkeypatch):
    """The number of positions that the model computes, in a list."""
    seen, hidden = [], gpt._hidden
    monkeypatch.setattr(gpt, "_hidden", lambda ids, cache: (seen.append(ids.size), hidden(ids, cache))[1])
    return seen


def test_a_beginning_in_common_is_computed_once(monkeypatch):
    gpt = tiny(scale=0.6, block_size=20)
    fresh = [gpt.generate([p], 4, seed=3).tolist() for p in ([1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 9, 8, 8])]
    cache, seen = gpt.new_cache(1), counting(gpt, monkeypatch)
    assert gpt.generate([[1, 2, 3, 4, 5]], 4, seed=3, cache=cache).tolist() == fresh[0]
    assert seen == [5, 1, 1, 1] and len(cache) == 8
    del seen[:]
    assert [[1, 2, 3, 9, *gpt.stream([[1, 2, 3, 9]], 4, seed=3, cache=cache)]] == fresh[1]
    assert seen == [1, 1, 1, 1]
    del seen[:]
    assert gpt.generate([[1, 2, 3, 9, 8, 8]], 4, seed=3, cache=cache).tolist() == fresh[2]
    assert sum(seen) <= 5


def test_a_cache_handed_in_goes_past_the_context():
    gpt, cache = model(), None
    for length in (4, 9, 12):
        cache = gpt.new_cache(1)
        prompt = list(range(length))[:11]
        assert gpt.generate([prompt], 9, seed=1, cache=cache).tolist() == gpt.generate([prompt], 9, seed=1).tolist()


def test_a_cache_that_does_not_fit_is_refused_and_unchanged():
    gpt = model()
    cache = gpt.new_cache(1, capacity=5)
    gpt.generate([[1, 2]], 2, seed=1, cache=cache)
    before = cache.ids.copy()
    for ids, n, bad in (([[1, 2]], 9, cache), ([[1], [2]], 1, cache), ([[1]], 1, gpt.new_cache(2))):
        with pytest.raises(ValueError, match=r"^\[generate\] (the|a) cache .*; got "):
            gpt.generate(ids, n, cache=bad)
    assert len(cache) == 3 and (cache.ids == before).all()


def test_the_prefix_of_many_rows_is_computed_once():
    """KVCache.copy(rows): one beginning, three continuations."""
    gpt = tiny(scale=0.6, block_size=20)
    cache = gpt.new_cache(1)
    gpt.last_logits([[1, 2, 3, 4]], cache=cache)
    forked = cache.copy([0, 0, 0])
    same_bits(gpt.last_logits([[5], [6], [7]], cache=forked)[:, 0],
              np.stack([gpt.last_logits([[1, 2, 3, 4, last]])[0, 0] for last in (5, 6, 7)]))  # fmt: skip
    assert len(cache) == 4 and cache.batch_size == 1 and len(forked) == 5

"""Sampling and the generation loop."""

from types import SimpleNamespace

import numpy as np
import pytest

import cmha
from cmha import GPT, GPTConfig
from cmha.generate import generate, stream
from cmha.generate.sampling import MAX_SEED, check_sampling, next_token, uniform


class Table:
    """A model whose logits depend on the last id alone: row i of the table follows id i."""

    def __init__(self, rows, block_size=7):
        self.table = np.asarray(rows, np.float32)
        self.cfg = SimpleNamespace(vocab_size=self.table.shape[1], block_size=block_size)
        self.calls = 0

    def new_cache(self, batch_size, capacity=None):
        return TableCache(np.zeros(batch_size, np.int64))

    def last_logits(self, ids, count=1, *, cache=None):
        self.calls += 1
        if cache is not None:
            cache.lengths += ids.shape[1]
        return self.table[ids[:, -count:]]


class TableCache:
    """Only the lengths of one."""

    def __init__(self, lengths):
        self.lengths = lengths

    def row(self, i):
        return TableCache(self.lengths[i : i + 1])

    def copy(self, rows):
        return TableCache(self.lengths[rows])


def chain(successors):
    """A table in which id i is followed by successors[i], whatever the temperature."""
    table = np.full((len(successors), len(successors)), -50, np.float32)
    table[np.arange(len(successors)), successors] = 50
    return Table(table)


def draws(logits, n=1, **options):
    sampling = check_sampling(**{"seed": 3, **options})
    return [next_token(np.float32(logits), sampling, n=i) for i in range(n)]


def tiny(block_size=11, seed=4):
    cmha.manual_seed(seed)
    gpt = GPT(GPTConfig(vocab_size=13, block_size=block_size, n_layer=2, n_head=3, n_embd=6))
    for name, parameter in gpt.named_parameters():
        if parameter.ndim == 2:  # the start is too flat for ids to differ
            gpt.load_state_dict(gpt.state_dict() | {name: parameter.detach() * 20})
    return gpt


@pytest.mark.parametrize("temperature", [0, 1e-40, 1e-6])
def test_b55_temperature_towards_zero_is_greedy(temperature):
    assert set(draws([1, 3, 2], 20, temperature=temperature)) == {1}
    assert set(draws([-1e30, 1e30, 2], 5, temperature=temperature)) == {1}


def test_b55_temperature_limits():
    assert draws([3, 3, 1], temperature=0) == [0]
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^\[generate\] temperature must be .*; got "):
            check_sampling(temperature=bad)
    for bad in ("1", None, True):
        with pytest.raises(TypeError, match="temperature"):
            check_sampling(temperature=bad)
    assert len(set(draws([1, 3, 2], 60, temperature=1e30))) == 3


def test_b56_top_k_at_both_ends():
    logits = [0.3, 1.1, -0.4, 1.0, 0.2]
    free = draws(logits, 200)
    assert set(draws(logits, 50, top_k=1)) == {1}
    assert set(draws(logits, 200, top_k=4)) == {0, 1, 3, 4}
    for k in (5, 6, 100_000, np.int64(5)):
        assert draws(logits, 200, top_k=k) == free
    for bad in (0, -1, 2.5):
        with pytest.raises(ValueError, match=r"^\[generate\] top_k must be an integer of at least 1; got "):
            check_sampling(top_k=bad)


def test_top_k_keeps_exactly_k_of_equal_logits():
    assert set(draws([2, 2, 2, 1], 100, top_k=2)) == {0, 1}
    close = np.float32([0, np.nextafter(np.float32(0), np.float32(1))])  # equal as probabilities, not as logits
    assert draws(close, top_k=1) == draws(close, temperature=0) == [1]


@pytest.mark.parametrize("top_p, kept", [(0.01, {2}), (0.45, {2}), (0.55, {0, 2}), (0.85, {0, 1, 2}), (1, {0, 1, 2})])
def test_top_p_keeps_ids_while_the_mass_before_them_is_below_p(top_p, kept):
    assert set(draws(np.log([0.3, 0.2, 0.5]), 200, top_p=top_p)) == kept


def test_min_p_and_the_order_of_filters():
    logits = np.log([0.4, 0.3, 0.15, 0.1, 0.05])
    assert set(draws(logits, 300, min_p=0.3)) == {0, 1, 2}
    # top-k leaves 0.4, 0.3 of 0.7: the first has 0.57 of the rest, so p = 0.55 keeps it alone
    assert set(draws(logits, 100, top_k=2, top_p=0.55)) == {0}
    assert set(draws(logits, 100, top_p=0.55)) == {0, 1}
    # temperature first: at 0.5 the shares are 0.16, 0.09, ... of 0.285
    assert set(draws(logits, 100, temperature=0.5, top_p=0.55)) == {0}


def test_repetition_penalty_lowers_seen_ids_whatever_their_sign():
    sampling = check_sampling(temperature=0, repetition_penalty=2)
    assert next_token(np.float32([3, 2, 0]), sampling, seen=np.array([True, False, False])) == 1
    assert next_token(np.float32([-1, -1.5, -9]), sampling, seen=np.array([True, False, False])) == 1
    model = Table(np.tile(np.float32([4, 3, 2.5]), (3, 1)))
    assert generate(model, [[2]], 4, temperature=0, repetition_penalty=1.5).tolist() == [[2, 0, 1, 0, 0]]


def test_frequencies_are_the_probabilities():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    counts = np.bincount(draws(np.log(p), 4000), minlength=4)
    assert (np.abs(counts - 4000 * p) < 5 * np.sqrt(4000 * p)).all(), counts
    hidden = draws([0, -np.inf, 0], 200)
    assert set(hidden) == {0, 2}


def test_draw_is_a_function_of_seed_row_and_number():
    values = [uniform(seed, row, n) for seed in (0, 1, MAX_SEED) for row in (0, 1, 2) for n in (0, 1, 2)]
    assert len(set(values)) == 27 and all(0 <= u < 1 for u in values)
    assert uniform(5, 2, 9) == uniform(5, 2, 9)
    assert uniform(0, 0, 0).hex() == "0x1.7a5d3204726c0p-7"


@pytest.mark.parametrize("logits", [[np.nan, 0], [np.inf, 0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_distribution_are_refused(logits, temperature):
    with pytest.raises(ValueError, match=r"new token 0 of row 0"):
        draws(logits, temperature=temperature)


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0}, {"top_p": 1.1}, {"top_p": float("nan")}, {"min_p": -0.1}, {"min_p": 2}, {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")}, {"seed": -1}, {"seed": 2**63}, {"seed": 1.5}, {"seed": [3, -1]},
        {"stop": -1}, {"stop": 5}, {"stop": [0, 7]}, {"stop_strings": ""}, {"stop_strings": ["a", ""]},
    ],
)  # fmt: skip
def test_an_option_out_of_range_is_named(options):
    with pytest.raises(ValueError) as error:
        generate(chain([1, 2, 3, 4, 0]), [[0], [1]], 2, tokenizer=cmha.ByteTokenizer(), **options)
    assert str(error.value).startswith(f"[generate] {next(iter(options))} must be ") and "; got " in str(error.value)


def test_unknown_option_and_wrong_types():
    wrong = [{"top_q": 1}, {"top_k": "3"}, {"stop": "ab"}, {"seed": True}, {"top_p": [0.5]}, {"stop_strings": 3}]
    wrong += [{"stop_strings": ["a", 1]}, {"stop_strings": "a"}, {"return_logprobs": 1}, {"cache": 3}, {"progress": 3}]
    for options in wrong:
        with pytest.raises(TypeError):
            generate(chain([1, 0]), [[0]], 2, **options)


def test_b61_rows_stop_each_for_itself():
    model = chain([1, 2, 3, 4, 4, 5])  # 0 1 2 3 4 4 4 ...
    out = generate(model, [[2], [0]], 9, stop=[3])
    assert out.tolist() == [[2, 3, 3, 3], [0, 1, 2, 3]] and out.dtype == np.int64
    assert generate(model, [[0]], 9, stop=3).tolist() == [[0, 1, 2, 3]]  # row 1 as if alone
    assert generate(model, [[3, 0]], 2, stop={3}).tolist() == [[3, 0, 1, 2]]  # in the prompt it means nothing
    assert generate(model, [[2]], 5, stop=[3]).tolist() == [[2, 3]]  # as the first new token
    assert list(stream(model, [[1]], 9, stop=4)) == [2, 3, 4]


def test_b61_counts_and_empty_prompts():
    model = chain([1, 2, 0])
    assert generate(model, [[0, 1], [2, 0]], 0).tolist() == [[0, 1], [2, 0]] and model.calls == 0
    assert generate(model, [[0, 1]], 1).tolist() == [[0, 1, 2]]
    assert list(stream(model, [[0]], 0)) == []
    for bad in (-1, 1.5):
        with pytest.raises(ValueError, match="max_new_tokens"):
            generate(model, [[0]], bad)
    for bad in ([], [[]], [[], []], np.zeros((0, 3), np.int64), [0, 1], 0):
        with pytest.raises(ValueError, match=r"^\[generate\] ids must be \(B, T\)"):
            generate(model, bad, 1)


def test_wrong_ids_are_refused_when_called():
    model = chain([1, 2, 0])
    with pytest.raises(ValueError, match=r"at least one row and one token in each; got rows of shapes"):
        generate(model, [[0], [0, 1, 2], []], 1)
    with pytest.raises(TypeError, match="integers"):
        generate(model, [[0.0]], 1)
    with pytest.raises(TypeError, match="integers"):
        generate(model, [[True]], 1)
    for bad in (-1, 3):
        with pytest.raises(ValueError, match=f"from 0 to 2; got {bad} at position 1 of row 1"):
            stream(model, [[0, 1], [0, bad]], 1)
    with pytest.raises(ValueError, match=r"got 2 rows, expected \(1, T\)"):
        stream(model, [[0], [1]], 1)
    assert model.calls == 0
    for ids in (np.array([[0]], np.uint8), cmha.tensor([[0]]), ([0],), [np.array([0])]):
        assert generate(model, ids, 2).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5}, {"seed": 6, "top_k": 4, "repetition_penalty": 2}])
@pytest.mark.parametrize("length", [1, 5, 10, 11, 12, 17])
def test_past_the_context_as_a_loop_that_crops(length, options):
    gpt = tiny()
    ids = np.random.default_rng(length).integers(0, 13, (2, length))
    expected, sampling = ids.copy(), check_sampling(**options)
    for n in range(15):
        with cmha.no_grad():
            logits = gpt(expected[:, -11:]).numpy()[:, -1]
        new = []
        for row in range(2):
            seen = np.isin(np.arange(13), expected[row]) if "repetition_penalty" in options else None
            new.append(next_token(logits[row], sampling, row=row, n=n, seen=seen))
        expected = np.concatenate([expected, np.array(new)[:, None]], axis=1)
    out = gpt.generate(ids, 15, **options)
    assert out.tolist() == expected.tolist()
    assert list(gpt.stream(ids[:1], 15, **options)) == out[0, length:].tolist()
    assert gpt.generate(ids[:1], 15, **options).tolist() == out[:1].tolist()  # a row is as if alone


def test_seed_none_draws_one():
    gpt = tiny()
    assert len({tuple(gpt.generate([[1]], 12, temperature=3.0)[0].tolist()) for _ in range(4)}) > 1


def test_dropout_is_off_and_the_mode_comes_back():
    gpt = tiny()
    expected = gpt.eval().generate([[1, 2]], 12, seed=1)
    gpt.train()
    for module in (gpt.dropout, *(block.attn_dropout for block in gpt.h)):
        module.p = 0.5
    assert gpt.generate([[1, 2]], 12, seed=1).tolist() == expected.tolist()
    assert gpt.training and gpt.h[0].training
    tokens = gpt.stream([[1, 2]], 3)
    next(tokens)
    assert gpt.training and gpt([[1]]).requires_grad  # neither mode leaks out of a stream

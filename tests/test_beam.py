"""Beam search beside every continuation there is, and beside transformers."""

import itertools

import numpy as np
import pytest

from .test_generation_rows import model


def every_continuation(gpt, prompt, n, stop, penalty):
    """The best of all texts of up to n new ids that end with a stop id or have n of them."""
    every = np.array([[*prompt, *new] for new in itertools.product(range(gpt.cfg.vocab_size), repeat=n)])
    logprobs = gpt.score(every)[:, len(prompt) - 1 :].astype(np.float64)
    ended = np.isin(every[:, len(prompt) :], stop)
    lengths = np.where(ended.any(1), ended.argmax(1) + 1, n)
    sums = np.where(np.arange(n) < lengths[:, None], logprobs, 0).sum(1)
    best = np.argmax(sums / lengths.astype(np.float64) ** penalty)
    return every[best, len(prompt) : len(prompt) + lengths[best]].tolist()


@pytest.mark.parametrize("stop, penalty", [([], 1.0), ([6, 4], 1.0), ([6, 4], 0.0), ([6], -2.0), ([6], 3.0)])
def test_a_wide_beam_finds_the_best_of_all(stop, penalty):
    gpt = model()
    found, logprobs = gpt.generate(
        [[5, 7]], 3, num_beams=121, stop=stop, length_penalty=penalty, return_logprobs=True
    )
    assert found[0, 2:].tolist() == every_continuation(gpt, [5, 7], 3, stop, penalty)
    np.testing.assert_array_equal(gpt.score(found[0])[1:], logprobs[0])


def test_one_beam_is_greedy_and_more_are_no_worse():
    gpt = model()
    greedy, likely = gpt.generate([[1, 2]], 7, temperature=0, return_logprobs=True)
    assert gpt.generate([[1, 2]], 7, temperature=0, num_beams=1).tolist() == greedy.tolist()
    beams = [gpt.generate([[1, 2]], 7, num_beams=n, return_logprobs=True)[1].sum() for n in (2, 5, 40)]
    assert beams[0] >= likely.sum() - 1e-6 and beams[2] >= beams[0]


def test_rows_and_the_end_of_the_context():
    gpt = model()
    prompts = [[5, 7, 9], [3], [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]]
    rows = gpt.generate(prompts, 11, num_beams=3, stop=8)
    for row, prompt in zip(rows, prompts, strict=True):
        assert row == gpt.generate([prompt], 11, num_beams=3, stop=8)[0].tolist()
    cache = gpt.new_cache(1)
    assert gpt.generate([[5, 7, 9]], 11, num_beams=3, stop=8, cache=cache)[0].tolist() == rows[0]
    assert len(cache) == 3 and gpt.generate([[3]], 0, num_beams=4).tolist() == [[3]]


def test_options_that_beams_do_not_have():
    gpt = model()
    for options in ({"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}, {"seed": 1}):
        with pytest.raises(ValueError, match=r"^\[generate\] beam search draws and .*; got num_beams=2"):
            gpt.generate([[1]], 3, num_beams=2, **options)
    for options in ({"num_beams": 0}, {"length_penalty": float("nan")}, {"num_beams": 1.5}):
        with pytest.raises(ValueError, match=r"must be .*; got "):
            gpt.generate([[1]], 3, **options)


@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0, 2.0])
def test_transformers_finds_the_same(penalty, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    gpt = model()
    gpt.save_pretrained(tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 3, 2, 1):
        prompt = rng.integers(0, 11, n).tolist()
        for beams, stop in itertools.product((2, 4), (None, 4, [4, 6])):
            options = {"num_beams": beams, "max_new_tokens": 6, "length_penalty": penalty, "do_sample": False}
            options |= {"eos_token_id": stop, "pad_token_id": 0}
            ids = torch.tensor([prompt])
            expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
            found = gpt.generate([prompt], 6, num_beams=beams, length_penalty=penalty, stop=stop)
            assert found[0].tolist() == expected[0, : found.shape[1]].tolist(), (prompt, options, stop)

"""Writing on: from logits to the next id, and the loop around it.

A row's next id is chosen in this order, each filter on the renormalised rest:

    repetition penalty p   a seen id's logit is divided by p where positive, else multiplied (Keskar et al. 2019)
    temperature t          logits / t; 0 is greedy, ties to the lowest id
    top-k                  exactly the k largest logits, ties to the lowest id; k >= V filters nothing
    top-p                  while the mass before it is below p (Holtzman et al. 2020)
    min-p                  at least min_p times the largest probability (Nguyen et al. 2024)
    draw                   inverse CDF in double, by descending probability, then id

Draw n of row i with seed s is a function of (s, i, n): no state, so streaming, stopping and batching change nothing.
"""

import os
from dataclasses import dataclass

import numpy as np

from cmha import _core
from cmha.autograd import no_grad
from cmha.errors import check_integer, check_number, message

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Sampling:
    """Checked options of a generation; see the top of this file."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop: frozenset = frozenset()
    seed: int = 0


def draw_seed():
    """A seed from the operating system."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def check_sampling(
    vocab_size, *, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0, stop=None, seed=None
):
    """The options as a Sampling; a value that makes no sense is one error that names it."""
    positive = (lambda x: x > 0, "a finite number above 0")
    share = (lambda x: 0 < x <= 1, "a number above 0 and at most 1")
    stops = [] if stop is None else list(stop) if hasattr(stop, "__iter__") else [stop]
    return Sampling(
        check_number("generate", "temperature", temperature, lambda x: x >= 0, "a finite number of at least 0"),
        None if top_k is None else check_integer("generate", "top_k", top_k, 1),
        None if top_p is None else check_number("generate", "top_p", top_p, *share),
        None if min_p is None else check_number("generate", "min_p", min_p, lambda x: 0 <= x <= 1, "from 0 to 1"),
        check_number("generate", "repetition_penalty", repetition_penalty, *positive),
        frozenset(check_integer("generate", "stop", token, 0, vocab_size - 1) for token in stops),
        draw_seed() if seed is None else check_integer("generate", "seed", seed, 0, MAX_SEED),
    )


def uniform(seed, row, n):
    """Draw n of a row in [0, 1): 53 bits of Philox, keyed by (seed, row), at counter n."""
    raw = np.random.Philox(key=[seed, row], counter=[n, 0, 0, 0]).random_raw()
    return (raw >> 11) * 2.0**-53


def next_token(logits, sampling, *, row=0, n=0, seen=None):
    """logits (V,) -> id; seen bool (V,): the ids that the repetition penalty is for."""
    x = np.array(logits, np.float64)
    if seen is not None:
        x = np.where(seen, np.where(x > 0, x / sampling.repetition_penalty, x * sampling.repetition_penalty), x)
    highest = x.max()
    if not np.isfinite(highest):
        rule = "logits must not hold NaN or +inf, nor -inf only"
        raise ValueError(message("generate", rule, f"{highest} for new token {n} of row {row}"))
    if sampling.temperature == 0:
        return int(x.argmax())
    x = (x - highest) / sampling.temperature  # the largest is 0 now, so no temperature is too small
    if sampling.top_k is not None and sampling.top_k < x.size:
        x[np.argsort(-x, kind="stable")[sampling.top_k :]] = -np.inf
    with np.errstate(over="ignore"):  # what is too far below becomes -inf, as it should
        x = x.astype(np.float32)
    p = np.asarray(_core.softmax_forward(_core.from_buffer(x), -1)).astype(np.float64)
    order = np.argsort(-p, kind="stable")  # stable: equal probabilities stay in the order of their ids
    p = p[order]
    p = p[p > 0]
    # Shares of what is left are compared and drawn, so the filters below need no division to renormalise.
    if sampling.top_p is not None and sampling.top_p < 1:
        mass = np.cumsum(p)
        p = p[np.concatenate(([0.0], mass[:-1])) < sampling.top_p * mass[-1]]
    if sampling.min_p is not None:
        p = p[p >= sampling.min_p * p[0]]
    mass = np.cumsum(p)
    drawn = np.searchsorted(mass, uniform(sampling.seed, row, n) * mass[-1], side="right")
    return int(order[min(drawn, p.size - 1)])


def generate(
    model, ids, max_new_tokens, *,
    temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0, stop=None, seed=None,
):  # fmt: skip
    """ids (B, T) -> int64 (B, T + n): the prompt and n <= max_new_tokens new ids.

    A row that has met a stop id goes on with that id; all is over when every row has met one.
    """
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options |= {"repetition_penalty": repetition_penalty, "stop": stop, "seed": seed}
    prompt, steps = _start(model, ids, max_new_tokens, options)
    return np.stack([*prompt.T, *steps], axis=1)


def stream(
    model, ids, max_new_tokens, *,
    temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0, stop=None, seed=None,
):  # fmt: skip
    """The new ids of one row, ids (1, T), one at a time and as soon as each is known; a stop id comes last."""
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options |= {"repetition_penalty": repetition_penalty, "stop": stop, "seed": seed}
    prompt, steps = _start(model, ids, max_new_tokens, options)
    if len(prompt) != 1:
        raise ValueError(message("stream", "ids must be one row", f"shape {prompt.shape}", "(1, T)"))
    return (int(new[0]) for new in steps)


def _start(model, ids, max_new_tokens, options):
    """Everything that can be refused is refused here, before a generator exists."""
    max_new_tokens = check_integer("generate", "max_new_tokens", max_new_tokens, 0)
    sampling = check_sampling(model.cfg.vocab_size, **options)
    prompt = _prompt(ids, model.cfg.vocab_size)
    return prompt, _steps(model, prompt, max_new_tokens, sampling)


def _prompt(ids, vocab_size):
    """ids as int64 (B, T), with at least one token a row, each within the vocabulary."""
    if isinstance(ids, (list, tuple)) and all(isinstance(row, (list, tuple)) for row in ids):
        lengths = sorted({len(row) for row in ids})
        if len(lengths) > 1:
            got = f"lengths from {lengths[0]} to {lengths[-1]}"
            raise ValueError(message("generate", "rows of ids must have one length", got))
    array = np.asarray(ids)
    if array.ndim != 2 or array.size == 0:
        rule = "ids must be (B, T) with at least one row and one token"
        raise ValueError(message("generate", rule, f"shape {array.shape}"))
    if array.dtype.kind not in "iu":
        raise TypeError(message("generate", "ids must be integers", f"dtype {array.dtype}"))
    outside = (array < 0) | (array >= vocab_size)
    if outside.any():
        row, column = (int(i) for i in np.argwhere(outside)[0])
        rule = f"ids must be from 0 to {vocab_size - 1}"
        raise ValueError(message("generate", rule, f"{int(array[row, column])} at position {column} of row {row}"))
    return array.astype(np.int64)


def _steps(model, prompt, max_new_tokens, sampling):
    """Yields the next ids (B,). Up to block_size tokens run on a KV cache; past it, as a loop that crops would have it,
    every token is computed from the last block_size ids, whose positions all change with each step."""
    block_size = model.cfg.block_size
    rows, length = prompt.shape
    window = prompt[:, -block_size:]
    stopped = np.full(rows, -1)  # the stop id that a row has met
    seen = None
    if sampling.repetition_penalty != 1:
        seen = np.zeros((rows, model.cfg.vocab_size), bool)
        np.put_along_axis(seen, prompt, True, axis=1)
    cache, fresh = None, window  # fresh: the tokens that the cache has not seen
    if length < block_size:
        cache = model.new_cache(rows, capacity=min(block_size, length + max_new_tokens))
    for n in range(max_new_tokens):
        if length + n > block_size:
            cache = None
        logits = _last_logits(model, window if cache is None else fresh, cache)
        new = stopped.copy()
        for row in np.flatnonzero(stopped < 0).tolist():
            new[row] = next_token(logits[row], sampling, row=row, n=n, seen=None if seen is None else seen[row])
            if new[row] in sampling.stop:
                stopped[row] = new[row]
        yield new
        if (stopped >= 0).all():
            return
        fresh = new[:, None]
        window = np.concatenate([window, fresh], axis=1)[:, -block_size:]
        if seen is not None:
            seen[np.arange(rows), new] = True


def _last_logits(model, ids, cache):
    """(B, V) of the last position, without dropout or a graph, whatever the caller has set."""
    training = model.training
    if training:
        model.eval()
    try:
        with no_grad():
            logits = model(ids) if cache is None else model(ids, cache=cache)
            return logits[:, -1].numpy()
    finally:
        if training:
            model.train()

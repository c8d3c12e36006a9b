"""From logits to the next id. A row's next id is chosen in this order, each filter on the renormalised rest:

    repetition penalty p   a seen id's logit is divided by p where positive, else multiplied (Keskar et al. 2019)
    temperature t          logits / t; 0 is greedy, ties to the lowest id
    top-k                  exactly the k largest logits, ties to the lowest id; k >= V filters nothing
    top-p                  while the mass before it is below p (Holtzman et al. 2020)
    min-p                  at least min_p times the largest probability (Nguyen et al. 2024)
    draw                   inverse CDF in double, by descending probability, then id

Draw n of row i with seed s is a function of (s, i, n): no state, so streaming, stopping and batching change nothing.
With a list of seeds, one for each row, draw n of row i is what (seeds[i], 0, n) gives: that of a run of the row alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cmha import _core
from cmha.errors import check_integer, check_number, message

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cmha.generate.options import Seed
    from cmha.types import FloatArray, IntArray

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Sampling:
    """Checked options of a generation; see the top of this file."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | tuple[int, ...] = 0  # or one for each row

    def key(self, row: int) -> tuple[int, int]:
        """What the draws of a row are a function of, beside their number."""
        return (self.seed[row], 0) if isinstance(self.seed, tuple) else (self.seed, row)


def draw_seed() -> int:
    """A seed from the operating system, an int from 0 to 2^63 - 1."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def check_sampling(
    *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
    repetition_penalty: float = 1.0, seed: Seed = None,
) -> Sampling:  # fmt: skip
    """The options as a Sampling; a value that makes no sense is one error that names it."""
    positive = (lambda x: x > 0, "a finite number above 0")
    share = (lambda x: 0 < x <= 1, "a number above 0 and at most 1")
    return Sampling(
        check_number("generate", "temperature", temperature, lambda x: x >= 0, "a finite number of at least 0"),
        None if top_k is None else check_integer("generate", "top_k", top_k, 1),
        None if top_p is None else check_number("generate", "top_p", top_p, *share),
        None if min_p is None else check_number("generate", "min_p", min_p, lambda x: 0 <= x <= 1, "from 0 to 1"),
        check_number("generate", "repetition_penalty", repetition_penalty, *positive),
        _check_seed(seed),
    )


def _check_seed(seed: Seed) -> int | tuple[int, ...]:
    if seed is None:
        return draw_seed()
    if isinstance(seed, list | tuple | np.ndarray) and np.ndim(seed) == 1:
        return tuple(check_integer("generate", "seed", s, 0, MAX_SEED) for s in seed)
    return check_integer("generate", "seed", seed, 0, MAX_SEED)


def uniform(seed: int, row: int, n: int) -> float:
    """Draw n of a row in [0, 1): 53 bits of Philox, keyed by (seed, row), at counter n."""
    raw: int = np.random.Philox(key=[seed, row], counter=[n, 0, 0, 0]).random_raw()
    return (raw >> 11) / 2**53


def check_logits(logits: NDArray[np.floating[Any]], *, row: int, n: int) -> float:
    """The largest of logits (V,), which have to be a distribution."""
    highest = float(logits.max())
    if not np.isfinite(highest):
        rule = "logits must not hold NaN or +inf, nor -inf only"
        raise ValueError(message("generate", rule, f"{highest} for new token {n} of row {row}"))
    return highest


def next_token(
    logits: NDArray[np.floating[Any]], sampling: Sampling, *, row: int = 0, n: int = 0,
    seen: NDArray[np.bool_] | None = None,
) -> int:  # fmt: skip
    """logits (V,) float32 -> id; seen bool (V,): the ids that the repetition penalty is for."""
    x = logits
    if seen is not None:
        x = np.array(x, np.float64)
        x = np.where(seen, np.where(x > 0, x / sampling.repetition_penalty, x * sampling.repetition_penalty), x)
    highest = check_logits(x, row=row, n=n)
    if sampling.temperature == 0:
        return int(x.argmax())
    # In double; the largest becomes 0, so no temperature is too small.
    x = (x.astype(np.float64, copy=False) - highest) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < x.size:
        x[~_largest(x, sampling.top_k)] = -np.inf
    with np.errstate(over="ignore"):  # what is too far below becomes -inf, as it should
        x = x.astype(np.float32)
    p = np.asarray(_core.softmax_forward(_core.from_buffer(x), -1))
    p, order = _descending(p)
    # Shares of what is left are compared and drawn, so the filters below need no division to renormalise.
    if sampling.top_p is not None and sampling.top_p < 1:
        mass = np.cumsum(p)
        p = p[np.concatenate(([0.0], mass[:-1])) < sampling.top_p * mass[-1]]
    if sampling.min_p is not None:
        p = p[p >= sampling.min_p * p[0]]
    mass = np.cumsum(p)
    drawn = np.searchsorted(mass, uniform(*sampling.key(row), n) * mass[-1], side="right")
    return int(order[min(drawn, p.size - 1)])


def _largest(x: NDArray[np.float64], k: int) -> NDArray[np.bool_]:
    """bool (V,): exactly the k largest of x, of equal ones those of the lowest ids."""
    least = np.partition(x, x.size - k)[x.size - k]
    kept: NDArray[np.bool_] = x > least
    equal = np.flatnonzero(x == least)
    kept[equal[: k - np.count_nonzero(kept)]] = True
    return kept


def _descending(p: FloatArray) -> tuple[NDArray[np.float64], IntArray]:
    """p float32 (V,) -> (those above 0 as float64, their ids), by descending value, then id. One sort of integers: the
    bits of floats above 0 have the order of their values, and below them stands the id."""
    ids = np.flatnonzero(p)
    bits = np.uint32(0xFFFFFFFF) - p[ids].view(np.uint32)
    key = np.sort(bits.astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64))
    order = (key & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return p[order].astype(np.float64), order


def log_softmax(logits: FloatArray) -> FloatArray:
    """logits (..., V) float32 -> log-probabilities under the model itself: no penalty, temperature or filter."""
    return np.asarray(_core.log_softmax_forward(_core.from_buffer(np.ascontiguousarray(logits)), -1))

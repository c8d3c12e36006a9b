"""Beam search: the likeliest continuation that a search of limited width finds, by Hugging Face's rules.

Every step extends num_beams unfinished texts by every id, and looks at the (1 + number of stop ids) * num_beams, at
least 2 * num_beams, likeliest extensions, by the sum of log-probabilities, ties to the lower beam, then id:

    one that ends (stop id, stop string, last step) is finished if it is among the first num_beams of them
    the first num_beams that do not end are the next step's texts

A finished text scores sum / (number of new ids) ** length_penalty; the num_beams best are kept. The search is over when
the best unfinished text, were it to end with its present sum and length, scores no better than the worst kept one (of
num_beams), or at max_new_tokens. The best finished text is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cmha.errors import check_integer, check_number, message
from cmha.generate.sampling import check_logits, log_softmax

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cmha.generate.rows import Rows
    from cmha.generate.stops import Stops
    from cmha.types import IntArray

NOT_FOR_BEAMS = {"temperature": 1.0, "repetition_penalty": 1.0, "top_k": None, "top_p": None, "min_p": None}
NOT_FOR_BEAMS |= {"seed": None}


class _Beam(NamedTuple):
    """A text behind the prompt."""

    total: float  # the sum of the log-probabilities
    new: list[int]
    logprobs: list[float]


def check_beams(num_beams: int, length_penalty: float, options: dict[str, Any]) -> tuple[int, float]:
    """(num_beams, length_penalty); with more than one beam, options of sampling are refused."""
    num_beams = check_integer("generate", "num_beams", num_beams, 1, 1024)
    bounds = (lambda x: -10 <= x <= 10, "a number from -10 to 10")
    length_penalty = check_number("generate", "length_penalty", length_penalty, *bounds)
    given = [name for name, default in NOT_FOR_BEAMS.items() if options[name] != default]
    if num_beams > 1 and given:
        rule = f"beam search draws and filters nothing: {' and '.join(given)} cannot be given with it"
        raise ValueError(message("generate", rule, f"num_beams={num_beams}"))
    return num_beams, length_penalty


def beam_search(
    rows: Rows, max_new_tokens: int, num_beams: int, length_penalty: float, stops: Stops, row: int,
    progress: Callable[[int], object],
) -> tuple[list[int], list[float]]:  # fmt: skip
    """(new ids, their log-probabilities) of the best text behind the one row that `rows` starts with."""
    vocab_size = rows.model.cfg.vocab_size
    wanted = max(2, 1 + len(stops.ids)) * num_beams
    beams = [_Beam(0.0, [], [])]
    finished: list[tuple[float, _Beam]] = []  # behind their scores
    for n in range(max_new_tokens):
        logits = rows.logits()
        progress(1)
        for x in logits:
            check_logits(x, row=row, n=n)
        logprobs = log_softmax(logits)  # (beams, V)
        sums = (np.array([[beam.total] for beam in beams], np.float64) + logprobs).ravel()
        going: list[tuple[int, _Beam]] = []  # (the beam it came from, the extended beam)
        for rank, place in enumerate(_best(sums, min(wanted, sums.size)).tolist()):
            source, token = divmod(place, vocab_size)
            before, logprob = beams[source], float(logprobs[source, token])
            extended = _Beam(float(sums[place]), [*before.new, token], [*before.logprobs, logprob])
            if n + 1 == max_new_tokens or stops.met(extended.new):
                if rank < num_beams:
                    finished.append((_score(extended, length_penalty), extended))
            elif len(going) < num_beams:
                going.append((source, extended))
        finished.sort(key=lambda text: -text[0])  # stable: of equal ones the earlier
        del finished[num_beams:]
        full = len(finished) == num_beams
        if not going or (full and _score(going[0][1], length_penalty) <= finished[-1][0]):
            break
        beams = [extended for _, extended in going]
        rows.choose([source for source, _ in going])
        rows.append([beam.new[-1] for beam in beams])
    _, best = finished[0]
    return best.new, best.logprobs


def _score(beam: _Beam, length_penalty: float) -> float:
    return float(beam.total / len(beam.new) ** length_penalty)


def _best(sums: NDArray[np.float64], count: int) -> IntArray:
    """Places of the `count` largest, in descending order, ties to the lower place."""
    least = np.partition(sums, sums.size - count)[sums.size - count]
    places = np.flatnonzero(sums >= least)
    return places[np.argsort(-sums[places], kind="stable")][:count]

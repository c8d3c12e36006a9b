"""Random numbers: counter-based (Philox), so that a draw depends on seed, place and step, never on what ran before.

Two users: `generator` feeds initialisation and rand/randn in order of the calls; `next_stream` numbers the dropout
sites of a step, and the kernel draws element by element from (seed, stream, element number in the global batch).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import SupportsIndex

import numpy as np

_SITES = 1 << 24  # dropout sites a step may have


class _State:
    def __init__(self, seed: int) -> None:
        self.seed = self.stream_seed = seed
        self.step, self.site, self.first_row = 0, 0, 0

    @functools.cached_property
    def generator(self) -> np.random.Generator:
        # made when first asked for: numpy.random takes a fifth of NumPy's import
        return np.random.Generator(np.random.Philox(key=self.seed))


_state = _State(0)
_here = threading.local()


def manual_seed(seed: SupportsIndex) -> None:
    """Start every stream of this process again from `seed`, an int from 0 to 2^64 - 1: rand, randn, new layers,
    dropout.

    rand and randn go on in the order of the calls. A dropout element is a function of seed, step, site and its own
    number (Philox, Salmon et al. 2011), so that neither threads nor the batch around a row change it.
    """
    global _state
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"[manual_seed] seed must be an int; got {seed!r}")
    if not 0 <= seed.__index__() < 1 << 64:
        raise ValueError(f"[manual_seed] seed must be 0 .. 2**64 - 1; got {seed}")
    _state = _State(seed.__index__())


def generator() -> np.random.Generator:
    """The NumPy generator behind rand, randn and initialisation."""
    return _state.generator


@contextlib.contextmanager
def no_init() -> Iterator[None]:
    """Inside (in this thread) rand and randn give zeros and draw nothing: for a model that is filled from a file."""
    before, _here.no_init = draws_nothing(), True
    try:
        yield
    finally:
        _here.no_init = before


def draws_nothing() -> bool:
    return bool(getattr(_here, "no_init", False))


def begin_step(step: int, first_row: int = 0, seed: int | None = None) -> None:
    """Dropout of what follows belongs to training step `step` of the run with this seed (by default manual_seed's);
    row 0 is row `first_row` of the global batch."""
    _state.step, _state.site, _state.first_row = step, 0, first_row
    _state.stream_seed = _state.seed if seed is None else seed


def next_stream() -> tuple[int, int, int]:
    """(seed, stream, first_row) of the next dropout site."""
    _state.site += 1
    return _state.stream_seed, (_state.step * _SITES + _state.site) % (1 << 64), _state.first_row


def position() -> tuple[int, int, int, int]:
    """Where dropout stands, for `rewind`: a forward pass that is run again draws the same numbers."""
    return _state.stream_seed, _state.step, _state.site, _state.first_row


def rewind(position: tuple[int, int, int, int]) -> None:
    _state.stream_seed, _state.step, _state.site, _state.first_row = position

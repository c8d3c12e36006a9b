"""Random numbers: counter-based (Philox), so that a draw depends on seed, place and step, never on what ran before.

Two users: `generator` feeds initialisation and rand/randn in order of the calls, of all threads; `next_stream` numbers
the dropout sites of a step, and the kernel draws element by element from (seed, stream, element number in the global
batch). Each Python thread numbers its own sites, so no other thread has a part in what a training run drops.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import SupportsIndex

import numpy as np

_SITES = 1 << 24  # dropout sites a step may have


class _Run:
    """What one manual_seed began."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @property
    def generator(self) -> np.random.Generator:
        """Made when first asked for: numpy.random takes a fifth of NumPy's import. NumPy's lock orders the draws."""
        made: np.random.Generator | None = vars(self).get("_generator")
        if made is None:  # setdefault: one generator, also where two threads are first
            made = vars(self).setdefault("_generator", np.random.Generator(np.random.Philox(key=self.seed)))
        return made


class _Here(threading.local):
    """What is each thread's own."""

    run: _Run | None = None  # whose sites the position counts
    position = (0, 0, 0, 0)  # seed, step, site, first row
    no_init = no_dropout = False


_run = _Run(0)
_here = _Here()


def manual_seed(seed: SupportsIndex) -> None:
    """Start every stream of this process again from `seed`, an int from 0 to 2^64 - 1: rand, randn, new layers,
    dropout.

    rand and randn go on in the order of the calls, of all threads. A dropout element is a function of seed, step, site
    (which each thread counts for itself) and its own number (Philox, Salmon et al. 2011), so that neither threads nor
    the batch around a row change it.
    """
    global _run
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"[manual_seed] seed must be an int; got {seed!r}")
    if not 0 <= seed.__index__() < 1 << 64:
        raise ValueError(f"[manual_seed] seed must be 0 .. 2**64 - 1; got {seed}")
    _run = _Run(seed.__index__())


def generator() -> np.random.Generator:
    """The NumPy generator behind rand, randn and initialisation."""
    return _run.generator


@contextlib.contextmanager
def no_init() -> Iterator[None]:
    """Inside (in this thread) rand and randn give zeros and draw nothing: for a model that is filled from a file."""
    before, _here.no_init = _here.no_init, True
    try:
        yield
    finally:
        _here.no_init = before


def draws_nothing() -> bool:
    return _here.no_init


@contextlib.contextmanager
def no_dropout() -> Iterator[None]:
    """Inside (in this thread) nothing is dropped, whatever the mode of a model, which other threads may be training."""
    before, _here.no_dropout = _here.no_dropout, True
    try:
        yield
    finally:
        _here.no_dropout = before


def drops_nothing() -> bool:
    return _here.no_dropout


def begin_step(step: int, first_row: int = 0, seed: int | None = None) -> None:
    """Dropout of what follows in this thread belongs to training step `step` of the run with this seed (by default
    manual_seed's); row 0 is row `first_row` of the global batch."""
    run = _run
    _here.run, _here.position = run, (run.seed if seed is None else seed, step, 0, first_row)


def next_stream() -> tuple[int, int, int]:
    """(seed, stream, first_row) of this thread's next dropout site."""
    seed, step, site, first_row = position()
    _here.position = seed, step, site + 1, first_row
    return seed, (step * _SITES + site + 1) % (1 << 64), first_row


def position() -> tuple[int, int, int, int]:
    """Where this thread's dropout stands, for `rewind`: a forward pass that is run again draws the same numbers."""
    if _here.run is not _run:  # there was a manual_seed since, or nothing was drawn here yet
        begin_step(0)
    return _here.position


def rewind(position: tuple[int, int, int, int]) -> None:
    _here.run, _here.position = _run, position

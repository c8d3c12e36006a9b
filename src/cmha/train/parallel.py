"""Data parallel training over MPI: `mpiexec -n 4 cmha train ...` gives the file that one process gives, byte for byte.

Each process computes the gradients of its share of the micro-batches (accumulate.py), and `reduce` adds the shares as
the same tree has them. Rank 0 alone chooses paths and writes. What every process needs (text, a run to go on with, a
model to start from) must be on a path that all of them can read.

Bytes: recursive halving (Thakur, Rabenseifner, Gropp 2005). On the way up the tree, a pair of processes exchanges
halves of what both still hold, so each sends (1 - 1/p) of the gradient, and as much again to hand the sums round. The
pair at distance 1, 2, 4, ... adds neighbouring subtrees, and every element is added by one process with the lower rank
on the left: halving cuts the vector, never the order of a sum.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from cmha import _core, threads
from cmha.errors import message
from cmha.train.accumulate import Gradients, OneProcess

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py import MPI


T = TypeVar("T")

SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")  # set by MPICH and Intel MPI, and by Open MPI
LAUNCHED = (*SIZES, "PMIX_RANK")  # the last one by srun --mpi=pmix
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
PATIENCE = 0.5  # seconds that a rank waits for each one before it to tell of an error that may be theirs too


def launched_rank() -> int | None:
    """This process's rank by its launcher's word, before MPI is there; None where nothing launched it, or it alone."""
    if not any(name in os.environ for name in LAUNCHED):
        return None
    if any(os.environ.get(name) == "1" for name in SIZES):  # alone: nothing that needs MPI
        return None
    found = (os.environ.get(name, "") for name in RANKS)
    return next((int(text) for text in found if text.isdigit()), 0)


def start() -> OneProcess:
    """The processes that work together, to be used in a `with`: under mpiexec all of its own, else this one alone."""
    if launched_rank() is None:
        return OneProcess()
    os.environ.setdefault("MPIR_CVAR_SUPPRESS_ABORT_MESSAGE", "1")  # the line that tells why is ours
    try:
        from mpi4py import MPI
    except ImportError:
        rule = "mpiexec started this, and working together needs mpi4py"
        raise ImportError(message("train", rule, hint="pip install 'cmha[mpi]'")) from None
    return MPIProcesses(MPI.COMM_WORLD, MPI.Get_processor_name())


class MPIProcesses(OneProcess):
    """The processes of an mpi4py communicator; machine: the name of the one this process is on.

    An error in a `with` block of one of them ends all: it is told once, and at the exit of the interpreter MPI_Abort
    takes down the others, wherever they wait. What `together` finds before the work begins ends them in order.
    """

    def __init__(self, comm: MPI.Intracomm, machine: str) -> None:
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        names = comm.allgather(machine)
        self.here = names.count(machine)  # processes on this machine
        self._flat = self._received = np.empty(0, np.float32)
        self._code: int | None = None  # of the exit, where MPI_Abort is due
        self._in_order = False
        atexit.register(self._abort)
        if "OMP_NUM_THREADS" not in os.environ:
            self._share_threads()

    def _share_threads(self) -> None:
        """Processes on one machine share its CPUs, unless the launcher has bound each to its own."""
        allowed = threads.default_num_threads()
        if allowed == (os.cpu_count() or 1):
            threads.set_num_threads(max(1, allowed // self.here))

    # ------------------------------------------------------------------------------------------ in and out
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or self._in_order:
            return
        ended = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        self._code = 130 if isinstance(error, KeyboardInterrupt) else ended
        time.sleep(PATIENCE * min(self.rank, 10))  # the same error elsewhere: a lower rank tells it, and ends us
        if self.rank and sys.stderr is not None:
            print(file=sys.stderr)  # below the line on which rank 0 shows its progress

    def _abort(self) -> None:
        if self._code is not None:
            if sys.stderr is not None:
                sys.stderr.flush()
            self.comm.Abort(self._code)

    def together(self, function: Callable[[], T]) -> T:
        """function() on every process; where it fails on some, all end, and the first tells."""
        try:
            result = function()
        except Exception as error:
            self._end_if_failed(str(error))
            raise
        self._end_if_failed(None)
        return result

    def _end_if_failed(self, text: str | None) -> None:
        """Ends this process where `text`, the error of this one, is not the first of them: that one tells."""
        errors = self.comm.allgather(text)
        failed = [rank for rank, text in enumerate(errors) if text is not None]
        if failed:
            self._in_order = True
            if self.rank != failed[0]:
                raise SystemExit(1)

    def first(self, function: Callable[[], T]) -> T:
        """function() of rank 0, on every process."""
        result = self.together(lambda: function() if self.rank == 0 else None)
        return cast("T", self.comm.bcast(result))

    def check_same(self, values: dict[str, Any]) -> None:
        """Refuses to begin where {name: value} is not the same everywhere."""

        def check() -> None:
            everywhere = self.comm.allgather(values)
            odd = [name for name in values if any(other[name] != values[name] for other in everywhere)]
            if odd:
                rule = "all processes must begin with the same"
                raise ValueError(message("train", rule, f"different {', '.join(odd)}"))

        self.together(check)

    # ------------------------------------------------------------------------------------------ in a step
    def agree(self, number: int | None) -> int | None:
        """The largest of the numbers that are not None, on every process; None where there is none."""
        sent, received = np.array([-1 if number is None else number], np.int64), np.empty(self.size, np.int64)
        self.comm.Allgather(sent, received)
        largest = int(received.max())
        return None if largest < 0 else largest

    def gather(self, value: T) -> list[T]:
        """[the value of rank 0, of rank 1, ...]"""
        return cast("list[T]", self.comm.allgather(value))

    def reduce(self, gradients: Gradients) -> Gradients:
        gradients.loss = self._tree_of_losses(gradients.loss)
        own = [array for array in gradients.arrays if array is not None]
        count = sum(array.size for array in own)
        if len(self._flat) != count:
            self._flat, self._received = np.empty(count, np.float32), np.empty(-(-count // 2), np.float32)
        at = 0
        for array in own:
            self._flat[at : at + array.size] = np.asarray(array).reshape(-1)
            at += array.size
        self._sum()
        at = 0
        for i, given in enumerate(gradients.arrays):
            if given is not None:
                part = self._flat[at : at + given.size].reshape(given.shape)
                gradients.arrays[i] = _core.from_buffer(part)  # no copy: it is read before the next step
                at += given.size
        return gradients

    def _tree_of_losses(self, loss: float) -> float:
        losses = np.empty(self.size, np.float64)
        self.comm.Allgather(np.array([loss], np.float64), losses)
        while len(losses) > 1:
            losses = losses[0::2] + losses[1::2]
        return float(losses[0])

    def _sum(self) -> None:
        """self._flat of every process becomes the sum of all of them."""
        flat, low, high, distance, steps = self._flat, 0, len(self._flat), 1, []
        while distance < self.size:
            partner, middle = self.rank ^ distance, (low + high) // 2
            halves = [flat[low:middle], flat[middle:high]]
            if self.rank > partner:
                halves.reverse()
            kept, given = halves
            received = self._received[: len(kept)]
            self.comm.Sendrecv(given, dest=partner, recvbuf=received, source=partner)
            left, right = (kept, received) if self.rank < partner else (received, kept)
            np.add(left, right, out=kept)
            steps.append((partner, kept, given))
            low, high = (low, middle) if self.rank < partner else (middle, high)
            distance *= 2
        for partner, kept, given in reversed(steps):
            self.comm.Sendrecv(kept, dest=partner, recvbuf=given, source=partner)

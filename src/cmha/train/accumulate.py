"""Gradients of a batch in parts: micro-batch i is a leaf of one fixed binary tree over the numbers 0 .. n - 1.

    sum of [first, stop) = sum of its left half + sum of its right half,   the left one longer by one where n is odd

The tree depends on n alone, so it does not matter who computes which leaf: with a power of two of processes each owns
one whole subtree (`share`), and what is left is the top of the same tree. At most ceil(log2 n) + 1 sets of gradients
exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cmha import _core
from cmha.errors import message
from cmha.tensor import Tensor

if TYPE_CHECKING:
    from types import TracebackType

    from cmha._core import Array

T = TypeVar("T")


class Gradients:
    """What some micro-batches add to a step: their part of the loss (a double), and an array per parameter or None."""

    __slots__ = ("loss", "arrays")

    def __init__(self, loss: float, arrays: list[Array | None]) -> None:
        self.loss, self.arrays = loss, arrays

    @classmethod
    def take(cls, loss: float, parameters: Sequence[Tensor]) -> Gradients:
        """Out of parameter.grad, which is None afterwards: the next micro-batch starts from nothing."""
        arrays = [None if p.grad is None else p.grad.data for p in parameters]
        for p in parameters:
            p.grad = None
        return cls(loss, arrays)

    def add(self, right: Gradients) -> Gradients:
        """self + right, in self; right is used up array by array, so that no third set is needed."""
        self.loss += right.loss
        for i, array in enumerate(right.arrays):
            if array is not None:
                left = self.arrays[i]
                self.arrays[i] = array if left is None else _core.add(left, array)
                right.arrays[i] = None
        return self

    def give(self, parameters: Sequence[Tensor]) -> None:
        """Into parameter.grad."""
        for p, array in zip(parameters, self.arrays, strict=True):
            p.grad = None if array is None else Tensor(array)


def tree_sum(first: int, stop: int, leaf: Callable[[int], Gradients]) -> Gradients:
    """leaf(first) + ... + leaf(stop - 1), from left to right, added in pairs as the tree has them."""
    if stop - first == 1:
        return leaf(first)
    middle = _middle(first, stop)
    left = tree_sum(first, middle, leaf)
    return left.add(tree_sum(middle, stop, leaf))


def share(count: int, rank: int, size: int) -> tuple[int, int]:
    """(first, stop) of the micro-batches of process `rank` of `size`: a subtree, log2(size) levels below the root."""
    if size & (size - 1) or size > count:
        rule = "the number of processes must be a power of two, and at most that of micro-batches"
        hint = "A smaller micro_batch_size (--micro-batch-size) makes more of them" if size > count else None
        raise ValueError(message("train", rule, f"{size} processes and {count} micro-batches", hint=hint))
    first, stop = 0, count
    while size > 1:
        size //= 2
        middle = _middle(first, stop)
        first, stop = (first, middle) if rank < size else (middle, stop)
        rank %= size
    return first, stop


def _middle(first: int, stop: int) -> int:
    return (first + stop + 1) // 2


class OneProcess:
    """The processes that share the work of a run, seen from one of them: which one it is of how many, and what they do
    together. This is one alone; parallel.py has several.

    reduce(gradients) adds what `share` gave to ranks r and r + d for d = 1, 2, 4, ..., the lower rank on the left, and
    returns the sum on every rank.
    """

    rank, size, here = 0, 1, 1  # here: on this machine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def together(self, function: Callable[[], T]) -> T:
        return function()

    def first(self, function: Callable[[], T]) -> T:
        return function()

    def check_same(self, values: dict[str, Any]) -> None:
        pass

    def agree(self, number: int | None) -> int | None:
        return number

    def gather(self, value: T) -> list[T]:
        return [value]

    def reduce(self, gradients: Gradients) -> Gradients:
        return gradients

"""The graph: which op made a tensor from which, in what order gradients flow back, and when the graph goes.

A Node is an op that ran: its vjp and, per argument, where the gradient goes: to the Node that made it, to the leaf
Tensor itself, or nowhere (None). Gradients of broadcast arguments are summed here, and here alone they are accumulated.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

from cmha import _core
from cmha.ops.embedding import RowGradient

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.tensor import Tensor
    from cmha.types import Event, Gradient, OpOfTwo, Shape, Vjp


class _PerThread(threading.local):
    off = 0  # depth of no_grad
    events: tuple[list[Event], ...] = ()  # the lists that `watch` records into


_state = _PerThread()
_taking = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child must not inherit it taken by a thread that it does not have
    os.register_at_fork(before=_taking.acquire, after_in_parent=_taking.release, after_in_child=_taking.release)


class no_grad(ContextDecorator):
    """Inside, as a context or a decorator, this thread builds no graph: results need no gradients.

    >>> x = cmha.ones(2, requires_grad=True)
    >>> with cmha.no_grad():
    ...     (x * 2).requires_grad
    False
    """

    def __enter__(self) -> None:
        _state.off += 1

    def __exit__(self, *_: object) -> None:
        _state.off -= 1


@contextmanager
def grad_enabled() -> Iterator[None]:
    """Inside, this thread builds a graph, also where no_grad stands around it."""
    before, _state.off = _state.off, 0
    try:
        yield
    finally:
        _state.off = before


def is_grad_enabled() -> bool:
    """Whether this thread builds a graph, that is, stands in no no_grad."""
    return not _state.off


class Node:
    __slots__ = ("name", "vjp", "parents", "shape", "saved", "born", "__weakref__")

    def __init__(
        self, name: str, vjp: Vjp, parents: Sequence[Node | Tensor | None], shape: Shape, saved: Sequence[Array]
    ) -> None:
        self.name, self.vjp, self.parents, self.shape = name, vjp, parents, shape
        self.saved: Sequence[Array] | None = saved  # None from the moment that a backward has taken the node
        self.born = _core.change_count()

    def check_unchanged(self) -> None:
        """What stood in memory at forward must still stand there: optimisers and loading write in place."""
        if self.saved is None:
            _freed()
        saved = self.saved if _core.last_loan() < self.born else [*self.saved, *_arrays_in(self.vjp)]
        for array in saved:
            if array.version > self.born:
                raise RuntimeError(
                    f"[backward] a tensor of shape {array.shape} that [{self.name}] needs was changed in place after "
                    "the forward pass; run the forward pass again"
                )


def _freed(*_: object) -> NoReturn:
    """The vjp of a node whose graph is gone."""
    raise RuntimeError("[backward] the graph was freed by an earlier backward; run the forward pass again")


def _arrays_in(value: object) -> Iterator[Array]:
    """The arrays that a vjp holds, an op's results among them: memory that was lent later can be written like any."""
    if isinstance(value, _core.Array):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _arrays_in(item)
    elif isinstance(value, dict):
        yield from _arrays_in(list(value.values()))
    elif isinstance(value, FunctionType):
        yield from _arrays_in([cell.cell_contents for cell in value.__closure__ or ()])


def lasting(array: Array) -> Array:
    """What is kept for later: a copy if others may write to the memory meanwhile."""
    return _core.copy(array) if array.shared else array


def apply(op: OpOfTwo, *tensors: Tensor, **options: Any) -> tuple[Array | tuple[Array, Array], Node | None]:
    """Run op on the tensors' arrays; returns (array or two arrays, Node or None)."""
    need = not _state.off and True in [t._requires_grad for t in tensors]
    arrays = [t._data for t in tensors]
    if need:
        arrays = [lasting(a) for a in arrays]
    events = _state.events
    if not events:
        out, vjp = op(*arrays, **options)
    else:
        start = time.perf_counter()
        out, vjp = op(*arrays, **options)
        first = out[0] if isinstance(out, tuple) else out
        event = op.__name__, arrays, first, time.perf_counter() - start
        for record in events:
            record.append(event)
    if not need:
        return out, None
    parents = [(t._node or t) if t._requires_grad else None for t in tensors]
    # But for lent memory only what is no op's result can be written in place: parameters, constants, detached aliases.
    saved = [a for a, t in zip(arrays, tensors, strict=True) if t._node is None]
    return out, Node(op.__name__, vjp, parents, (out[0] if isinstance(out, tuple) else out).shape, saved)


@contextmanager
def watch() -> Iterator[list[Event]]:
    """Records every op that this thread runs inside, as (name, input arrays, output array, seconds).

    Several may record at once, and end in any order.
    """
    record: list[Event] = []
    _state.events = (*_state.events, record)
    try:
        yield record
    finally:
        _state.events = tuple(other for other in _state.events if other is not record)


def is_recorded(record: list[Event]) -> bool:
    """Does this list of `watch` get what this thread runs now?"""
    return any(other is record for other in _state.events)


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, nothing is recorded: a backward pass runs parts of the forward pass again."""
    before, _state.events = _state.events, ()
    try:
        yield
    finally:
        _state.events = before


def dense(grad: Gradient) -> Array:
    return grad.dense() if isinstance(grad, RowGradient) else grad


def sum_to_shape(grad: Gradient, shape: Shape) -> Gradient:
    """Undo broadcasting: sum over the axes that were added or repeated."""
    return grad if grad.shape == shape else _core.sum_to(dense(grad), shape)


def _order(root: Node) -> list[Node]:
    """Nodes reachable from root, each before the nodes it was made from. A loop: graphs can be 100,000 nodes deep."""
    order: list[Node] = []
    seen, stack = {root}, [(root, iter(root.parents))]
    while stack:
        node, parents = stack[-1]
        for parent in parents:
            if isinstance(parent, Node) and parent not in seen:
                seen.add(parent)
                stack.append((parent, iter(parent.parents)))
                break
        else:
            order.append(node)
            stack.pop()
    order.reverse()
    return order


def backward(root: Node | Tensor, grad: Array) -> list[tuple[Tensor, Array]]:
    """Gradients of `root` (a Node or a leaf tensor) for `grad` to every leaf; returns [(leaf, gradient array)].

    Nothing is written to the leaves here, so an error on the way changes no gradient. The graph is taken as a whole,
    before the first vjp runs, and each node is freed once it ran.
    """
    if not isinstance(root, Node):
        return [(root, grad)]
    order = _order(root)
    with _taking:  # a node has one backward, also where two threads ask for it at once
        for node in order:
            node.check_unchanged()
        for node in order:
            node.saved = None
    grads: dict[Node, Gradient] = {root: grad}
    leaves: dict[Tensor, Gradient] = {}
    for node in order:
        dy = grads.pop(node, None)
        if dy is not None:
            dy = dense(dy)
            for parent, dx in zip(node.parents, node.vjp(dy), strict=True):
                if parent is None or dx is None:
                    continue
                into: dict[Any, Gradient] = grads if isinstance(parent, Node) else leaves
                dx = sum_to_shape(dx, parent.shape)
                if parent not in into:
                    into[parent] = dx
                elif isinstance(dx, RowGradient):
                    into[parent] = _core.embedding_add_rows(dense(into[parent]), dx.rows, dx.ids)
                else:
                    into[parent] = _core.add(dense(into[parent]), dx)
        node.vjp, node.parents = _freed, ()
    return [(leaf, dense(grad)) for leaf, grad in leaves.items()]

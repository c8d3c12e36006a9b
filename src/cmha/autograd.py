"""The graph: which op made a tensor from which, in what order gradients flow back, and when the graph goes.

A Node is an op that ran: its vjp and, per argument, where the gradient goes: to the Node that made it, to the leaf
Tensor itself, or nowhere (None). Gradients of broadcast arguments are summed here, and here alone they are accumulated.
"""

import os
import threading
import time
from contextlib import ContextDecorator, contextmanager

from cmha import _core
from cmha.ops.embedding import RowGradient


class _PerThread(threading.local):
    off = 0  # depth of no_grad
    events = None  # where `watch` records


_state = _PerThread()
_taking = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child must not inherit it taken by a thread that it does not have
    os.register_at_fork(before=_taking.acquire, after_in_parent=_taking.release, after_in_child=_taking.release)


class no_grad(ContextDecorator):
    """Inside (as a context or a decorator), this thread builds no graph."""

    def __enter__(self):
        _state.off += 1

    def __exit__(self, *_):
        _state.off -= 1


@contextmanager
def grad_enabled():
    """Inside, this thread builds a graph, also where no_grad stands around it."""
    before, _state.off = _state.off, 0
    try:
        yield
    finally:
        _state.off = before


def is_grad_enabled():
    return not _state.off


class Node:
    __slots__ = ("name", "vjp", "parents", "shape", "saved", "born", "__weakref__")

    def __init__(self, name, vjp, parents, shape, saved):
        self.name, self.vjp, self.parents, self.shape = name, vjp, parents, shape
        self.saved, self.born = saved, _core.change_count()

    def check_unchanged(self):
        """What stood in memory at forward must still stand there: optimisers and loading write in place."""
        if self.saved is None:
            raise RuntimeError("[backward] the graph was freed by an earlier backward; run the forward pass again")
        for array in self.saved:
            if array.version > self.born:
                raise RuntimeError(
                    f"[backward] a tensor of shape {array.shape} that [{self.name}] needs was changed in place after "
                    "the forward pass; run the forward pass again"
                )


def apply(op, *tensors, **options):
    """Run op on the tensors' arrays; returns (array or tuple of arrays, Node or None)."""
    need = not _state.off and True in [t._requires_grad for t in tensors]
    arrays = [t._data for t in tensors]
    if need:  # memory from outside may change before backward: keep a copy
        arrays = [_core.copy(a) if a.shared else a for a in arrays]
    events = _state.events
    if events is None:
        out, vjp = op(*arrays, **options)
    else:
        start = time.perf_counter()
        out, vjp = op(*arrays, **options)
        first = out[0] if isinstance(out, tuple) else out
        events.append((op.__name__, arrays, first, time.perf_counter() - start))
    if not need:
        return out, None
    parents = [(t._node or t) if t._requires_grad else None for t in tensors]
    # Only memory that is no op's result can be written in place: parameters, constants, detached aliases.
    saved = [a for a, t in zip(arrays, tensors, strict=True) if t._node is None]
    return out, Node(op.__name__, vjp, parents, (out[0] if isinstance(out, tuple) else out).shape, saved)


@contextmanager
def watch():
    """Records every op that this thread runs inside, as (name, input arrays, output array, seconds)."""
    before, _state.events = _state.events, []
    try:
        yield _state.events
    finally:
        _state.events = before


def dense(grad):
    return grad.dense() if isinstance(grad, RowGradient) else grad


def sum_to_shape(grad, shape):
    """Undo broadcasting: sum over the axes that were added or repeated."""
    return grad if grad.shape == shape else _core.sum_to(grad, shape)


def _order(root):
    """Nodes reachable from root, each before the nodes it was made from. A loop: graphs can be 100,000 nodes deep."""
    order, seen, stack = [], {root}, [(root, iter(root.parents))]
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


def backward(root, grad):
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
    grads, leaves = {root: grad}, {}
    for node in order:
        dy = grads.pop(node, None)
        if dy is not None:
            dy = dense(dy)
            for parent, dx in zip(node.parents, node.vjp(dy), strict=True):
                if parent is None or dx is None:
                    continue
                into = grads if isinstance(parent, Node) else leaves
                dx = sum_to_shape(dx, parent.shape)
                if parent not in into:
                    into[parent] = dx
                elif isinstance(dx, RowGradient):
                    into[parent] = _core.embedding_add_rows(dense(into[parent]), dx.rows, dx.ids)
                else:
                    into[parent] = _core.add(dense(into[parent]), dx)
        node.vjp, node.parents = None, ()
    return [(leaf, dense(grad)) for leaf, grad in leaves.items()]

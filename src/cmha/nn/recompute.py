"""Activation checkpointing (Chen et al. 2016): a module's inside is not kept for the backward pass but made again.

Memory goes from the sum of all modules' activations to their inputs and one module's inside, for one more forward pass.
The second pass has the same input, the same parameters and the same dropout draws, so its bits are those of the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cmha import random
from cmha.autograd import backward, grad_enabled, no_grad, unwatched
from cmha.tensor import Tensor, make

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.nn.module import Module
    from cmha.types import Vjp


def recompute(module: Module, x: Tensor) -> Tensor:
    """module(x) for one tensor in and one out; every gradient has the bits that module(x) itself would give."""
    parameters = module.parameters()
    if any(p.data.shared for p in parameters):  # others may write them before the second pass: keep what the ops keep
        out: Tensor = module(x)
        return out
    start = random.position()

    # an op: its arguments are x and the parameters, so their gradients are its own
    def checkpoint(x: Array, *_: Array) -> tuple[Array, Vjp]:
        with no_grad():
            y: Array = module(Tensor(x)).data

        def vjp(dy: Array) -> tuple[Array | None, ...]:
            inside = Tensor(x, requires_grad=True)
            after = random.position()
            random.rewind(start)
            try:
                with grad_enabled(), unwatched():
                    out = module(inside)
            finally:
                random.rewind(after)
            gradients = dict(backward(out._node, dy))
            return tuple(gradients.get(tensor) for tensor in (inside, *parameters))

        return y, vjp

    return make(checkpoint, x, *parameters)

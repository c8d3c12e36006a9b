"""Mean cross-entropy of logits against class numbers: mean over counted rows of log sum_j exp(x_j) - x_target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cmha import _core

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Vjp


def cross_entropy(
    logits: Array, targets: Array, *, ignore_index: int = -1, need_grad: bool = True
) -> tuple[Array, Vjp]:
    """Mean over the counted rows of log sum_j exp(x_j) - x_target;  dlogits = (softmax(logits) - onehot) dy / counted.

    logits (M, V), targets (M) int64. Rows whose target is ignore_index do not count; none counted gives 0.
    """
    loss, dlogits, _ = _core.cross_entropy(logits, targets, ignore_index, need_grad)

    def vjp(dy: Array) -> tuple[Array | None, None]:
        if dlogits is None or dy.item() == 1.0:
            return dlogits, None
        return _core.multiply(dlogits, dy), None

    return loss, vjp

"""Mean cross-entropy of logits against class numbers: mean over counted rows of log sum_j exp(x_j) - x_target."""

from cmha import _core


def cross_entropy(logits, targets, *, ignore_index=-1, need_grad=True):
    """logits (M, V), targets (M) int64. Rows whose target is ignore_index do not count; none counted gives 0."""
    loss, dlogits, _ = _core.cross_entropy(logits, targets, ignore_index, need_grad)

    def vjp(dy):
        return (dlogits if dy.item() == 1.0 else _core.multiply(dlogits, dy)), None

    return loss, vjp

"""Learning rate over the steps: a linear warm-up, then a cosine, a constant, or a constant with a decay at the end."""

from __future__ import annotations

import math

from cmha.errors import check_integer, check_number, message


def cosine_schedule(step: int, *, max_lr: float, min_lr: float, warmup_steps: int, decay_steps: int) -> float:
    """The learning rate of step 0, 1, 2, ...: warm-up, one period of a cosine (Loshchilov & Hutter 2017), min_lr::

        step < warmup_steps      max_lr * (step + 1) / (warmup_steps + 1)
        .. decay_steps           min_lr + (max_lr - min_lr) * (1 + cos(pi * t)) / 2,  t from 0 to 1
        step >= decay_steps      min_lr

    ValueError: warmup_steps above decay_steps, min_lr above max_lr.

    >>> [cmha.cosine_schedule(i, max_lr=1.0, min_lr=0.0, warmup_steps=1, decay_steps=3) for i in range(4)]
    [0.5, 1.0, 0.5, 0.0]
    """
    step, max_lr, min_lr = _checked("cosine_schedule", step, max_lr, min_lr, warmup_steps, decay_steps=decay_steps)
    if step < warmup_steps:
        return _warmup(step, max_lr, warmup_steps)
    if step >= decay_steps:
        return min_lr
    t = (step - warmup_steps) / (decay_steps - warmup_steps)
    return min_lr + (max_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * t))


def constant_schedule(step: int, *, max_lr: float, warmup_steps: int) -> float:
    """The rate of step 0, 1, 2, ...: max_lr * (step + 1) / (warmup_steps + 1) below warmup_steps, then max_lr."""
    step, max_lr, _ = _checked("constant_schedule", step, max_lr, 0.0, warmup_steps)
    return _warmup(step, max_lr, warmup_steps) if step < warmup_steps else max_lr


def wsd_schedule(
    step: int, *, max_lr: float, min_lr: float, warmup_steps: int, decay_steps: int, steps: int
) -> float:
    """The learning rate of step 0, 1, 2, ...: warm-up, stable, decay (Hu et al. 2024), straight down to min_lr::

        step < warmup_steps           max_lr * (step + 1) / (warmup_steps + 1)
        .. steps - decay_steps        max_lr
        .. steps                      max_lr + (min_lr - max_lr) * (step - steps + decay_steps) / decay_steps
        step >= steps                 min_lr

    ValueError: warm-up and decay longer than steps, min_lr above max_lr.
    """
    sizes = {"decay_steps": decay_steps, "steps": steps}
    step, max_lr, min_lr = _checked("wsd_schedule", step, max_lr, min_lr, warmup_steps, **sizes)
    if warmup_steps + decay_steps > steps:
        got = f"warmup_steps={warmup_steps}, decay_steps={decay_steps}, steps={steps}"
        raise ValueError(message("wsd_schedule", "warm-up and decay must fit in the steps", got))
    if step < warmup_steps:
        return _warmup(step, max_lr, warmup_steps)
    if step >= steps:
        return min_lr
    return max_lr + (min_lr - max_lr) * max(0, step - steps + decay_steps) / max(decay_steps, 1)


def _warmup(step: int, max_lr: float, warmup_steps: int) -> float:
    return max_lr * (step + 1) / (warmup_steps + 1)


def _checked(
    op: str, step: int, max_lr: float, min_lr: float, warmup_steps: int, **sizes: int
) -> tuple[int, float, float]:
    """(step, max_lr, min_lr), and every rule that the schedules share."""
    for name, value in {"step": step, "warmup_steps": warmup_steps, **sizes}.items():
        check_integer(op, name, value, 0)
    max_lr = check_number(op, "max_lr", max_lr, lambda x: x >= 0, "a number of at least 0")
    min_lr = check_number(op, "min_lr", min_lr, lambda x: x >= 0, "a number of at least 0")
    if min_lr > max_lr:
        raise ValueError(message(op, "min_lr must not be above max_lr", f"min_lr={min_lr}, max_lr={max_lr}"))
    if op == "cosine_schedule" and warmup_steps > sizes["decay_steps"]:
        got = f"warmup_steps={warmup_steps}, decay_steps={sizes['decay_steps']}"
        raise ValueError(message(op, "warmup_steps must not be above decay_steps", got))
    return step, max_lr, min_lr

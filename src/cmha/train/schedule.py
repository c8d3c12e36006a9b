"""Learning rate: a linear warm-up to max_lr, then half a cosine down to min_lr."""

import math

from cmha.errors import check_integer, check_number, message


def cosine_schedule(step, *, max_lr, min_lr, warmup_steps, decay_steps):
    """The rate of step 0, 1, 2, ...

        step < warmup_steps      max_lr * (step + 1) / (warmup_steps + 1)
        warmup_steps .. decay    min_lr + (max_lr - min_lr) * (1 + cos(pi * t)) / 2,  t from 0 to 1
        step >= decay_steps      min_lr
    """
    step = check_integer("cosine_schedule", "step", step, 0)
    warmup_steps = check_integer("cosine_schedule", "warmup_steps", warmup_steps, 0)
    decay_steps = check_integer("cosine_schedule", "decay_steps", decay_steps, 0)
    max_lr = check_number("cosine_schedule", "max_lr", max_lr, lambda x: x >= 0, "a number of at least 0")
    min_lr = check_number("cosine_schedule", "min_lr", min_lr, lambda x: x >= 0, "a number of at least 0")
    if min_lr > max_lr:
        got = f"min_lr={min_lr}, max_lr={max_lr}"
        raise ValueError(message("cosine_schedule", "min_lr must not be above max_lr", got))
    if warmup_steps > decay_steps:
        got = f"warmup_steps={warmup_steps}, decay_steps={decay_steps}"
        raise ValueError(message("cosine_schedule", "warmup_steps must not be above decay_steps", got))
    if step < warmup_steps:
        return max_lr * (step + 1) / (warmup_steps + 1)
    if step >= decay_steps:
        return min_lr
    t = (step - warmup_steps) / (decay_steps - warmup_steps)
    return min_lr + (max_lr - min_lr) * 0.5 * (1 + math.cos(math.pi * t))

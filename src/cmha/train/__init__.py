"""Training: the optimiser, the schedule, batches, checkpoints, and the loop around them."""

from cmha.train.adamw import AdamW, clip_grad_norm_, parameter_groups
from cmha.train.schedule import cosine_schedule

__all__ = ["AdamW", "TrainSettings", "Trainer", "clip_grad_norm_", "cosine_schedule", "parameter_groups"]


def __getattr__(name):
    if name in ("Trainer", "TrainSettings"):  # files, signals and JSON, which `import cmha` can do without
        from cmha.train import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'cmha.train' has no attribute {name!r}")

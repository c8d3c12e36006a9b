"""Training: the optimiser, the schedule, batches, checkpoints, and the loop around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cmha.train.adamw import AdamW, clip_grad_norm_, parameter_groups
from cmha.train.schedule import constant_schedule, cosine_schedule, wsd_schedule

if TYPE_CHECKING:
    from cmha.train.settings import TrainSettings
    from cmha.train.trainer import Trainer

__all__ = [
    "AdamW", "TrainSettings", "Trainer", "clip_grad_norm_", "constant_schedule", "cosine_schedule", "parameter_groups",
    "wsd_schedule",
]  # fmt: skip


if not TYPE_CHECKING:  # or every name would be one to a type checker

    def __getattr__(name):
        if name in ("Trainer", "TrainSettings"):  # files, signals and JSON, which `import cmha` can do without
            from cmha.train import settings, trainer

            return getattr(settings if name == "TrainSettings" else trainer, name)
        raise AttributeError(f"module 'cmha.train' has no attribute {name!r}")

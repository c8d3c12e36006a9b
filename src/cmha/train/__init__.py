"""Training: the optimiser, the schedule, batches, checkpoints, and the loop around them."""

from cmha.train.adamw import AdamW, clip_grad_norm_, parameter_groups
from cmha.train.schedule import cosine_schedule
from cmha.train.trainer import Trainer, TrainSettings

__all__ = ["AdamW", "TrainSettings", "Trainer", "clip_grad_norm_", "cosine_schedule", "parameter_groups"]

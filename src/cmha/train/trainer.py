"""The training loop: batch, loss, backward, clip, AdamW; at every evaluation a line of log.jsonl and a checkpoint."""

import json
import math
import os
import sys
import time
from dataclasses import dataclass

from cmha import random
from cmha.autograd import no_grad
from cmha.errors import check_integer, check_number, message
from cmha.text.corpora import check_length
from cmha.train.adamw import AdamW, clip_factor, grad_norm, parameter_groups
from cmha.train.batches import VALIDATION_BATCH, training_batch, validation_batches
from cmha.train.checkpoint import save_checkpoint
from cmha.train.schedule import cosine_schedule
from cmha.train.signals import StopRequest


@dataclass(frozen=True)
class TrainSettings:
    """What a run does. Each value is checked here; they tune the tiny preset."""

    steps: int = 5000
    batch_size: int = 8
    lr: float = 3e-3
    min_lr: float = 3e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    betas: tuple = (0.9, 0.99)
    grad_clip: float = 1.0
    eval_interval: int = 500
    seed: int = 0

    def __post_init__(self):
        for name, least in {"steps": 1, "batch_size": 1, "warmup_steps": 0, "eval_interval": 1, "seed": 0}.items():
            check_integer("train", name, getattr(self, name), least, 2**63 - 1)
        for name in ("lr", "grad_clip"):
            check_number("train", name, getattr(self, name), lambda x: x > 0, "a finite number above 0")
        for name in ("min_lr", "weight_decay"):
            check_number("train", name, getattr(self, name), lambda x: x >= 0, "a finite number of at least 0")
        if self.min_lr > self.lr:
            raise ValueError(message("train", "min_lr must not be above lr", f"min_lr={self.min_lr}, lr={self.lr}"))
        if self.warmup_steps > self.steps:
            got = f"warmup_steps={self.warmup_steps}, steps={self.steps}"
            raise ValueError(message("train", "warmup_steps must not be above steps", got))


class Trainer:
    """Trains model on ids (n,), measures it on others, and writes log and checkpoints into folder (if any), with the
    tokenizer (if any) that made the ids.

    run() returns None, or the number of the signal that stopped it. Everything random is a function of settings.seed
    and the step. A loss or gradient that is not finite ends the run with an error, before anything is written.
    """

    def __init__(self, model, training, validation, settings, folder=None, progress=True, tokenizer=None):
        block_size = model.cfg.block_size
        check_length("training", training, block_size)
        check_length("validation", validation, block_size)
        self.model, self.training, self.validation, self.settings = model, training, validation, settings
        self.folder, self.progress = folder, progress and sys.stderr is not None
        self.tokenizer = tokenizer
        groups = parameter_groups(model, settings.weight_decay)
        self.optimizer = AdamW(groups, settings.lr, betas=settings.betas)
        self.named = list(model.named_parameters())
        self.step, self.rows = 0, []  # steps done, lines of the log
        self.saved = None  # False from the beginning of the first save, True from its end

    def run(self):
        from cmha.train.progress import ProgressLine

        steps, tokens = self.settings.steps, self.settings.batch_size * self.model.cfg.block_size
        line = ProgressLine(steps, disable=not self.progress)
        self.model.train()
        with StopRequest() as stop, line:
            total, count, start = 0.0, 0, time.perf_counter()  # since the last evaluation
            while self.step < steps and stop.number is None:
                loss, norm, lr = self._train_step()
                total, count = total + loss, count + 1
                row = {"step": self.step, "loss": total / count, "val_loss": None, "lr": lr, "grad_norm": norm}
                row["tokens_per_second"] = tokens * count / max(time.perf_counter() - start, 1e-9)
                line.row = row
                line.update()
                if self.step == steps or stop.number is not None or self.step % self.settings.eval_interval == 0:
                    row["val_loss"] = self.evaluate(stop)
                    self._save(row)
                    line.val_loss = row["val_loss"]
                    line.refresh()
                    total, count, start = 0.0, 0, time.perf_counter()
        return stop.number

    def _train_step(self):
        """One update; (loss, norm of the gradient before clipping, learning rate)."""
        settings, step = self.settings, self.step
        rates = {"max_lr": settings.lr, "min_lr": settings.min_lr}
        lr = cosine_schedule(step, **rates, warmup_steps=settings.warmup_steps, decay_steps=settings.steps)
        random.begin_step(step, first_row=0)
        sizes = (settings.batch_size, self.model.cfg.block_size)
        inputs, targets = training_batch(self.training, *sizes, seed=settings.seed, step=step)
        self.optimizer.zero_grad()
        _, loss = self.model(inputs, targets)
        value = loss.item()
        if not math.isfinite(value):
            raise ValueError(message("train", "loss must be finite", f"{value} at step {step + 1}"))
        loss.backward()
        norm, bad = grad_norm(self.named)
        if bad is not None:
            got = f"a norm of {norm} for {bad} at step {step + 1}"
            raise ValueError(message("train", "gradients must be finite", got))
        self.optimizer.lr = lr
        self.optimizer.step(grad_scale=clip_factor(norm, settings.grad_clip))
        self.step += 1
        return value, norm, lr

    def evaluate(self, stop=None):
        """Mean loss over every non-overlapping window of the validation ids; None when a signal came on the way."""
        total, count = 0.0, 0
        self.model.eval()
        try:
            with no_grad():
                for inputs, targets in validation_batches(self.validation, VALIDATION_BATCH, self.model.cfg.block_size):
                    if stop is not None and stop.number is not None:
                        return None
                    _, loss = self.model(inputs, targets)
                    total, count = total + loss.item() * targets.size, count + targets.size
        finally:
            self.model.train()
        return total / count

    def _save(self, row):
        if row["val_loss"] is not None and not math.isfinite(row["val_loss"]):
            got = f"{row['val_loss']} after step {self.step}"
            raise ValueError(message("train", "validation loss must be finite", got))
        self.rows.append(row)
        if self.folder is not None:
            self.saved = bool(self.saved)
            save_checkpoint(self.folder, self.model, self.optimizer, self.step, self.settings)
            self.model.save_pretrained(self.folder)
            if self.tokenizer is not None and not self.saved:
                self.tokenizer.save(self.folder)
            with open(os.path.join(self.folder, "log.jsonl"), "a", encoding="utf-8") as log:
                log.write(json.dumps(row, allow_nan=False) + "\n")
            self.saved = True

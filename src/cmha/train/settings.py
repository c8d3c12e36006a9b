"""What a run does, in numbers: TrainSettings, and which of them a preset of the model brings along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from cmha.errors import check_flag, check_integer, check_number, message, quote
from cmha.train.schedule import constant_schedule, cosine_schedule, wsd_schedule

SCHEDULES = ("cosine", "constant", "wsd")
MAY_CHANGE = ("steps", "eval_interval", "sample_interval", "checkpoint_activations")  # when a run is resumed

# The defaults below suit tiny; the other presets of GPTConfig.
PRESETS: dict[str, dict[str, float]] = {
    "tiny": {},
    "char": {"steps": 2000, "batch_size": 12},
    "baby": {"batch_size": 64, "lr": 1e-3},
    "gpt2": {"lr": 6e-4, "micro_batch_size": 1},
}


_DERIVED: Any = None  # a number, once __post_init__ has made it from the other values


@dataclass(frozen=True)
class TrainSettings:
    """What a run does, in numbers. A value that does not fit is a ValueError that names it, of a wrong kind a
    TypeError.

    - steps: updates. batch_size: windows of block_size tokens in each. micro_batch_size: windows that go through the
      model at a time (default: batch_size); the last may be fewer.
    - lr: the largest learning rate. min_lr: the smallest (default: lr / 10). schedule: "cosine", "constant" or "wsd".
      warmup_steps: 100 by default, or a tenth of a short run. decay_steps: a fifth of the steps by default, with "wsd"
      only.
    - weight_decay: of matrices. betas: AdamW's. grad_clip: the largest norm of all gradients.
    - eval_interval: steps from one evaluation, which also saves, to the next. sample_interval: from one sample to the
      next (default: none on the way).
    - seed: of batches and dropout. overfit_one_batch: every step learns the first batch. checkpoint_activations: see
      GPT.
    """

    steps: int = 5000
    batch_size: int = 8
    micro_batch_size: int = _DERIVED
    lr: float = 3e-3
    min_lr: float = _DERIVED
    schedule: str = "cosine"
    warmup_steps: int = _DERIVED
    decay_steps: int | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    grad_clip: float = 1.0
    eval_interval: int = 500
    sample_interval: int | None = None
    seed: int = 0
    overfit_one_batch: bool = False
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        def integer(name: str, least: int) -> None:
            value = check_integer("train", name, getattr(self, name), least, 2**63 - 1)
            object.__setattr__(self, name, value)  # an int: NumPy's does not go into a checkpoint

        def number(name: str, accepts: Callable[[float], bool], rule: str) -> None:
            object.__setattr__(self, name, check_number("train", name, getattr(self, name), accepts, rule))

        for name, least in {"steps": 1, "batch_size": 1, "eval_interval": 1, "seed": 0}.items():
            integer(name, least)
        for name in ("lr", "grad_clip"):
            number(name, lambda x: x > 0, "a finite number above 0")
        if self.schedule not in SCHEDULES:
            raise ValueError(message("train", f"schedule must be one of {', '.join(SCHEDULES)}", quote(self.schedule)))
        self._derive(micro_batch_size=self.batch_size, min_lr=self.lr / 10, warmup_steps=min(100, self.steps // 10))
        if self.schedule == "wsd":
            self._derive(decay_steps=min(-(-self.steps // 5), self.steps - min(self.warmup_steps, self.steps)))
        for name in ("min_lr", "weight_decay"):
            number(name, lambda x: x >= 0, "a finite number of at least 0")
        for name, least in {"micro_batch_size": 1, "warmup_steps": 0, "decay_steps": 0, "sample_interval": 1}.items():
            if getattr(self, name) is not None:
                integer(name, least)
        for name in ("overfit_one_batch", "checkpoint_activations"):
            check_flag("train", name, getattr(self, name))
        if not isinstance(self.betas, (tuple, list)):
            raise TypeError(message("train", "betas must be a tuple of two numbers", quote(self.betas)))
        if len(self.betas) != 2:
            raise ValueError(message("train", "betas must be two numbers", quote(self.betas)))
        share = (lambda x: 0 <= x < 1, "at least 0 and below 1")
        betas = tuple(check_number("train", f"betas[{i}]", beta, *share) for i, beta in enumerate(self.betas))
        object.__setattr__(self, "betas", betas)
        self._check_together()

    def _derive(self, **values: float) -> None:
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        def refuse(rule: str, *names: str) -> NoReturn:
            raise ValueError(message("train", rule, ", ".join(f"{name}={getattr(self, name)}" for name in names)))

        if self.min_lr > self.lr:
            refuse("min_lr must not be above lr", "min_lr", "lr")
        if self.warmup_steps > self.steps:
            refuse("warmup_steps must not be above steps", "warmup_steps", "steps")
        if self.micro_batch_size > self.batch_size:
            refuse("micro_batch_size must not be above batch_size", "micro_batch_size", "batch_size")
        if self.schedule != "wsd" and self.decay_steps is not None:
            refuse("decay_steps belong to schedule wsd", "decay_steps", "schedule")
        if self.warmup_steps + (self.decay_steps or 0) > self.steps:  # of wsd alone
            refuse("warm-up and decay must fit in the steps", "warmup_steps", "decay_steps", "steps")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TrainSettings:
        """The settings that go with GPTConfig.preset(name) (tiny, char, baby, gpt2; else a ValueError), changed."""
        if name not in PRESETS:
            raise ValueError(message("train", f"preset must be one of {', '.join(PRESETS)}", quote(name)))
        values: dict[str, Any] = {**PRESETS[name], **changes}
        return cls(**values)

    def change(self, **changes: Any) -> TrainSettings:
        """A copy with changes; what followed from other values stays as it is."""
        return replace(self, **changes)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step."""
        return -(-self.batch_size // self.micro_batch_size)

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, 2, ..., as the schedule has it."""
        if self.schedule == "constant":
            return constant_schedule(step, max_lr=self.lr, warmup_steps=self.warmup_steps)
        values: dict[str, Any] = {"max_lr": self.lr, "min_lr": self.min_lr, "warmup_steps": self.warmup_steps}
        if self.schedule == "cosine":
            return cosine_schedule(step, **values, decay_steps=self.steps)
        return wsd_schedule(step, **values, decay_steps=self.decay_steps or 0, steps=self.steps)

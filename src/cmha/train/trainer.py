"""The training loop: batch, loss, backward, clip, AdamW; at every evaluation a line of log.jsonl and a checkpoint."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypedDict

import numpy as np

from cmha import _core, random
from cmha.autograd import no_grad
from cmha.errors import message, quote_path
from cmha.gpt import GPT, GPTConfig
from cmha.nn.module import evaluating
from cmha.tensor import Tensor
from cmha.text.corpora import check_length
from cmha.train import run_folder
from cmha.train.accumulate import Gradients, OneProcess, share, tree_sum
from cmha.train.adamw import AdamW, clip_factor, grad_norm, parameter_groups
from cmha.train.batches import training_batch, validation_batch_size, validation_batches
from cmha.train.checkpoint import (
    KEEP,
    Checkpoint,
    checkpoint_path,
    checkpoints,
    describe_build,
    newest,
    prune,
    settings_dict,
    tokenizer_dict,
)
from cmha.train.settings import TrainSettings
from cmha.train.signals import StopRequest

if TYPE_CHECKING:
    from typing import Unpack

    from _typeshed import StrPath

    from cmha.text.corpora import Corpus
    from cmha.train.progress import ProgressLine
    from cmha.train.run_folder import Row
    from cmha.types import IntArray

    class Logger(Protocol):
        def log(self, values: dict[str, Any], /, *, step: int) -> object: ...

    class TrainerOptions(TypedDict, total=False):
        logger: Logger | None
        progress: bool
        processes: OneProcess | None

SAMPLE = 400  # tokens
NOTHING_YET = {"loss": 0.0, "steps": 0, "lr": 0.0, "grad_norm": 0.0}  # since the last line of the log


class Trainer:
    """Trains a GPT on a Corpus (cmha.text.corpora) and keeps the run in a folder, or nowhere with folder=None::

        trainer = Trainer(model, corpus, TrainSettings(steps=500), "runs/mine")
        trainer.run()                                     # None, or the number of the signal that stopped it
        trainer = Trainer.resume("runs/mine", corpus)     # after whatever ended it: goes on to the same bits
        trainer.run()

    Everything random is a function of settings.seed and the step. A loss, gradient or weight that is not finite ends
    the run with a ValueError that names step and tensor, before anything is written. logger: an object whose log(dict,
    step=n) gets every line of the log, and samples, as a run of wandb does. progress: a line on stderr. processes: who
    shares the work (accumulate.py); this process alone by default.
    """

    def __init__(
        self, model: GPT, corpus: Corpus, settings: TrainSettings | None = None, folder: StrPath | None = None, *,
        logger: Logger | None = None, progress: bool = True, processes: OneProcess | None = None,
    ) -> None:  # fmt: skip
        settings = TrainSettings() if settings is None else settings
        for name in ("training", "validation"):
            check_length(name, getattr(corpus, name), model.cfg.block_size)
        self.model, self.corpus, self.settings, self.folder = model, corpus, settings, folder
        self.logger, self.progress = logger, progress and sys.stderr is not None
        self.processes = OneProcess() if processes is None else processes
        if self.processes.rank:  # the first one alone writes and tells
            self.folder, self.logger, self.progress = None, None, False
        share(settings.micro_batches, self.processes.rank, self.processes.size)  # refuses what cannot be shared
        model.checkpoint_activations = settings.checkpoint_activations
        self.optimizer = AdamW(parameter_groups(model, settings.weight_decay), settings.lr, betas=settings.betas)
        self.named = list(model.named_parameters())
        self.step = 0  # steps done
        self.rows: list[Row] = []  # of the log
        self.saved: bool | None = None  # False from the beginning of the first save, True from its end
        self.begun = False  # whether the folder may hold a run that never came to its first checkpoint
        self.evaluated: list[int] = []
        self.best: list[Any] | None = None
        self._since = dict(NOTHING_YET)
        self._tokenizer: dict[str, str] | None = None
        self._seen: list[tuple[int, str]] = []
        self._saved_step: int | None = 0  # None after a resume: what lies beside the checkpoint may be older, or gone

    # ------------------------------------------------------------------------------------------ going on
    @classmethod
    def resume(
        cls, path: StrPath, corpus: Corpus, *, steps: int | None = None, eval_interval: int | None = None,
        **options: Unpack[TrainerOptions],
    ) -> Trainer:  # fmt: skip
        """The trainer of a run that was interrupted, or of one that shall go on to more steps.

        path: the folder of a run, whose newest checkpoint is taken (a damaged one is passed over, with a warning), or a
        checkpoint, which is taken or refused. The corpus must be the one the run began with. With other steps the
        schedule from here on is that of a run of so many steps.
        """
        if os.path.isdir(path):
            checkpoint, damaged = newest(path)
            if checkpoint is None:
                raise ValueError(message("resume", "a run must hold a checkpoint", f"none in {quote_path(path)}"))
            for error in damaged:
                warnings.warn(f"{error}; going on from {quote_path(checkpoint.path)}", stacklevel=2)
        else:
            checkpoint = Checkpoint.read(path)
        given = {"steps": steps, "eval_interval": eval_interval}
        changes = {name: value for name, value in given.items() if value is not None}
        return cls.from_checkpoint(checkpoint, corpus, changes, **options)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, corpus: Corpus, changes: dict[str, Any] | None = None,
        **options: Unpack[TrainerOptions],
    ) -> Trainer:  # fmt: skip
        """The trainer that goes on from a Checkpoint; changes: {name: value} of the settings in MAY_CHANGE."""
        checkpoint.check({"data": corpus.sha256, "tokenizer": tokenizer_dict(corpus.tokenizer)})
        settings = checkpoint.settings_with(changes or {})
        folder = checkpoint.folder
        with random.no_init():
            model = GPT(GPTConfig(**checkpoint.config))
        trainer = cls(model, corpus, settings, folder, **options)
        checkpoint.restore(trainer.model, trainer.optimizer)
        trainer.step, trainer._saved_step, trainer.saved = checkpoint.step, None, True
        trainer.evaluated, trainer.best, trainer._since = checkpoint.evaluated, checkpoint.best, checkpoint.since
        trainer._seen = checkpoints(folder)
        return trainer

    # ------------------------------------------------------------------------------------------ the loop
    def run(self) -> int | None:
        """Trains to settings.steps. Returns None, or the number of the signal that ended it after a step."""
        with nullcontext() if self.folder is None else run_folder.locked(self.folder):
            self._enter()
            if self.processes.size > 1:
                self.processes.check_same(self._beginning())
            self.model.train()
            return self._loop()

    def _enter(self) -> None:
        """The folder is ours now: is it what it was when we looked?"""
        if self.folder is None:
            return
        if not self._seen and not self.saved:
            run_folder.refuse_a_run(self.folder, self.begun)
        if checkpoints(self.folder) != self._seen:
            got = f"other checkpoints in {quote_path(self.folder)} than when it was read"
            raise ValueError(message("train", "one run at a time may use a folder", got))
        run_folder.tidy(self.folder)
        prune(self.folder, self._kept(), below=self.step)
        self._seen = checkpoints(self.folder)
        self.rows = run_folder.continue_log(self.folder, self.evaluated[-1] if self.evaluated else 0)

    def _beginning(self) -> dict[str, Any]:
        """What processes must have in common, or they would not compute one run."""
        weights = hashlib.sha256()
        for _, parameter in self.named:
            weights.update(np.asarray(parameter.detach()).data)
        found = {"data": self.corpus.sha256, "settings": self.settings, "model": self.model.cfg, "step": self.step}
        return found | {"weights": weights.hexdigest(), "versions of cmha": describe_build()["cmha"]}

    def _loop(self) -> int | None:
        from cmha.train.progress import ProgressLine

        settings = self.settings
        tokens = settings.batch_size * self.model.cfg.block_size
        line = ProgressLine(settings.steps, self.step, disable=not self.progress)
        done, start = 0, time.perf_counter()  # steps here since the last evaluation
        with StopRequest() as stop, line:
            while True:
                if self._evaluation_is_due():
                    val_loss = self.evaluate(stop)
                    if val_loss is not None:
                        pace = tokens * done / max(time.perf_counter() - start, 1e-9)
                        self._save(self._row(val_loss, pace))
                        line.val_loss = val_loss
                        line.refresh()
                        done, start = 0, time.perf_counter()
                number = self.processes.agree(stop.number)
                if self._sample_is_due() and number is None:
                    self._show_sample(line)
                if number is not None or self.step >= settings.steps:
                    break
                self._train_step()
                done += 1
                line.row = self._row(None, tokens * done / max(time.perf_counter() - start, 1e-9))
                line.update()
            if self.step != self._saved_step:
                self._save()
        return number

    def _evaluation_is_due(self) -> bool:
        if self.step == 0 or self.step in self.evaluated[-1:]:
            return False
        return self.step == self.settings.steps or self.step % self.settings.eval_interval == 0

    def _row(self, val_loss: float | None, tokens_per_second: float) -> Row:
        """A line of the log: the loss is the mean over the steps since the last one."""
        since = self._since
        loss = since["loss"] / max(since["steps"], 1)
        return {"step": self.step, "loss": loss, "val_loss": val_loss, "lr": since["lr"],
                "grad_norm": since["grad_norm"], "tokens_per_second": tokens_per_second}  # fmt: skip

    def _train_step(self) -> None:
        """One update."""
        settings, step = self.settings, self.step
        sizes = (settings.batch_size, self.model.cfg.block_size)
        drawn = 0 if settings.overfit_one_batch else step
        batch = training_batch(self.corpus.training, *sizes, seed=settings.seed, step=drawn)
        counted = int(np.count_nonzero(batch[1] != -1))
        mine = share(settings.micro_batches, self.processes.rank, self.processes.size)
        self.optimizer.zero_grad()
        total = tree_sum(*mine, lambda number: self._micro_batch(number, *batch, counted))
        total = self.processes.reduce(total)
        total.give(self.optimizer.params)
        norm, bad = grad_norm(self.named)
        if bad is not None:
            self._not_finite("gradients", f"a norm of {norm} for {bad}")
        self.optimizer.lr = settings.rate(step)
        self.optimizer.step(grad_scale=clip_factor(norm, settings.grad_clip))
        self.step += 1
        since = self._since
        self._since = {"loss": since["loss"] + total.loss, "steps": since["steps"] + 1}
        self._since |= {"lr": self.optimizer.lr, "grad_norm": norm}

    def _micro_batch(self, number: int, inputs: IntArray, targets: IntArray, counted: int) -> Gradients:
        """Gradients of micro-batch `number`, weighed by its share of the tokens that count in the whole batch."""
        settings = self.settings
        first = number * settings.micro_batch_size
        rows = slice(first, first + settings.micro_batch_size)
        random.begin_step(self.step, first_row=first, seed=settings.seed)
        _, loss = self.model(inputs[rows], targets[rows])
        value = loss.item()
        if not math.isfinite(value):
            self._not_finite("loss", f"{value}", (inputs[rows], targets[rows]))
        weight = np.count_nonzero(targets[rows] != -1) / counted if counted else 0.0
        loss.backward(weight)
        return Gradients.take(value * weight, self.optimizer.params)

    def _not_finite(self, what: str, got: str, batch: tuple[IntArray, IntArray] | None = None) -> NoReturn:
        bad, found = self._bad_weight(), ""
        if bad is not None:
            found = f" with a weight of {bad} that is not"
        elif batch is not None:
            found = f", first in the output of {self._bad_output(*batch)}"
        raise ValueError(message("train", f"{what} must be finite", f"{got} at step {self.step + 1}{found}"))

    def _bad_weight(self) -> str | None:
        """The name of the first parameter that holds NaN or infinity, or None."""
        squares = _core.sums_of_squares([p.data for _, p in self.named])
        return next((name for (name, _), x in zip(self.named, squares, strict=True) if not math.isfinite(x)), None)

    def _bad_output(self, inputs: IntArray, targets: IntArray) -> str:
        """The name of the first module whose output holds NaN or infinity, where all weights are finite."""
        found: list[str] = []
        handles = []

        def look(name: str, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if not all(np.isfinite(np.asarray(part.detach())).all() for part in parts if isinstance(part, Tensor)):
                found.append(name or "the whole model")

        for name, module in self.model.named_modules():
            handles.append(module.register_forward_hook(lambda _, args, output, name=name: look(name, output)))
        try:
            with no_grad():
                self.model(inputs, targets)
        finally:
            for handle in handles:
                handle.remove()
        return found[0] if found else "the loss"

    def evaluate(self, stop: StopRequest | None = None) -> float | None:
        """Mean loss (nats per token) over every non-overlapping window of the validation ids; None when a signal came
        on the way.
        """
        found: list[tuple[float, int]] = []
        stopped = False
        share_of = {"rank": self.processes.rank, "size": self.processes.size}
        block_size = self.model.cfg.block_size
        sizes = (validation_batch_size(block_size), block_size)
        with evaluating(self.model), no_grad():
            for inputs, targets in validation_batches(self.corpus.validation, *sizes, **share_of):
                if stop is not None and stop.number is not None:
                    stopped = True
                    break
                _, loss = self.model(inputs, targets)
                counted = int(np.count_nonzero(targets != -1))
                found.append((loss.item() * counted, counted))
        gathered = self.processes.gather(None if stopped else found)
        shares = [part for part in gathered if part is not None]
        if len(shares) < len(gathered):
            return None
        batches = [pair for row in zip_longest(*shares) for pair in row if pair is not None]  # in their order
        return sum(loss for loss, _ in batches) / max(sum(counted for _, counted in batches), 1)

    # ------------------------------------------------------------------------------------------ what is kept
    def _kept(self) -> set[int]:
        """The steps whose checkpoints stay: the last two evaluations, the best one, and where the run is."""
        return {*self.evaluated, *(self.best or [])[1:], self.step}

    def _save(self, row: Row | None = None) -> None:
        """A checkpoint; with a row (one evaluation), a line of the log before it."""
        bad = self._bad_weight()
        if bad is not None:
            raise ValueError(message("train", "weights must be finite", f"{bad} after step {self.step}"))
        if row is not None:
            val_loss = row["val_loss"]
            if val_loss is None or not math.isfinite(val_loss):
                got = f"{val_loss} after step {self.step}"
                raise ValueError(message("train", "validation loss must be finite", got))
            self.rows.append(row)
            self.evaluated = [*self.evaluated, self.step][-KEEP:]
            self.best = min(self.best or [math.inf, 0], [val_loss, self.step])
            self._since = dict(NOTHING_YET)
        if self.folder is not None:
            self._write(self.folder, [] if row is None else [row])
        if row is not None and self.logger is not None:
            self.logger.log({name: value for name, value in row.items() if name != "step"}, step=self.step)

    def _write(self, folder: StrPath, rows: list[Row]) -> None:
        """The checkpoint comes last: when it is there, so is everything else of its step."""
        first = not self.saved
        self.saved = not first
        run_folder.append_to_log(folder, rows)
        if self._tokenizer is None:
            self._tokenizer = tokenizer_dict(self.corpus.tokenizer)
            if self.corpus.tokenizer is not None:
                self.corpus.tokenizer.save(folder)
        self.model.save_pretrained(folder)
        checkpoint = Checkpoint(
            checkpoint_path(folder, self.step), self.step, 0.0, {}, asdict(self.model.cfg),
            settings_dict(self.settings), self.corpus.sha256, self._tokenizer, self._since, self.evaluated, self.best,
            describe_build(),
        )  # fmt: skip
        checkpoint.save(self.model, self.optimizer)
        prune(folder, self._kept())
        self._seen, self._saved_step, self.saved = checkpoints(folder), self.step, True

    # ------------------------------------------------------------------------------------------ to look at
    def sample(self, tokens: int = SAMPLE) -> str:
        """Text by the model as it is, from a new paragraph on where the tokenizer knows one; the same each time."""
        tokenizer = self.corpus.tokenizer
        if tokenizer is None:
            raise ValueError(message("sample", "a sample needs the tokenizer of its corpus", "none"))
        try:
            start = tokenizer.encode("\n\n")
        except ValueError:
            start = np.asarray(self.corpus.training[np.arange(1)]).tolist()
        ids = self.model.generate([start], tokens, temperature=0.8, seed=self.settings.seed)[0]
        known = [i for i in ids if i < tokenizer.vocab_size]  # a padded vocabulary has ids that no token has
        return tokenizer.decode(known).strip("\n")

    def _sample_is_due(self) -> bool:
        interval = self.settings.sample_interval
        if interval is None or self.corpus.tokenizer is None:
            return False
        return self.step > 0 and self.step % interval == 0

    def _show_sample(self, line: ProgressLine) -> None:
        text = self.sample()
        if self.progress:
            line.say(f"after step {self.step}:\n{text}\n")
        if self.logger is not None:
            self.logger.log({"sample": text}, step=self.step)

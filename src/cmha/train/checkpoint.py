"""Checkpoints: checkpoints/step-N.safetensors, everything that going on needs; nothing else is read.

    model.NAME, m.NAME, v.NAME   float32, as the model names its parameters
    metadata                     each key of `Checkpoint` as JSON, and sha256, over header and data

Nothing random needs a state of its own: batch and dropout of a step are functions of settings.seed and the step, which
does not depend on what ran before. Equal training on equal builds gives equal files: no time, no name of a machine and
no number of threads is in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Container
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cmha.errors import CheckpointError, check_integer, listed, message, quote, quote_path
from cmha.files import check_seal, load_safetensors, read_metadata, save_safetensors
from cmha.text.token_files import tokenizer_from_state, tokenizer_state
from cmha.threads import show_config
from cmha.train.run_folder import locked
from cmha.train.settings import TrainSettings

if TYPE_CHECKING:
    from _typeshed import StrPath

    from cmha.gpt import GPT
    from cmha.text import Tokenizer
    from cmha.train.adamw import AdamW

FORMAT = "cmha-checkpoint-2"
KEEP = 2
_NAME = re.compile(r"step-(\d+)\.safetensors")
_SAYS_NOTHING = ("threads", "platform", "cpu_features")  # of show_config: they change no bit


@dataclass
class Checkpoint:
    """What a checkpoint says beside its tensors, and where it is."""

    path: str
    step: int  # updates done
    lr: float  # the optimiser's
    steps: dict[str, int]  # {parameter: its updates}
    config: dict[str, Any]  # of the model
    settings: dict[str, Any]  # of the training
    data: str  # SHA-256 of what it learns from
    tokenizer: dict[str, str] = field(default_factory=dict)  # {name: text} of the tokenizer's files
    since: dict[str, float] = field(default_factory=dict)  # what the next line of the log has to add up: see Trainer
    evaluated: list[int] = field(default_factory=list)  # the last KEEP steps with a line in the log
    best: list[Any] | None = None  # [validation loss, step] of the lowest
    build: dict[str, Any] = field(default_factory=dict)  # what wrote it

    @classmethod
    def read(cls, path: StrPath) -> Checkpoint:
        """The checkpoint at path, every byte of it checked against its SHA-256; tensors are left to `restore`."""
        metadata = read_metadata(path)
        if metadata.get("format") != FORMAT:
            _refuse(path, f"file must be a checkpoint of format {FORMAT}", quote(metadata.get("format")))
        metadata = check_seal(path)
        values = {name: json.loads(text) for name, text in metadata.items() if name != "format"}
        return cls(os.fspath(path), **values)  # what has the right seal was written by `save`

    @property
    def folder(self) -> str:
        """The run's."""
        place = os.path.dirname(self.path)
        if os.path.basename(os.path.abspath(place)) != "checkpoints":
            rule = "a run goes on in its own folder, so a checkpoint must lie in RUN/checkpoints"
            raise ValueError(message("resume", rule, quote_path(self.path)))
        return os.path.normpath(os.path.join(place, os.pardir))

    def restore(self, model: GPT, optimizer: AdamW) -> None:
        """Puts weights, moments and counts into model and optimizer; what does not fit changes nothing."""
        tensors = load_safetensors(self.path)
        names = _names(model, optimizer)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        expected = {f"{part}.{name}": shapes[name] for part in ("model", "m", "v") for name in names}
        got = {name: array.shape for name, array in tensors.items()}
        odd = [f"{quote(name)} {got.get(name)} for {expected.get(name)}" for name in sorted(expected | got)
               if got.get(name) != expected.get(name)]  # fmt: skip
        if odd:
            _refuse(self.path, "tensors must be those of this model", listed(odd))
        m, v = ([tensors[f"{key}.{name}"] for name in names] for key in ("m", "v"))
        optimizer.load_state_dict({"lr": self.lr, "steps": [self.steps[name] for name in names], "m": m, "v": v})
        model.load_state_dict({name: tensors[f"model.{name}"] for name in names})

    def save(self, model: GPT, optimizer: AdamW) -> None:
        """Writes the file and reads it again, so that an older one may go."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        state = optimizer.state_dict()
        names = _names(model, optimizer)
        self.lr, self.steps = state["lr"], dict(zip(names, state["steps"], strict=True))
        tensors = {f"model.{name}": np.asarray(tensor.detach()) for name, tensor in model.named_parameters()}
        tensors |= {f"m.{name}": array for name, array in zip(names, state["m"], strict=True)}
        tensors |= {f"v.{name}": array for name, array in zip(names, state["v"], strict=True)}
        values = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "path"}
        metadata = {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
        save_safetensors(self.path, tensors, {"format": FORMAT, **metadata}, sealed=True)
        check_seal(self.path)

    def check(self, given: dict[str, Any]) -> None:
        """Refuses {name: value} that differ from config, settings, tokenizer or data, and lists all that do."""
        own = {**self.config, **self.settings, "tokenizer": self.tokenizer, "data": self.data}
        if "tokenizer_type" in given:
            own["tokenizer_type"] = self.tokenizer_type()
        odd = [f"{name} {_short(value)} (the checkpoint: {_short(own[name])})"
               for name, value in given.items() if value != own[name]]  # fmt: skip
        if odd:
            rule = "a run goes on with the data, model and settings it began with"
            raise ValueError(message("resume", rule, f"{listed(odd, 30)} for {quote_path(self.path)}"))

    def settings_with(self, changes: dict[str, Any]) -> TrainSettings:
        """TrainSettings of a run that goes on with {name: value} changed."""
        steps = changes.get("steps", self.step)
        if check_integer("train", "steps", steps, 1, 2**63 - 1) < self.step:
            got = f"steps={steps} after {self.step} in {quote_path(self.path)}"
            raise ValueError(message("resume", "steps must be at least those already done", got))
        return TrainSettings(**self.settings).change(**changes)

    def tokenizer_type(self) -> str | None:
        """char, byte, bpe; or None."""
        kind = type(self.load_tokenizer()).__name__
        return kind.removesuffix("Tokenizer").lower() if self.tokenizer else None

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer whose ids the model knows, or None."""
        return tokenizer_from_state(json.dumps(self.tokenizer)) if self.tokenizer else None


def checkpoint_path(folder: StrPath, step: int) -> str:
    return os.path.join(folder, "checkpoints", f"step-{step}.safetensors")


def checkpoints(folder: StrPath) -> list[tuple[int, str]]:
    """[(step, path)] of the checkpoints in folder/checkpoints, oldest first."""
    folder = os.path.join(folder, "checkpoints")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((int(match[1]), os.path.join(folder, match[0])) for match in map(_NAME.fullmatch, names) if match)


def newest(folder: StrPath) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """(the newest checkpoint of a run's folder that is whole, errors of newer ones); (None, []) where there is none.

    Checkpoints that are all damaged are an error: to begin again would write over what may still be of use. So is a run
    that is going on there: it removes checkpoints while we read.
    """
    if not checkpoints(folder):
        return None, []
    damaged: list[CheckpointError] = []
    with locked(folder):
        for _, path in reversed(checkpoints(folder)):
            try:
                return Checkpoint.read(path), damaged
            except CheckpointError as error:
                damaged.append(error)
    others = listed(os.path.basename(path) for _, path in checkpoints(folder)[-2::-1])
    raise CheckpointError(f"{damaged[0]}; {f'damaged too: {others}' if others else 'there is no other checkpoint'}")


def prune(folder: StrPath, keep: Container[int], below: int | None = None) -> None:
    """Removes the checkpoints of other steps than those to keep (only of steps below a number, where one is given)."""
    for step, path in checkpoints(folder):
        if step not in keep and (below is None or step < below):
            os.unlink(path)


def tokenizer_dict(tokenizer: Tokenizer | None) -> dict[str, str]:
    return {} if tokenizer is None else json.loads(tokenizer_state(tokenizer)[0])


def describe_build() -> dict[str, Any]:
    return {name: value for name, value in show_config().items() if name not in _SAYS_NOTHING}


def settings_dict(settings: TrainSettings) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(asdict(settings)))  # as it will be read: a tuple is a list there
    return values


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() if value else None
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else quote(value)


def _names(model: GPT, optimizer: AdamW) -> list[str]:
    """The names of the optimiser's parameters, in its order."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    return [names[id(tensor)] for tensor in optimizer.params]


def _refuse(path: StrPath, rule: str, got: str) -> NoReturn:
    raise CheckpointError(message("load", rule, f"{got} in {quote_path(path)}")) from None

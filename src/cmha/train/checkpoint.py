"""Checkpoints: checkpoints/step-N.safetensors with the weights, the optimiser's moments and the step.

    model.NAME, m.NAME, v.NAME   float32, as the model names its parameters
    metadata                     format, step, lr, steps (updates of each parameter), config, settings, as JSON

Equal training gives equal files: no time, no name of a machine is in them. The two newest are kept, an older one goes
only after the new one is whole.
"""

import json
import os
import re
from dataclasses import asdict

import numpy as np

from cmha.errors import CheckpointError, listed, message, quote, quote_path
from cmha.files import load_safetensors, read_metadata, save_safetensors

FORMAT = "cmha-checkpoint-1"
KEEP = 2
_NAME = re.compile(r"step-(\d+)\.safetensors")


def checkpoints(folder):
    """[(step, path)] of the checkpoints in folder/checkpoints, oldest first."""
    folder = os.path.join(folder, "checkpoints")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((int(match[1]), os.path.join(folder, match[0])) for match in map(_NAME.fullmatch, names) if match)


def save_checkpoint(folder, model, optimizer, step, settings):
    """Writes folder/checkpoints/step-N.safetensors and returns its path."""
    path = os.path.join(folder, "checkpoints", f"step-{step}.safetensors")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    state = optimizer.state_dict()
    names = _names(model, optimizer)
    tensors = {f"model.{name}": np.asarray(tensor.detach()) for name, tensor in model.named_parameters()}
    tensors |= {f"m.{name}": array for name, array in zip(names, state["m"], strict=True)}
    tensors |= {f"v.{name}": array for name, array in zip(names, state["v"], strict=True)}
    values = {"step": step, "lr": state["lr"], "steps": dict(zip(names, state["steps"], strict=True))}
    values |= {"config": asdict(model.cfg), "settings": asdict(settings)}
    metadata = {key: json.dumps(value, sort_keys=True) for key, value in values.items()}
    save_safetensors(path, tensors, {"format": FORMAT, **metadata})
    read_metadata(path)  # whole and readable, so the oldest may go
    for _, old in checkpoints(folder)[:-KEEP]:
        if old != path:
            os.unlink(old)
    return path


def load_checkpoint(path, model, optimizer):
    """Puts a checkpoint into model and optimizer and returns its step; what does not fit changes nothing."""
    metadata, tensors = read_metadata(path), load_safetensors(path)

    def refuse(rule, got):
        raise CheckpointError(message("load", rule, f"{got} in {quote_path(path)}")) from None

    if metadata.get("format") != FORMAT:
        refuse(f"file must be a checkpoint of format {FORMAT}", quote(metadata.get("format")))
    try:
        step, lr, steps = (json.loads(metadata[key]) for key in ("step", "lr", "steps"))
    except (KeyError, ValueError, RecursionError):
        refuse("a checkpoint must hold step, lr and steps", quote(metadata))
    names = _names(model, optimizer)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    expected = {f"{part}.{name}": shapes[name] for part in ("model", "m", "v") for name in names}
    got = {name: array.shape for name, array in tensors.items()}
    odd = [f"{quote(name)} {got.get(name)} for {expected.get(name)}" for name in sorted(expected | got)
           if got.get(name) != expected.get(name)]  # fmt: skip
    if odd or not isinstance(steps, dict) or set(steps) != set(names):
        refuse("tensors must be those of this model", listed(odd) if odd else "counts of other parameters")
    state = {"lr": lr, "steps": [steps[name] for name in names]}
    state |= {key: [tensors[f"{key}.{name}"] for name in names] for key in ("m", "v")}
    optimizer.load_state_dict(state)
    model.load_state_dict({name: tensors[f"model.{name}"] for name in names})
    return step


def _names(model, optimizer):
    """The names of the optimiser's parameters, in its order."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    return [names[id(tensor)] for tensor in optimizer.params]

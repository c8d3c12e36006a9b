"""GPT-2's layout of weights: its names, and how a model's own tensors lie in it.

GPT-2 joins the three projections of attention in c_attn (D, 3 D) and stores weights (in, out), as Linear does. What a
model leaves out by choice stands there so that it computes the same: biases as zeros, c_proj as the identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from cmha import _core

if TYPE_CHECKING:
    from cmha.gpt.config import GPTConfig
    from cmha.gpt.model import GPT
    from cmha.tensor import Tensor
    from cmha.types import FloatArray, Shape


def shapes(cfg: GPTConfig) -> dict[str, Shape]:
    """{name: shape} of all of GPT-2's tensors, which always have biases and c_proj."""
    D = cfg.n_embd
    out: dict[str, Shape] = {"wte.weight": (cfg.vocab_size, D), "wpe.weight": (cfg.block_size, D)}
    for i in range(cfg.n_layer):
        for layer, n_in, n_out in (
            ("attn.c_attn", D, 3 * D),
            ("attn.c_proj", D, D),
            ("mlp.c_fc", D, 4 * D),
            ("mlp.c_proj", 4 * D, D),
        ):
            out |= {f"h.{i}.{layer}.weight": (n_in, n_out), f"h.{i}.{layer}.bias": (n_out,)}
        out |= {f"h.{i}.{norm}.{part}": (D,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
    return out | {"ln_f.weight": (D,), "ln_f.bias": (D,)}


def is_left_out(name: str, cfg: GPTConfig) -> bool:
    """Whether a model of this configuration has no such tensor of its own."""
    return name.endswith(".bias") and not cfg.bias or ".attn.c_proj." in name and not cfg.output_projection


def tensors(model: GPT) -> Iterator[tuple[str, FloatArray]]:
    """(name, float32 array) of GPT-2's tensors of a model, one at a time."""
    own = model.state_dict()
    for name, shape in shapes(model.cfg).items():
        parts = [np.asarray(part.data) for part in _parts(name, own)]
        yield name, np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0] if parts else _left_out(name, shape)


def fill(own: dict[str, Tensor], name: str, first: int, rows: FloatArray) -> bool:
    """Writes rows, of which the first is row `first`, into the tensors of own = model.state_dict() that lie there.

    False: the model has no place for them, and they are not what stands for that.
    """
    parts = _parts(name, own)
    if not parts:
        return np.array_equal(rows, _left_out(name, rows.shape, first))
    for part, columns in zip(parts, np.split(rows, len(parts), axis=-1), strict=True):
        _core.assign(part[first : first + len(rows)].data, _core.from_buffer(columns))
    return True


def _parts(name: str, own: dict[str, Tensor]) -> list[Tensor]:
    """The model's tensors that lie side by side in GPT-2's tensor of this name; none where it leaves it out."""
    names = [name.replace("c_attn", part) for part in ("c_q", "c_k", "c_v")] if ".c_attn." in name else [name]
    return [own[part] for part in names if part in own]


def _left_out(name: str, shape: Shape, first: int = 0) -> FloatArray:
    if name.endswith("attn.c_proj.weight"):
        return np.eye(shape[0], shape[1], first, np.float32)
    return np.zeros(shape, np.float32)

"""llm.c's model files (gpt2_124M.bin and the like): read into a GPT.

    256 int32     magic 20240326, version (3: float32, 5: bfloat16), block_size, vocab_size, n_layer, n_head, n_embd,
                  padded vocab_size; the rest 0
    then          wte, wpe, and each kind of tensor for all layers, one after the other; weights are (out, in)

Source: llm.c, train_gpt2.py write_model and train_gpt2.cu gpt2_build_from_checkpoint (Karpathy 2024).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cmha import random
from cmha.errors import CheckpointError, message, quote_path
from cmha.gpt import layout
from cmha.gpt.config import GPTConfig
from cmha.gpt.model import GPT
from cmha.tensor_file import widened

if TYPE_CHECKING:
    from io import BufferedReader

    from _typeshed import StrPath

MAGIC, HEADER = 20240326, 256 * 4
TYPES: dict[int, np.dtype[Any]] = {3: np.dtype("<f4"), 5: np.dtype("<u2")}  # the second is bfloat16
_SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
_ORDER = (
    "ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias",
    "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias",
)  # fmt: skip


def read_llmc(path: StrPath) -> GPT:
    """The GPT of one of llm.c's model files, in eval mode; padding of its vocabulary is left out."""
    if str(path).endswith((".pt", ".pth", ".ckpt", ".pkl")) or os.path.basename(path) == "pytorch_model.bin":
        rule = "a pickle can run code and is not read; save it as safetensors with PyTorch first"
        raise CheckpointError(message("convert", rule, quote_path(path)))
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(HEADER)
        start = np.frombuffer(header, "<i4", count=min(8, len(header) // 4)).tolist()
        if len(header) < HEADER or start[0] != MAGIC:
            _refuse(path, "must be a model file of llm.c", f"a start of {header[:8].hex(' ') or 'nothing'}",
                    f"{MAGIC.to_bytes(4, 'little').hex(' ')} and {HEADER} bytes of header")  # fmt: skip
        if start[1] not in TYPES:
            _refuse(path, "version must be known", str(start[1]), "3 (float32) or 5 (bfloat16)")
        try:
            cfg = GPTConfig(**dict(zip(_SIZES, start[2:7], strict=True)))
        except ValueError as error:
            _refuse(path, *str(error).partition("] ")[2].split("; got ", 1))
        padded, dtype = start[7], TYPES[start[1]]
        if padded < cfg.vocab_size:
            _refuse(path, "padded vocab_size must hold the vocabulary", f"{padded} for {cfg.vocab_size}")
        values = cfg.num_parameters() + (padded - cfg.vocab_size) * cfg.n_embd
        if size != HEADER + values * dtype.itemsize:
            _refuse(path, "size must be that of its model", f"{size} bytes", f"{HEADER + values * dtype.itemsize}")
        with random.no_init():
            model = GPT(cfg)
        _fill(model, file, padded, dtype, path)
    return model.eval()


def _refuse(path: StrPath, rule: str, got: str, expected: str | None = None) -> NoReturn:
    raise CheckpointError(message("convert", rule, f"{got} in {quote_path(path)}", expected)) from None


def _fill(model: GPT, file: BufferedReader, padded: int, dtype: np.dtype[Any], path: StrPath) -> None:
    own, shapes = model.state_dict(), layout.shapes(model.cfg)
    blocks = [f"h.{i}.{kind}" for kind in _ORDER for i in range(model.cfg.n_layer)]
    for name in ("wte.weight", "wpe.weight", *blocks, "ln_f.weight", "ln_f.bias"):
        shape = shapes[name]
        turned = name.startswith("h.")  # a vector stays as it is
        raw = np.empty((padded, shape[1]) if name == "wte.weight" else shape[::-1] if turned else shape, dtype)
        if file.readinto(raw.reshape(-1).view(np.uint8).data) < raw.nbytes:
            _refuse(path, "file must not shrink while it is read", f"an end inside {name}")
        rows = widened(raw)
        layout.fill(own, name, 0, rows.T if turned else rows[: shape[0]])

"""A GPT as a Hugging Face GPT-2 folder: config.json, and model.safetensors or the shards of its index.

Two keys of our own in config.json (cmha_bias, cmha_output_projection) say which parts of GPT-2 a model leaves out;
transformers hands them through. Nothing is written into a model before names, shapes and types of all tensors fit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import warnings
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from cmha import random
from cmha.errors import CheckpointError, listed, message, quote, quote_path
from cmha.files import MAX_TENSORS, read_json, save_safetensors, write_json
from cmha.gpt import layout
from cmha.gpt.config import GPTConfig
from cmha.tensor_file import TensorFile

if TYPE_CHECKING:
    from _typeshed import StrPath

    from cmha.gpt.model import GPT

    Model = TypeVar("Model", bound=GPT)

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# What this model computes: another value in a file would silently compute something else.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one formula
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
    "auto_map": (None,),  # code of the folder's own
    "pruned_heads": (None, {}),
}
_SIZES = {  # ours: theirs, and their second name for it
    "vocab_size": ("vocab_size", "vocab_size"),
    "block_size": ("n_positions", "max_position_embeddings"),
    "n_layer": ("n_layer", "num_hidden_layers"),
    "n_head": ("n_head", "num_attention_heads"),
    "n_embd": ("n_embd", "hidden_size"),
}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_FLAGS = ("bias", "output_projection")
_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # the causal mask, which old files carry


def save(model: GPT, folder: StrPath) -> None:
    os.makedirs(folder, exist_ok=True)
    tensors = {f"transformer.{name}": array for name, array in layout.tensors(model)}
    save_safetensors(os.path.join(folder, WEIGHTS), tensors, {"format": "pt"})
    write_json(os.path.join(folder, CONFIG), config_dict(model.cfg))


def load(model_class: type[Model], folder: StrPath) -> Model:
    """A new model_class(GPTConfig) with the weights of a folder, in eval mode."""
    with contextlib.ExitStack() as stack:
        path = _weights_path(folder)
        cfg = read_config(os.path.join(folder, CONFIG))
        files, faults = _open_files(path, stack)
        found, more = _find(files, cfg)
        if faults + more:
            _refuse(path, "tensors must fit the index and the configuration", listed(faults + more))
        with random.no_init():
            model = model_class(cfg)
        _fill(model, found, path)
    return model.eval()


def _refuse(path: StrPath, rule: str, got: str, hint: str | None = None) -> NoReturn:
    raise CheckpointError(message("from_pretrained", rule, f"{got} in {quote_path(path)}", hint=hint)) from None


# ------------------------------------------------------------------------------------------------- config.json


def config_dict(cfg: GPTConfig) -> dict[str, Any]:
    last = cfg.vocab_size - 1 if cfg.vocab_size == 50257 else None  # GPT-2's <|endoftext|>
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, values in _FIXED.items() if values[0] is not None},
        **{key: getattr(cfg, name) for name, (key, _) in _SIZES.items()},
        "n_inner": None,
        **{name: cfg.dropout for name in _DROPOUTS},
        "initializer_range": 0.02,
        "bos_token_id": last,
        "eos_token_id": last,
        **{f"cmha_{name}": getattr(cfg, name) for name in _FLAGS},
    }


def read_config(path: StrPath) -> GPTConfig:
    """The GPTConfig of a config.json. Only keys known here are read, each with its type; all faults in one error.

    A key this model knows only one value of (activation_function, layer_norm_epsilon, ...) is refused with another.
    """
    given = read_json(path)
    faults = [
        f"{key}={quote(given[key])}, expected {quote(values[0])}"
        for key, values in _FIXED.items()
        if key in given and not any(type(given[key]) is type(v) and given[key] == v for v in values)
    ]
    sizes = {}
    for name, (key, second) in _SIZES.items():
        values = [given[k] for k in dict.fromkeys((key, second)) if k in given]
        if not values or any(type(v) is not int for v in values) or min(values) < 1 or min(values) != max(values):
            got = "no" if not values else " and ".join(map(quote, values)) + " as"
            faults.append(f"{got} {key}, expected one integer of at least 1")
        else:
            sizes[name] = values[0]
    if given.get("n_inner") not in (None, 4 * sizes.get("n_embd", 0)):
        faults.append(f"n_inner={quote(given['n_inner'])}, expected null or 4 * n_embd")
    rates = [given.get(key, 0.0) for key in _DROPOUTS]
    faults += [
        f"{key}={quote(rate)}, expected a number from 0 to below 1"
        for key, rate in zip(_DROPOUTS, rates, strict=True)
        if type(rate) not in (int, float) or not 0 <= rate < 1
    ]
    flags = {name: given.get(f"cmha_{name}", True) for name in _FLAGS}
    faults += [f"cmha_{n}={quote(v)}, expected true or false" for n, v in flags.items() if type(v) is not bool]
    if 12 * sizes.get("n_layer", 0) > MAX_TENSORS:
        faults.append(f"n_layer={sizes['n_layer']}, expected at most {MAX_TENSORS // 12}")
    if {"n_embd", "n_head"} <= set(sizes) and sizes["n_embd"] % sizes["n_head"]:
        faults.append(f"n_embd={sizes['n_embd']} and n_head={sizes['n_head']}, expected a multiple of the heads")
    if faults:
        _refuse(path, "this must be the configuration of a GPT-2", listed(faults))
    if len(set(rates)) > 1:
        warnings.warn(f"{path}: one dropout rate for all is known here; {rates} becomes 0", stacklevel=4)
    return GPTConfig(**sizes, dropout=rates[0] if len(set(rates)) == 1 else 0.0, **flags)


# ------------------------------------------------------------------------------------------------- weights


def _weights_path(folder: StrPath) -> str:
    """The file of the weights, or of the index of its shards."""
    folder = os.fspath(folder)
    if not os.path.exists(folder):
        raise FileNotFoundError(errno.ENOENT, "No such folder, and nothing is downloaded", folder)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else [os.path.basename(folder)]
    for name in (WEIGHTS, INDEX):
        if name in names and os.path.isdir(folder):
            return os.path.join(folder, name)
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        rule = f"weights must be safetensors: a pickle can run code, so {quote(pickles[0])} is not read"
        hint = "docs/bring-your-gpt2.md has the lines that convert PyTorch's files; llm.c's: cmha convert SRC DIR"
        _refuse(folder, rule, f"no {WEIGHTS}", hint)
    if not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.path.join(folder, WEIGHTS))


def _open_files(path: str, stack: contextlib.ExitStack) -> tuple[list[TensorFile], list[str]]:
    """([TensorFile], faults): the file itself, or all that the index names; they stay open as long as the stack."""

    def open_one(path: str) -> TensorFile:
        file = TensorFile(path)
        stack.callback(file.close)
        return file

    if os.path.basename(path) == WEIGHTS:
        return [open_one(path)], []
    index = read_json(path)
    places, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(places, dict) or not isinstance(metadata, dict):
        _refuse(path, "an index must hold weight_map, and an object as metadata", quote(index))
    names = list(dict.fromkeys(name if isinstance(name, str) else quote(name) for name in places.values()))
    odd = [quote(name) for name in names if not re.fullmatch(r"[^/\\\0]+\.safetensors", name)]
    if odd:
        _refuse(path, "shards must be plain names of .safetensors files beside the index", listed(odd))
    files = {name: open_one(os.path.join(os.path.dirname(path), name)) for name in names}
    faults = [f"no {quote(n)} in {place}" for n, place in places.items() if n not in files[place].shapes]
    for place, file in files.items():
        faults += [f"{quote(n)} in {place}, not in the index" for n in file.shapes if places.get(n) != place]
    size = sum(sum(file.sizes.values()) for file in files.values())
    if not faults and metadata.get("total_size", size) != size:
        faults.append(f"metadata.total_size={quote(metadata['total_size'])}, expected {size}")
    return list(files.values()), faults


def _find(files: list[TensorFile], cfg: GPTConfig) -> tuple[dict[str, tuple[TensorFile, str]], list[str]]:
    """({GPT-2's name: (file, name in it)}, faults)"""
    found, faults, expected = {}, [], layout.shapes(cfg)
    for file in files:
        for stored in file.shapes:
            name = stored.removeprefix("transformer.")
            if name in found:
                faults.append(f"{quote(name)} twice")
            elif not _BUFFER.fullmatch(name):
                found[name] = file, stored
    wanted = expected | ({"lm_head.weight": expected["wte.weight"]} if "lm_head.weight" in found else {})
    faults += [f"missing {name}" for name in wanted if name not in found and not layout.is_left_out(name, cfg)]
    faults += [f"unknown {quote(name)}" for name in found if name not in wanted]
    for name, shape in wanted.items():
        if name in found:
            file, stored = found[name]
            if file.shapes[stored] != shape:
                faults.append(f"{name} has shape {file.shapes[stored]}, expected {shape}")
            elif fault := file.fault(stored):
                faults.append(fault)
    return found, faults


def _fill(model: GPT, found: dict[str, tuple[TensorFile, str]], path: str) -> None:
    """Puts the tensors into the model; the output layer must be wte again, and what it leaves out must do nothing."""
    own, faults = model.state_dict(), []
    for name in (name for name in layout.shapes(model.cfg) if name in found):
        file, stored = found[name]
        if not all([layout.fill(own, name, first, rows) for first, rows in file.blocks(stored)]):
            faults.append(f"{name} does something, which cmha_bias or cmha_output_projection in {CONFIG} denies")
    if "lm_head.weight" in found:
        file, stored = found["lm_head.weight"]
        table = np.asarray(own["wte.weight"].data)
        blocks = ((rows, table[first : first + len(rows)]) for first, rows in file.blocks(stored))
        if not all(np.array_equal(*pair, equal_nan=True) for pair in blocks):
            faults.append("lm_head.weight differs from wte.weight, expected tied")
    if faults:
        _refuse(path, "tensors must compute what the configuration says", listed(faults))

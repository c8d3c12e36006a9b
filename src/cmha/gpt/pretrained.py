"""A GPT as a Hugging Face GPT-2 folder: config.json and model.safetensors.

GPT-2 joins the three projections of attention in c_attn (D, 3 D) and stores weights (in, out), as Linear does. What its
layout cannot say is written so that it computes the same: biases that are not there as zeros, a c_proj that is not
there as the identity; two keys of our own in config.json (cmha_bias, cmha_output_projection) tell it back.
"""

import os
import re

import numpy as np

from cmha.errors import CheckpointError, listed, message, quote, quote_path
from cmha.files import load_safetensors, read_json, save_safetensors, write_json
from cmha.gpt.config import GPTConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FIXED = {  # what this model computes; another value in a file would silently compute something else
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # the causal mask, which old files carry


def save(model, folder):
    os.makedirs(folder, exist_ok=True)
    save_safetensors(os.path.join(folder, WEIGHTS), to_gpt2(model), {"format": "pt"})
    write_json(os.path.join(folder, CONFIG), config_dict(model.cfg))


def load(folder):
    """(GPTConfig, {name of this package: array}) of a folder."""
    cfg = read_config(os.path.join(folder, CONFIG))
    path = os.path.join(folder, WEIGHTS)
    return cfg, from_gpt2(load_safetensors(path), cfg, path)


# ------------------------------------------------------------------------------------------------- config.json


def config_dict(cfg):
    last = cfg.vocab_size - 1 if cfg.vocab_size == 50257 else None  # GPT-2's <|endoftext|>
    return {
        "architectures": ["GPT2LMHeadModel"],
        **_FIXED,
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.block_size,
        "n_embd": cfg.n_embd,
        "n_layer": cfg.n_layer,
        "n_head": cfg.n_head,
        "n_inner": None,
        **{name: cfg.dropout for name in _DROPOUTS},
        "initializer_range": 0.02,
        "bos_token_id": last,
        "eos_token_id": last,
        "cmha_bias": cfg.bias,
        "cmha_output_projection": cfg.output_projection,
    }


def read_config(path):
    given = read_json(path)
    for key, value in _FIXED.items():
        if given.get(key, value) != value:
            _refuse(path, f"{key} must be {value!r} for this model", quote(given[key]))
    sizes = {}
    for name, key in {"vocab_size": "vocab_size", "block_size": "n_positions", "n_layer": "n_layer", "n_head": "n_head",
                      "n_embd": "n_embd"}.items():  # fmt: skip
        if type(given.get(key)) is not int:
            _refuse(path, f"{key} must be an integer", quote(given.get(key)))
        sizes[name] = given[key]
    if given.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        _refuse(path, f"n_inner must be null or 4 * n_embd = {4 * sizes['n_embd']}", quote(given["n_inner"]))
    rates = {given.get(key, 0.0) for key in _DROPOUTS if not isinstance(given.get(key, 0.0), list | dict)}
    flags = {}
    for name in ("bias", "output_projection"):
        flags[name] = given.get(f"cmha_{name}", True)
        if type(flags[name]) is not bool:
            _refuse(path, f"cmha_{name} must be true or false", quote(flags[name]))
    try:
        return GPTConfig(**sizes, dropout=rates.pop() if len(rates) == 1 else 0.0, **flags)
    except (TypeError, ValueError) as error:
        _refuse(path, str(error).partition("] ")[2], "this")


def _refuse(path, rule, got):
    raise CheckpointError(message("from_pretrained", rule, f"{got} in {quote_path(path)}")) from None


# ------------------------------------------------------------------------------------------------- weights


def to_gpt2(model):
    """{Hugging Face's name: array} of a model."""
    cfg = model.cfg
    own = {name: np.asarray(t.data) for name, t in model.state_dict().items()}
    out = {}
    for name, width in _expected(cfg).items():  # what is not there by choice: zeros, or the identity for c_proj
        if name in own:
            out[f"transformer.{name}"] = own[name]
        elif name.endswith("attn.c_proj.weight"):
            out[f"transformer.{name}"] = np.eye(cfg.n_embd, dtype=np.float32)
        elif ".c_attn." in name:
            parts = [own.get(name.replace("c_attn", part)) for part in ("c_q", "c_k", "c_v")]
            zeros = np.zeros(cfg.n_embd, np.float32)
            out[f"transformer.{name}"] = np.concatenate([zeros if p is None else p for p in parts], axis=-1)
        else:
            out[f"transformer.{name}"] = np.zeros(width, np.float32)
    return out


def from_gpt2(tensors, cfg, path):
    """{name of this package: array}; every fault of the file in one error."""
    found = {name.removeprefix("transformer."): a for name, a in tensors.items()}
    found = {name: a for name, a in found.items() if not _BUFFER.fullmatch(name)}
    head = found.pop("lm_head.weight", None)
    expected = _expected(cfg)
    faults = [f"missing {name}" for name in expected if name not in found]
    faults += [f"unknown {quote(name)}" for name in found if name not in expected]
    for name, shape in expected.items():
        if name in found and found[name].shape != shape:
            faults.append(f"{name} has shape {found[name].shape}, expected {shape}")
        elif name in found and found[name].dtype != np.float32:
            faults.append(f"{name} is {found[name].dtype}, expected float32")
    if head is not None and "wte.weight" in found and not np.array_equal(head, found["wte.weight"], equal_nan=True):
        faults.append("lm_head.weight differs from wte.weight, expected tied")
    if faults:
        _refuse(path, "tensors must fit the configuration", listed(faults))
    state = {}
    for name, a in found.items():
        if ".c_attn." in name:
            for part, block in zip(("c_q", "c_k", "c_v"), np.split(a, 3, axis=-1), strict=True):
                state[name.replace("c_attn", part)] = block
        else:
            state[name] = a
    if not cfg.output_projection:
        state = {name: a for name, a in state.items() if ".attn.c_proj." not in name}
    return {name: a for name, a in state.items() if cfg.bias or not name.endswith("bias")}


def _expected(cfg):
    """{name without prefix: shape} of GPT-2's own layout, which always has biases and c_proj."""
    D = cfg.n_embd
    shapes = {"wte.weight": (cfg.vocab_size, D), "wpe.weight": (cfg.block_size, D)}
    for i in range(cfg.n_layer):
        for layer, n_in, n_out in (
            ("attn.c_attn", D, 3 * D),
            ("attn.c_proj", D, D),
            ("mlp.c_fc", D, 4 * D),
            ("mlp.c_proj", 4 * D, D),
        ):
            shapes |= {f"h.{i}.{layer}.weight": (n_in, n_out), f"h.{i}.{layer}.bias": (n_out,)}
        shapes |= {f"h.{i}.{norm}.{part}": (D,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
    return shapes | {"ln_f.weight": (D,), "ln_f.bias": (D,)}

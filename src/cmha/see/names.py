"""The names of what happens inside a model, and the modules they belong to.

A name is the path of a module, for that module's output, or the path of an attention and a word for one of the
intermediates that `MultiHeadAttention._step_by_step` hands to `named`:

    blocks.0.attn.scores      h[0].attn, `scores` of the eight steps          blocks.0.ln_1, blocks.0.attn.c_q, ...
    blocks.0.attn             the output of h[0].attn, before the residual    blocks.0      the output of h[0]
    logits                    what the whole GPT returns (of a bare attention: y)
"""

from __future__ import annotations

from collections.abc import Iterable

from cmha.errors import listed, message, quote
from cmha.nn import Module, MultiHeadAttention

# In the order of the steps: word, step, the tensor's name in the lesson, shape.
STEPS = {
    "c_q": (1, "q"),  # (B, T, D)
    "c_k": (1, "k"),
    "c_v": (1, "v"),
    "q": (2, "q"),  # (B, T, D)
    "k": (2, "k"),  # (B, S, D), of a cache (B, H, S, hd)
    "v": (2, "v"),
    "q_heads": (3, "q"),  # (B*H, T, hd)
    "k_heads": (3, "k"),  # (B*H, S, hd)
    "v_heads": (3, "v"),
    "scores": (4, "scores"),  # (B*H, T, S), divided by sqrt(hd)
    "masked_scores": (5, "scores"),  # only where there is a mask
    "weights": (6, "weights"),
    "dropped_weights": (6, "weights"),  # only where dropout drops
    "y_heads": (6, "y"),  # (B*H, T, hd)
    "merged": (7, "y"),  # (B, T, D)
    "c_proj": (8, "y"),
}
INSIDE = [word for word in STEPS if not word.startswith("c_")]  # those that pass through `named`
SOMETIMES = {  # the words that a pass may be without, and when they are there
    "masked_scores": "where something is hidden: is_causal, a mask, a key_mask",
    "dropped_weights": "where dropout drops: in training, with dropout > 0",
}


def modules(op: str, model: object) -> dict[str, Module]:
    """{name: module} of the model and all its parts; the model itself is '' here."""
    if not isinstance(model, Module):
        raise TypeError(message(op, "needs a module", type(model).__name__))
    return {public(name): module for name, module in model.named_modules()}


def attentions(op: str, model: object) -> dict[str, MultiHeadAttention]:
    """{name: MultiHeadAttention} in the order of the layers; at least one."""
    found = {name: part for name, part in modules(op, model).items() if isinstance(part, MultiHeadAttention)}
    if not found:
        raise ValueError(message(op, "the model must hold a MultiHeadAttention", type(model).__name__))
    return found


def public(name: str) -> str:
    """The name for users: GPT calls its blocks h, as GPT-2 does."""
    return "blocks." + name[2:] if name.startswith("h.") else name


def join(path: str, word: str) -> str:
    return f"{path}.{word}" if path else word


def output_name(model: Module) -> str:
    """What the output of the whole model is called."""
    return "logits" if hasattr(model, "cfg") else "y"


def unknown(op: str, name: object, names: Iterable[str], what: str = "intermediate") -> KeyError:
    """The error for a name that is not there."""
    return KeyError(message(op, f"no such {what}", quote(name), f"one of {listed(names, 40)}"))

"""The attention weights of a whole model, from the fused kernels."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from cmha.autograd import no_grad
from cmha.errors import check_indices
from cmha.nn.module import evaluating
from cmha.see import names

if TYPE_CHECKING:
    from cmha.nn import Module
    from cmha.nn.kv_cache import ModelCache
    from cmha.nn.module import Hook
    from cmha.tensor import Tensor
    from cmha.types import ArrayLike, FloatArray


def attention_weights(
    gpt: Module,
    ids: ArrayLike,
    *,
    layers: ArrayLike | None = None,
    heads: ArrayLike = True,
    rows: ArrayLike | None = None,
    cache: ModelCache | None = None,
) -> dict[int, FloatArray]:
    """Weights of a pass over ids (B, T): a dict {layer: array (B, H, T, S)}, in eval mode, without gradient.

    layers: a list of layers (default all); heads (True or a list) and rows: as need_weights and weight_rows of
    MultiHeadAttention.
    """
    attentions = list(names.attentions("attention_weights", gpt).values())
    n = len(attentions)
    wanted = range(n) if layers is None else check_indices("attention_weights", "layers", layers, n)
    if heads is not True:
        least = min(attentions[layer].n_head for layer in wanted)
        heads = check_indices("attention_weights", "heads, unless True,", heads, least)
    out: dict[int, FloatArray] = {}

    def ask(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "need_weights": heads, "weight_rows": rows}

    def keep(layer: int) -> Hook:
        def hook(_: Module, args: object, output: tuple[Tensor, Tensor]) -> Tensor:
            out[layer] = output[1].numpy()
            return output[0]

        return hook

    with ExitStack() as stack:
        for layer in wanted:
            stack.callback(attentions[layer].register_forward_pre_hook(ask).remove)
            stack.callback(attentions[layer].register_forward_hook(keep(layer)).remove)
        stack.enter_context(evaluating(gpt))
        with no_grad():
            gpt(ids) if cache is None else gpt(ids, cache=cache)
    return out

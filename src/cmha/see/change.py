"""What changes when one changes something inside: heads off, an intermediate replaced, the loss without each head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cmha import functional
from cmha.autograd import no_grad
from cmha.errors import check_indices, check_integer, message, quote
from cmha.gpt import GPT
from cmha.nn.module import evaluating
from cmha.see import names
from cmha.see.inside import Inside
from cmha.tensor import Tensor, to_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cmha.nn import Module, MultiHeadAttention
    from cmha.nn.module import HookHandle
    from cmha.types import ArrayLike, IntArray

    Replacement: TypeAlias = ArrayLike | Callable[[Tensor], ArrayLike]


def heads_off(model: Module, heads: ArrayLike | Mapping[int, ArrayLike]) -> HeadsOff:
    """`with cmha.heads_off(model, heads):` inside, these heads add nothing: their columns of the merged y are zero
    before c_proj (what cmha.trace calls `merged` stands before that).

    heads: a list of head numbers for a MultiHeadAttention; for a GPT a dict {layer: list of heads}, both from 0. On the
    fused path and the single steps alike, in training, with and without a cache. With checkpoint_activations, which
    runs blocks again in the backward pass, backward belongs inside too.
    """
    return HeadsOff(model, heads)


class HeadsOff(Inside):
    op = "heads_off"

    def __init__(self, model: Module, heads: ArrayLike | Mapping[int, ArrayLike]) -> None:
        layers = list(names.attentions("heads_off", model).values())
        if not isinstance(heads, Mapping):
            if len(layers) > 1:
                rule = "a model of several layers needs a dict"
                raise TypeError(message("heads_off", rule, quote(heads), "{layer: [heads]}"))
            heads = {0: heads}
        self._off: list[tuple[MultiHeadAttention, list[int]]] = []
        for layer, off in heads.items():
            mha = layers[check_integer("heads_off", "a layer", layer, 0, len(layers) - 1)]
            self._off.append((mha, check_indices("heads_off", "the heads of a layer", off, mha.n_head, 0)))

    def _set_up(self, stack: ExitStack) -> None:
        for mha, off in self._off:
            stack.callback(_silence(mha, off).remove)


def _silence(mha: MultiHeadAttention, off: list[int]) -> HookHandle:
    """The hook that zeroes the columns of these heads where they leave the attention."""
    columns = np.zeros((mha.n_head, mha.head_dim), bool)
    columns[off] = True
    silent = functional.tensor(columns.reshape(-1))  # (D,)
    if mha.c_proj is not None:

        def on_input(_: Module, args: tuple[Tensor, ...], kwargs: Any) -> tuple[tuple[Tensor, ...], Any]:
            return (args[0].masked_fill(silent, 0.0),), kwargs

        return mha.c_proj.register_forward_pre_hook(on_input)

    def on_output(_: Module, args: object, out: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        if isinstance(out, tuple):
            return out[0].masked_fill(silent, 0.0), *out[1:]
        return out.masked_fill(silent, 0.0)

    return mha.register_forward_hook(on_output)


def replace(model: Module, changes: Mapping[str, Replacement]) -> Replace:
    """`with cmha.replace(model, changes):` inside, intermediates are replaced: {name: new}, with the names that
    cmha.trace lists.

    new is a tensor or an array, or a function of the tensor that stands there; the shape must stay. A word of the eight
    steps (`blocks.0.attn.scores`) makes that attention run step by step; an output of a module leaves it fused. A name
    that no pass inside came by (`dropped_weights` without dropout) is a ValueError at the end of the `with`.
    """
    return Replace(model, changes)


class Replace(Inside):
    op = "replace"

    def __init__(self, model: Module, changes: Mapping[str, Replacement]) -> None:
        parts, attentions = names.modules("replace", model), names.attentions("replace", model)
        if not isinstance(changes, Mapping):
            raise TypeError(message("replace", "needs a dict", quote(changes), "{name: tensor, array or function}"))
        known: dict[str, tuple[Module, str | None]]
        known = {name or names.output_name(model): (part, None) for name, part in parts.items()}
        known |= {names.join(path, word): (mha, word) for path, mha in attentions.items() for word in names.INSIDE}
        self._changes: dict[str, tuple[Module, str | None, Replacement]] = {}
        self._unseen: set[str] = set()
        for name, new in changes.items():
            if not isinstance(name, str) or names.public(name) not in known:
                raise names.unknown("replace", name, known)
            if not callable(new):
                new = to_tensor(new, "replace").float()
            self._changes[name] = *known[names.public(name)], new

    def _set_up(self, stack: ExitStack) -> None:
        self._unseen = set(self._changes)
        for name, (part, word, new) in self._changes.items():
            if word is None:
                handle = part.register_forward_hook(partial(self._output, name, new))
            else:
                handle = part._register("inside", partial(self._intermediate, name, word, new))
            stack.callback(handle.remove)

    def _output(self, name: str, new: Replacement, module: Module, args: object, out: Any) -> Any:
        if isinstance(out, tuple):
            return self._replaced(name, new, out[0]), *out[1:]
        return self._replaced(name, new, out)

    def _intermediate(self, name: str, word: str, new: Replacement, at: str, x: Tensor) -> Tensor:
        return self._replaced(name, new, x) if at == word else x

    def _replaced(self, name: str, new: Replacement, x: Tensor) -> Tensor:
        self._unseen.discard(name)
        y = new(x) if callable(new) else new
        if y is None:
            raise TypeError(message("replace", f"the function for {name} must return a tensor or an array", "None"))
        y = to_tensor(y, "replace").float()
        if y.shape != x.shape:
            raise ValueError(message("replace", f"{name} must keep its shape", str(y.shape), str(x.shape)))
        return y

    def _end(self, failed: bool) -> None:
        if failed or not self._unseen:
            return
        name = next(name for name in self._changes if name in self._unseen)
        when = names.SOMETIMES.get(self._changes[name][1] or "", "whenever its module is called")
        raise ValueError(message("replace", f"{name} never occurred inside the `with`; it is there {when}"))


def head_importance(gpt: GPT, ids: ArrayLike, *, batch_size: int = 8) -> NDArray[np.float64]:
    """Loss without each head minus the loss with all, in nats per token: a float64 array (layers, heads).

    ids: the token ids of a text (n,), cut into windows of block_size, or windows (B, T + 1) as they are. In eval mode;
    the first entry of a window is never predicted. Positive: the head helps on this text. 1 + L * H passes over it,
    batch_size windows at a time.
    """
    if not isinstance(gpt, GPT):
        raise TypeError(message("head_importance", "needs a GPT", type(gpt).__name__))
    batch_size = check_integer("head_importance", "batch_size", batch_size, 1)
    attentions = list(names.attentions("head_importance", gpt).values())
    windows = _windows(ids, gpt.cfg.block_size)
    with evaluating(gpt):
        whole = _loss(gpt, windows, batch_size)
        out = np.zeros((len(attentions), attentions[0].n_head))
        for layer, head in np.ndindex(*out.shape):
            with heads_off(gpt, {layer: [head]}):
                out[layer, head] = _loss(gpt, windows, batch_size) - whole
    return out


def _windows(ids: ArrayLike, block_size: int) -> list[IntArray]:
    """A list of (rows, T + 1) arrays: the windows of full length, and the shorter one at the end of a text."""
    given = to_tensor(ids, "head_importance")
    if given.dtype != "int64" or given.ndim not in (1, 2) or given.shape[-1] < 2 or given.shape[0] < 1:
        got = f"{given.dtype} of shape {given.shape}"
        rule = "ids must be (n,) or (B, T + 1) integers, at least one row, two or more a row"
        raise ValueError(message("head_importance", rule, got))
    text = given.numpy()
    if text.ndim == 2:
        return [text]
    whole = (len(text) - 1) // block_size
    rest = text[whole * block_size :][None]
    full = text[np.arange(whole)[:, None] * block_size + np.arange(block_size + 1)]  # the last of one begins the next
    return [rows for rows in (full, rest) if rows.shape[0] and rows.shape[1] > 1]


def _loss(gpt: GPT, windows: list[IntArray], batch_size: int) -> float:
    """Mean of -ln p over all predicted tokens."""
    total, count = 0.0, 0
    with no_grad():
        for rows in windows:
            for start in range(0, len(rows), batch_size):
                batch = rows[start : start + batch_size]
                _, loss = gpt(batch[:, :-1], batch[:, 1:])
                total += loss.item() * batch[:, 1:].size
                count += batch[:, 1:].size
    return total / count

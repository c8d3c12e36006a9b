"""What changes when one changes something inside: heads off, an intermediate replaced, the loss without each head."""

from contextlib import ExitStack, contextmanager

import numpy as np

from cmha import functional
from cmha.autograd import no_grad
from cmha.errors import check_integer, message, quote
from cmha.gpt import GPT
from cmha.see import names
from cmha.tensor import to_tensor


@contextmanager
def heads_off(model, heads):
    """Inside, these heads add nothing: their columns of the merged y are zero before c_proj.

    heads: a list of head numbers for a MultiHeadAttention; for a GPT a dict {layer: list of heads}, both from 0. On the
    fused path and the single steps alike, in training, with and without a cache. With checkpoint_activations, which
    runs blocks again in the backward pass, backward belongs inside too.
    """
    layers = list(names.attentions("heads_off", model).values())
    if not isinstance(heads, dict):
        if len(layers) > 1:
            rule = "a model of several layers needs a dict"
            raise TypeError(message("heads_off", rule, quote(heads), "{layer: [heads]}"))
        heads = {0: heads}
    with ExitStack() as stack:
        for layer, off in heads.items():
            mha = layers[check_integer("heads_off", "layer", layer, 0, len(layers) - 1)]
            stack.callback(_silence(mha, off).remove)
        yield


def _silence(mha, off):
    """The hook that zeroes the columns of these heads where they leave the attention."""
    columns = np.zeros((mha.n_head, mha.head_dim), bool)
    for head in off:
        columns[check_integer("heads_off", "a head", head, 0, mha.n_head - 1)] = True
    silent = functional.tensor(columns.reshape(-1))  # (D,)
    if mha.c_proj is not None:

        def on_input(_, args, kwargs):
            return (args[0].masked_fill(silent, 0.0),), kwargs

        return mha.c_proj.register_forward_pre_hook(on_input)

    def on_output(_, args, out):
        whole = out if isinstance(out, tuple) else (out,)
        whole = (whole[0].masked_fill(silent, 0.0), *whole[1:])
        return whole if isinstance(out, tuple) else whole[0]

    return mha.register_forward_hook(on_output)


@contextmanager
def replace(model, changes):
    """Inside, intermediates are replaced: {name: new}, with the names that cmha.trace lists.

    new is a tensor or an array, or a function of the tensor that stands there; the shape must stay. A word of the eight
    steps (`blocks.0.attn.scores`) makes that attention run step by step; an output of a module leaves it fused.
    """
    parts = names.modules("replace", model)
    attentions = names.attentions("replace", model)
    with ExitStack() as stack:
        for name, new in changes.items():
            path, _, word = names.public(name).rpartition(".")
            if path in attentions and word in names.INSIDE:
                stack.enter_context(_replace_inside(attentions[path], word, name, new))
            elif names.public(name) in parts or name == names.output_name(model):
                part = parts[names.public(name) if name != names.output_name(model) else ""]
                stack.callback(part.register_forward_hook(_replace_output(name, new)).remove)
            else:
                known = [n for n in parts if n] + [names.join(p, w) for p in attentions for w in names.INSIDE]
                raise names.unknown("replace", name, known)
        yield


@contextmanager
def _replace_inside(mha, word, name, new):
    fused, before, own = mha.fused, mha.named, vars(mha).get("named")

    def named(at, x):
        x = before(at, x)
        return _replaced(name, new, x) if at == word else x

    mha.fused, mha.named = False, named
    try:
        yield
    finally:
        mha.fused = fused
        vars(mha).pop("named") if own is None else setattr(mha, "named", own)


def _replace_output(name, new):
    def hook(module, args, out):
        if isinstance(out, tuple):
            return _replaced(name, new, out[0]), *out[1:]
        return _replaced(name, new, out)

    return hook


def _replaced(name, new, x):
    y = to_tensor(new(x) if callable(new) else new, "replace").float()
    if y.shape != x.shape:
        raise ValueError(message("replace", f"{name} must keep its shape", y.shape, x.shape))
    return y


def head_importance(gpt, ids, *, batch_size=8):
    """Loss without each head minus the loss with all, in nats per token: a float64 array (layers, heads).

    ids: the token ids of a text (n,), cut into windows of block_size, or windows (B, T + 1) as they are. In eval mode;
    the first entry of a window is never predicted. Positive: the head helps on this text. 1 + L * H passes over it.
    """
    if not isinstance(gpt, GPT):
        raise TypeError(message("head_importance", "needs a GPT", type(gpt).__name__))
    attentions = list(names.attentions("head_importance", gpt).values())
    windows = _windows(ids, gpt.cfg.block_size)
    training = gpt.training
    gpt.eval()
    try:
        whole = _loss(gpt, windows, batch_size)
        out = np.zeros((len(attentions), attentions[0].n_head))
        for layer, head in np.ndindex(*out.shape):
            with heads_off(gpt, {layer: [head]}):
                out[layer, head] = _loss(gpt, windows, batch_size) - whole
    finally:
        gpt.train(training)
    return out


def _windows(ids, block_size):
    """A list of (rows, T + 1) arrays: the windows of full length, and the shorter one at the end of a text."""
    ids = to_tensor(ids, "head_importance")
    if ids.dtype != "int64" or ids.ndim not in (1, 2) or ids.shape[-1] < 2:
        got = f"{ids.dtype} of shape {ids.shape}"
        raise ValueError(message("head_importance", "ids must be (n,) or (B, T + 1) integers, two or more a row", got))
    ids = ids.numpy()
    if ids.ndim == 2:
        return [ids]
    whole = (len(ids) - 1) // block_size
    rest = ids[whole * block_size :][None]
    full = ids[np.arange(whole)[:, None] * block_size + np.arange(block_size + 1)]  # the last of one begins the next
    return [rows for rows in (full, rest) if rows.shape[0] and rows.shape[1] > 1]


def _loss(gpt, windows, batch_size):
    """Mean of -ln p over all predicted tokens."""
    total = count = 0
    with no_grad():
        for rows in windows:
            for start in range(0, len(rows), batch_size):
                batch = rows[start : start + batch_size]
                _, loss = gpt(batch[:, :-1], batch[:, 1:])
                total += loss.item() * batch[:, 1:].size
                count += batch[:, 1:].size
    return total / count

"""Every named intermediate of a real forward pass, read off the arrays it made.

Two sources: `autograd.watch` sees every op with its arrays and time; hooks on all modules, and `named` of every
attention, say which array has which name (see/names.py).
"""

from dataclasses import dataclass, field

import numpy as np

from cmha._core import Array
from cmha.autograd import no_grad, watch
from cmha.see import names
from cmha.see.memory import owners_text
from cmha.see.table import table
from cmha.tensor import to_tensor

# (step, op) -> what is done, and the tensor if it is not the one of the step
_WHAT = {
    (4, "permute"): ("transpose k", "k"),
    (4, "matmul"): ("q @ k^T", None),
    (4, "multiply"): ("divide by sqrt(hd)", None),
    (5, "add"): ("add the mask", None),
    (6, "matmul"): ("weights @ v", None),
}
_PREFIX = {1: "project", 2: "remember: ", 3: "split heads: ", 7: "merge heads: ", 8: "mix heads: c_proj"}
NOTE = "run step by step: the fused kernels are off while tracing"


@dataclass
class Intermediate:
    """One array of a pass: shape, strides (in elements), storage ("view" of the array before, "copy" of it, "new"),
    bytes (of its elements, whether or not they moved), seconds (of its op alone)."""

    where: str  # the module whose forward made it, or the one around a module without parts
    step: int | None  # of the eight, inside an attention
    what: str
    tensor: str
    storage: str
    array: Array
    seconds: float
    names: list = field(default_factory=list)

    shape = property(lambda self: self.array.shape)
    strides = property(lambda self: self.array.strides)
    bytes = property(lambda self: self.array.nbytes)

    def numpy(self):
        """A read-only view of the numbers."""
        return np.asarray(self.array)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.numpy(), dtype=dtype)

    def as_dict(self):
        return {"step": self.step, "name": self.what, "tensor": self.tensor, "shape": list(self.shape),
                "strides": list(self.strides), "storage": self.storage, "bytes": self.bytes,
                "seconds": self.seconds}  # fmt: skip


def trace(model):
    """`with cmha.trace(model) as t: model(x)`, for a MultiHeadAttention, a GPT or what holds them, with and without a
    cache: then t["blocks.0.attn.scores"] is an Intermediate, `list(t)` are the names, t.rows all arrays in their order,
    and print(t) the table of the eight steps. Of several passes inside, t holds the last.

    The pass runs step by step (`fused = False`), whose last bits differ from the fused kernels', and keeps every array.
    Outside of the `with` nothing is left of it.
    """
    return Trace(model)


class Trace:
    def __init__(self, model):
        self._attentions = names.attentions("trace", model)
        self._model, self._modules = model, names.modules("trace", model)
        self.rows, self._named, self._marks = [], {}, []

    def __enter__(self):
        self._before = [(mha, mha.fused, vars(mha).get("named")) for mha in self._attentions.values()]
        self._watch = watch()
        self._events = self._watch.__enter__()
        for path, mha in self._attentions.items():
            mha.fused, mha.named = False, self._namer(path, mha.named)
        root = names.output_name(self._model)
        self._hooks = [part.register_forward_hook(self._hook(path or root)) for path, part in self._modules.items()]
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()
        for mha, fused, named in self._before:
            mha.fused = fused
            vars(mha).pop("named") if named is None else setattr(mha, "named", named)
        self._watch.__exit__(None, None, None)
        if self._marks:  # parts were called, not the model
            self._finish()

    def _namer(self, path, before):
        def named(word, x):
            x = before(word, x)
            self._marks.append((len(self._events), path, word, x.data))
            return x

        return named

    def _hook(self, name):
        path, _, word = name.rpartition(".")

        def hook(module, args, out):
            out = out[0] if isinstance(out, tuple) else out
            self._marks.append((len(self._events), path, word, out.data))
            if module is self._model:
                self._finish()

        return hook

    def _finish(self):
        """Turns what was seen of a pass into rows."""
        self.rows, self._named, made, done = [], {}, {}, 0
        for position, path, word, array in self._marks:
            step, tensor = names.STEPS.get(word, (None, "")) if path in self._attentions else (None, "")
            ops = [event[0] for event in self._events[done:position]]
            for i, event in enumerate(self._events[done:position]):
                if step == 2:  # what a cache needs has no word of its own: each op for the keys, then for the values
                    tensor = "k" if 2 * ops[:i].count(ops[i]) < ops.count(ops[i]) else "v"
                row = _row(path, step, tensor, event)
                made[id(event[2])] = row
                self.rows.append(row)
            done = position
            row = made.get(id(array))
            if row is None or (step == 2 and word != "q"):
                row = self._row_without_op(path, step, tensor, array)
            row.names.append(names.join(path, word))
            self._named[row.names[-1]] = row
        self._events.clear()
        self._marks.clear()

    def _row_without_op(self, path, step, tensor, array):
        """What no op made: keys and values that pass through or come from the cache, or what `replace` put there."""
        what = "replaced" if step != 2 else f"remember: {'no' if len(array.shape) == 3 else 'all of the'} cache"
        row = Intermediate(path, step, what, tensor, "view" if step == 2 else "new", array, 0.0)
        self.rows.append(row)
        return row

    def __getitem__(self, name):
        row = self._named.get(names.public(name) if isinstance(name, str) else name)
        if row is None:
            raise names.unknown("trace", name, self._named)
        return row

    def __iter__(self):
        return iter(self._named)

    def __len__(self):
        return len(self._named)

    def __contains__(self, name):
        return isinstance(name, str) and names.public(name) in self._named

    def steps(self, attention=None):
        """The rows of the eight steps, of the attention with this name (the first by default)."""
        path = next(iter(self._attentions)) if attention is None else names.public(attention)
        return [row for row in self.rows if row.where == path and row.step]

    def __str__(self):
        if not self.rows:
            return "nothing traced: call the model inside `with cmha.trace(model) as t:`"
        first, *others = self._attentions
        steps = [row.as_dict() for row in self.steps()]
        lines = [f"{first or type(self._model).__name__}, {NOTE}", "", table(steps)]
        q = self._named.get(names.join(first, "q"))
        if q is not None:
            lines += owners_text(*q.shape[:2], self._attentions[first].n_head, q.shape[2])
        if others:
            lines += ["", f"print(t.table(name)) shows the others: {', '.join(others)}"]
        if first:
            seconds = sum(row.seconds for row in self.rows)
            lines += ["", f"{len(self._named)} names, {len(self.rows)} arrays, {seconds * 1e3:.1f} ms in ops: list(t)"]
        return "\n".join(lines)

    def table(self, attention=None):
        """The eight steps of one attention as text."""
        return table([row.as_dict() for row in self.steps(attention)])


def _row(path, step, tensor, event):
    op, inputs, out, seconds = event
    storage = "view" if out.same_storage(inputs[0]) else "copy" if op in ("reshape", "contiguous") else "new"
    what, other = _WHAT.get((step, op), (None, None))
    if what is None:
        prefix = _PREFIX.get(step, "")
        what = prefix + op if prefix.endswith(" ") else prefix or op
    return Intermediate(path, step, what, other or tensor, storage, out, seconds)


def eight_steps(mha, x):
    """Run `mha` step by step and causally on x (B, T, D), without a cache; one dict per array it made, steps 1 to 8.

    Keys: step, name, tensor, shape, strides (in elements), storage, bytes, seconds, as of an Intermediate.
    """
    training, mha.training = mha.training, False
    try:
        with no_grad(), trace(mha) as t:
            mha(to_tensor(x, "trace").float(), is_causal=True)
    finally:
        mha.training = training
    return [row.as_dict() for row in t.steps()]

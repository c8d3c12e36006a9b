"""Every named intermediate of a real forward pass, read off the arrays it made.

Two sources: `autograd.watch` sees every op with its arrays and time; hooks around all modules, and at `named`
of every attention, say which array has which name (see/names.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import numpy as np

from cmha._core import Array
from cmha.autograd import is_recorded, no_grad, watch
from cmha.errors import message
from cmha.nn.module import evaluating
from cmha.see import names
from cmha.see.inside import Inside
from cmha.see.memory import owners_text
from cmha.see.table import table
from cmha.tensor import to_tensor

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from cmha.nn import Module, MultiHeadAttention
    from cmha.tensor import Tensor
    from cmha.types import ArrayLike, Event, NumPyArray, Shape

# (step, op) -> what is done, and the tensor if it is not the one of the step
_WHAT: dict[tuple[int, str], tuple[str | None, str | None]] = {
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
    names: list[str] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        return self.array.shape

    @property
    def strides(self) -> Shape:
        return self.array.strides

    @property
    def bytes(self) -> int:
        return self.array.nbytes

    def numpy(self) -> NumPyArray:
        """A read-only view of the numbers."""
        return np.asarray(self.array)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NumPyArray:
        return np.array(self.numpy(), dtype=dtype)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        rule = "an Intermediate is the memory of a pass and can be neither copied nor pickled"
        raise TypeError(message("trace", rule, hint="np.array(intermediate) is a copy of its numbers"))

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "name": self.what, "tensor": self.tensor, "shape": list(self.shape),
                "strides": list(self.strides), "storage": self.storage, "bytes": self.bytes,
                "seconds": self.seconds}  # fmt: skip


def trace(model: Module) -> Trace:
    """`with cmha.trace(model) as t: model(x)`, for a MultiHeadAttention, a GPT or what holds them, with and without a
    cache: then t["blocks.0.attn.scores"] is an Intermediate, `list(t)` are the names, t.rows all arrays in their order,
    and print(t) the table of the eight steps. Of several passes of the model inside, t holds the last that came to its
    end; where the model itself was not called, its parts as they were called last. What this thread runs counts; blocks
    that the backward pass runs again (checkpoint_activations) do not.

    The pass runs step by step, whose last bits differ from the fused kernels', and keeps every array. What hooks and
    cmha.replace put in place is what t shows, whichever came first. Outside of the `with` nothing is left of it.
    """
    return Trace(model)


class Trace(Inside):
    """What trace gives: t[name] and iteration over names, rows (every Intermediate in its order), steps, table."""

    op = "trace"

    def __init__(self, model: Module) -> None:
        self._attentions = names.attentions("trace", model)
        self._model, self._modules = model, names.modules("trace", model)
        self.rows: list[Intermediate] = []
        self._named: dict[str, Intermediate] = {}
        self._events: list[Event] = []  # of the pass that runs: what ops did
        self._marks: list[tuple[int, str, str, Array]] = []  # after so many events: the array of a path and a word
        self._called: set[str] = set()
        self._depth, self._whole = 0, False

    def _set_up(self, stack: ExitStack) -> None:
        self.rows, self._named, self._marks, self._whole = [], {}, [], False
        self._events = stack.enter_context(watch())
        root = names.output_name(self._model)
        for path, part in self._modules.items():
            stack.callback(part._register("around", partial(self._around, path or root)).remove)
        for path, mha in self._attentions.items():
            stack.callback(mha._register("seeing", partial(self._mark, path)).remove)

    def _end(self, failed: bool) -> None:
        if self._marks and not self._whole:  # parts were called, not the model
            self._finish()
        self._begin()

    def _begin(self) -> None:
        self._events.clear()
        self._marks.clear()
        self._called.clear()

    @contextmanager
    def _around(self, name: str, module: Module) -> Iterator[Callable[[Any], object]]:
        """One call of a module. One that fails leaves nothing of what it did."""
        if not is_recorded(self._events):  # another thread, or a backward pass that runs a block again
            yield lambda out: None
            return
        path, _, word = name.rpartition(".")
        outermost = not self._depth
        if outermost and (module is self._model or self._whole or name in self._called):
            self._begin()
        events, marks = len(self._events), len(self._marks)
        self._depth += 1
        try:
            yield lambda out: self._mark(path, word, out[0] if isinstance(out, tuple) else out)
        except BaseException:
            del self._events[events:], self._marks[marks:]
            raise
        finally:
            self._depth -= 1
        self._called.add(name)
        if module is self._model:
            self._finish()
            self._begin()
            self._whole = True

    def _mark(self, path: str, word: str, x: Tensor) -> Tensor:
        """Here stands the tensor of this name, after everything that changes it."""
        if is_recorded(self._events):
            self._marks.append((len(self._events), path, word, x.data))
        return x

    def _finish(self) -> None:
        """Turns what was seen of a pass into rows."""
        self.rows, self._named, done = [], {}, 0
        made: dict[int, Intermediate] = {}
        for position, path, word, array in self._marks:
            step, tensor = names.STEPS.get(word, (None, "")) if path in self._attentions else (None, "")
            events = [event for event in self._events[done:position] if event[0] != "checkpoint"]  # its block's ops are
            ops = [event[0] for event in events]
            for i, event in enumerate(events):
                if step == 2:  # what a cache needs has no word of its own: each op for the keys, then for the values
                    tensor = "k" if 2 * ops[:i].count(ops[i]) < ops.count(ops[i]) else "v"
                row = _row(path, step, tensor, event)
                made[id(event[2])] = row
                self.rows.append(row)
            done = position
            found = made.get(id(array))
            if found is None or (step == 2 and word != "q"):
                found = self._row_without_op(path, step, tensor, array)
            found.names.append(names.join(path, word))
            self._named[found.names[-1]] = found

    def _row_without_op(self, path: str, step: int | None, tensor: str, array: Array) -> Intermediate:
        """What no op made: keys and values that pass through or come from the cache, or what `replace` put there."""
        what = "replaced" if step != 2 else f"remember: {'no' if len(array.shape) == 3 else 'all of the'} cache"
        row = Intermediate(path, step, what, tensor, "view" if step == 2 else "new", array, 0.0)
        self.rows.append(row)
        return row

    def __getitem__(self, name: str) -> Intermediate:
        if name not in self:
            raise names.unknown("trace", name, self._named)
        return self._named[names.public(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and names.public(name) in self._named

    def steps(self, attention: str | None = None) -> list[Intermediate]:
        """The rows of the eight steps, of the attention with this name (the first by default)."""
        path = next(iter(self._attentions)) if attention is None else attention
        if not isinstance(path, str) or names.public(path) not in self._attentions:
            raise names.unknown("trace", path, map(repr, self._attentions), "attention")
        path = names.public(path)
        return [row for row in self.rows if row.where == path and row.step]

    def __str__(self) -> str:
        if not self.rows:
            return "nothing traced: call the model inside `with cmha.trace(model) as t:`"
        first, *others = self._attentions
        steps = [row.as_dict() for row in self.steps()]
        lines = [f"{first or type(self._model).__name__}, {NOTE}", "", table(steps)]
        q = self._named.get(names.join(first, "q"))
        if q is not None:
            lines += owners_text(q.shape[0], q.shape[1], self._attentions[first].n_head, q.shape[2])
        if others:
            lines += ["", f"print(t.table(name)) shows the others: {', '.join(others)}"]
        if first:
            seconds = sum(row.seconds for row in self.rows)
            lines += ["", f"{len(self._named)} names, {len(self.rows)} arrays, {seconds * 1e3:.1f} ms in ops: list(t)"]
        return "\n".join(lines)

    def table(self, attention: str | None = None) -> str:
        """The eight steps of one attention as text."""
        return table([row.as_dict() for row in self.steps(attention)])


def _row(path: str, step: int | None, tensor: str, event: Event) -> Intermediate:
    op, inputs, out, seconds = event
    storage = "view" if out.same_storage(inputs[0]) else "copy" if op in ("reshape", "contiguous") else "new"
    what, other = _WHAT.get((step or 0, op), (None, None))
    if what is None:
        prefix = _PREFIX.get(step or 0, "")
        what = prefix + op if prefix.endswith(" ") else prefix or op
    return Intermediate(path, step, what, other or tensor, storage, out, seconds)


def eight_steps(mha: MultiHeadAttention, x: ArrayLike) -> list[dict[str, Any]]:
    """Run `mha` step by step and causally on x (B, T, D), without a cache; one dict per array it made, steps 1 to 8.

    Keys: step, name, tensor, shape, strides (in elements), storage, bytes, seconds, as of an Intermediate.
    """
    with evaluating(mha), no_grad(), trace(mha) as t:
        mha(to_tensor(x, "trace").float(), is_causal=True)
    return [row.as_dict() for row in t.steps()]

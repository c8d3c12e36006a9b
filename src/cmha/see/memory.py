"""Where every element of x (B, T, D) stands in memory while heads are split and merged.

Element n of x is the number n. The numbers go through split_heads and merge_heads themselves, so the strides are
theirs, and after each op a number still tells its owner: n = ((b*T + t)*H + h)*hd + d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cmha.autograd import no_grad, watch
from cmha.nn import merge_heads, split_heads
from cmha.tensor import to_tensor

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import Event, IntArray, Shape

SMALL = 64  # elements that a terminal shows one by one


@dataclass
class Stage:
    """What one op leaves: in_memory and in_order are the numbers of the elements by address, and by index."""

    what: str
    shape: Shape
    strides: Shape
    storage: str
    in_memory: IntArray
    in_order: IntArray


def movement(B: int, T: int, H: int, hd: int) -> list[Stage]:
    """The stages of split_heads of x (B, T, H * hd), then of merge_heads of a y in new memory, as weights @ v is."""
    x = to_tensor(np.arange(B * T * H * hd, dtype=np.float32).reshape(B, T, H * hd))
    stages = [_stage("x", x.data, "new")]
    with no_grad():
        with watch() as events:
            heads = split_heads(x, H)
        stages += _stages("split", events)
        y = to_tensor(np.array(heads))
        stages.append(_stage("y", y.data, "new"))
        with watch() as events:
            merge_heads(y, H)
    return stages + _stages("merge", events)


def _stages(what: str, events: list[Event]) -> list[Stage]:
    return [_stage(f"{what}: {op}", out, "view" if out.same_storage(inputs[0]) else "copy")
            for op, inputs, out, _ in events]  # fmt: skip


def _stage(what: str, array: Array, storage: str) -> Stage:
    a = np.asarray(array)
    address = sum(np.indices(a.shape)[axis] * stride for axis, stride in enumerate(array.strides))
    order = a.ravel().astype(np.int64)
    return Stage(what, array.shape, array.strides, storage, order[np.argsort(address.ravel())], order)


def owners_text(B: int, T: int, H: int, D: int) -> list[str]:
    """Lines that show the head of every element, by address and by index, after each op; none for more than 64."""
    if not 0 < B * T * D <= SMALL:
        return []
    hd = D // H
    lines = ["", "the head that each element belongs to, in the order of memory, and in the order of its index"]
    stages = movement(B, T, H, hd)
    width = max(len(f"{s.what} {s.shape}") for s in stages)
    for s in stages:
        memory, index = (" ".join(_runs(n // hd % H, hd)) for n in (s.in_memory, s.in_order))
        lines.append(f"  {f'{s.what} {s.shape}':{width}}  {s.storage:4}  {memory}  |  {index}")
    return lines


def _runs(heads: IntArray, hd: int) -> list[str]:
    """Numbers of heads as text, in groups of hd."""
    text = [np.base_repr(h, 36).lower() if h < 36 else "?" for h in heads]
    return ["".join(text[i : i + hd]) for i in range(0, len(text), hd)]

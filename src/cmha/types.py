"""Names for types that recur in signatures. cmha itself imports this module for type checkers only.

Shapes: B batch, T queries, S keys, H heads, D width (n_embd), hd head_dim, V vocabulary, L layers.
"""

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cmha._core import Array
from cmha.ops.embedding import RowGradient

__all__ = [
    "ArrayLike", "AttentionOptions", "Axes", "Dtype", "Event", "Flag", "FloatArray", "Gradient", "Index",
    "IntArray", "NumPyArray", "Op", "OpOfTwo", "Shape", "Sizes", "SupportsDLPack", "Vjp", "WantedWeights",
]  # fmt: skip

Dtype: TypeAlias = Literal["float32", "int64", "bool"]
Shape: TypeAlias = tuple[int, ...]
Sizes: TypeAlias = SupportsIndex | Sequence[SupportsIndex]  # one size, or a tuple, list or array of them
Axes: TypeAlias = SupportsIndex | tuple[SupportsIndex, ...] | list[int] | None  # None: all
Flag: TypeAlias = bool | None  # None: not given
IndexItem: TypeAlias = SupportsIndex | slice | EllipsisType | None
Index: TypeAlias = IndexItem | tuple[IndexItem, ...]

# What a caller may hand in as data is NumPy's ArrayLike: numbers, lists of them, arrays of anyone, and Tensors.
NumPyArray: TypeAlias = NDArray[Any]
FloatArray: TypeAlias = NDArray[np.float32]
IntArray: TypeAlias = NDArray[np.int64]

# An op is op(*arrays, **options) -> (array, vjp); vjp(dy) has one gradient per array, None where there is none.
Gradient: TypeAlias = Array | RowGradient
Vjp: TypeAlias = Callable[[Array], tuple[Gradient | None, ...]]
Op: TypeAlias = Callable[..., tuple[Array, Vjp]]
OpOfTwo: TypeAlias = Callable[..., tuple[Array | tuple[Array, Array], Vjp]]  # the second result has no gradient
Event: TypeAlias = tuple[str, list[Array], Array, float]  # an op that ran: its name, inputs, output and seconds
WantedWeights: TypeAlias = tuple[list[int] | None, tuple[int, int]] | None  # (heads, None: all; rows start, stop)


class SupportsDLPack(Protocol):
    """An array that other libraries can take over without a copy."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


class AttentionOptions(TypedDict, total=False):
    """What attention in the core takes beside q, k and v."""

    mask: Array | None  # bool, True = may attend, or float32, added to the scores; broadcastable to (B, H, T, S)
    key_mask: Array | None  # bool (B, S), True = a real token
    lengths: Array | None  # int64 (B): keys of each row
    is_causal: bool
    scale: float | None
    dropout_p: float
    seed: int
    stream: int
    first_row: int

"""Keys and values of the past, so that decoding computes only what is new. The result is the same bits as without.

A row's keys start at slot 0 and end at its own length: rows of a batch may differ in length, nothing is padded on the
left, and no row knows of another.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np

from cmha import _core
from cmha.errors import check_integer, message, quote
from cmha.foreign import numpy_array
from cmha.tensor import Tensor, to_tensor

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import ArrayLike, IntArray

Method = TypeVar("Method", bound=Callable[..., Any])


class Turn:
    """A cache, with its rows, is used by one thread at a time: a call from another, while one runs, is refused."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            rule = "a cache is used by one thread at a time"
            raise RuntimeError(message("kv_cache", rule, "a call while another thread uses it"))

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:  # what is read from a pickle is nobody's yet
        return Turn, ()


def in_turn(method: Method) -> Method:
    @functools.wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return cast("Method", alone)


class KVCache:
    """Preallocated keys and values of one attention layer: (B, H_kv, capacity, hd) each, with a length per row.

    For inference: what append returns carries no gradient, and is a view of the cache's own memory, valid until the
    cache is written again: after truncate, the next append changes it. `cmha.tensor(k_all)` keeps a copy. One thread at
    a time: a call while another thread's runs is a RuntimeError and changes nothing.
    """

    def __init__(self, batch_size: int, n_head: int, head_dim: int, capacity: int) -> None:
        given = {"batch_size": batch_size, "n_head": n_head, "head_dim": head_dim, "capacity": capacity}
        shape = {name: check_integer("kv_cache", name, n, 1) for name, n in given.items()}
        self.batch_size, self.n_head, self.head_dim, self.capacity = shape.values()
        size = (self.batch_size, self.n_head, self.capacity, self.head_dim)
        self._k, self._v = _core.empty(size), _core.empty(size)
        self.lengths = np.zeros(self.batch_size, np.int64)
        self.turn = Turn()

    def __len__(self) -> int:
        """Positions in use (of the longest row)."""
        return int(self.lengths.max())

    def __repr__(self) -> str:
        return (f"KVCache(batch_size={self.batch_size}, n_head={self.n_head}, head_dim={self.head_dim}, "
                f"capacity={self.capacity}, length={len(self)})")  # fmt: skip

    def lengths_with(self, n: int) -> Array | None:
        """int64 (B): keys of each row once n more are in, where rows differ in length; None where all are as long."""
        longest = len(self)
        return None if (self.lengths == longest).all() else to_tensor(self.lengths + n).data

    def write(self, k: ArrayLike, v: ArrayLike) -> tuple[Tensor, Tensor]:
        """Put k, v (B, H_kv, n, hd) behind each row's end; the ends stay. Returns all keys, all values."""
        k, v = to_tensor(k, "kv_cache").float().data, to_tensor(v, "kv_cache").float().data
        longest, n = len(self), k.shape[2] if k.ndim == 4 else 0
        wanted = (self.batch_size, self.n_head, n, self.head_dim)
        if k.shape != wanted or v.shape != wanted:
            raise ValueError(
                f"[kv_cache] k and v must be (B, H, n, hd); got k {k.shape}, v {v.shape}, "
                f"expected ({self.batch_size}, {self.n_head}, n, {self.head_dim})"
            )
        if longest + n > self.capacity:
            raise ValueError(
                f"[kv_cache] the cache is full; got {n} positions behind {longest}, expected at most {self.capacity}"
            )
        if (self.lengths == longest).all():
            place = (slice(None), slice(None), slice(longest, longest + n))
            _core.assign(self._k[place], k)
            _core.assign(self._v[place], v)
        else:
            for row, start in enumerate(self.lengths.tolist()):
                behind = (row, slice(None), slice(start, start + n))
                _core.assign(self._k[behind], k[row])
                _core.assign(self._v[behind], v[row])
        used = (slice(None), slice(None), slice(0, longest + n))
        return Tensor(self._k[used]), Tensor(self._v[used])

    @in_turn
    def append(self, k: ArrayLike, v: ArrayLike) -> tuple[Tensor, Tensor]:
        """k, v (B, H_kv, n, hd) -> all keys, all values (B, H_kv, len, hd). ValueError, nothing changed: full, or
        mismatched.

        The results are views of the cache's memory, valid until the cache is written again. A row that is shorter than
        the longest has nothing of meaning behind its length.
        """
        k_all, v_all = self.write(k, v)
        self.lengths += k_all.shape[2] - len(self)
        return k_all, v_all

    @in_turn
    def truncate(self, n: int | ArrayLike) -> None:
        """Forget everything behind the first n positions of every row; n may be a list with a number for each row.

        ValueError: more than it holds.
        """
        if isinstance(n, list | tuple | np.ndarray):
            n = _checked_lengths(n, self.lengths)
        elif check_integer("kv_cache", "n", n, 0) > len(self):
            raise ValueError(f"[kv_cache] cannot be cut to more than it holds; got n={n}, expected at most {len(self)}")
        np.minimum(self.lengths, n, out=self.lengths)

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.truncate(0)

    @in_turn
    def reorder(self, rows: ArrayLike) -> None:
        """Row i becomes what row rows[i] was (for beam search); the number of rows stays."""
        rows = _checked_rows(rows, self.batch_size, self.batch_size)
        self._take(rows)
        self.lengths[:] = self.lengths[rows]

    def _take(self, rows: IntArray) -> None:
        """New memory of len(rows) rows, each with the keys and values of a present one."""
        for name in ("_k", "_v"):
            old = getattr(self, name)
            setattr(self, name, self._filled(_core.empty((len(rows), *old.shape[1:])), old, rows.tolist()))

    def _filled(self, new: Array, old: Array, rows: Iterable[int]) -> Array:
        """new, with what is in use of rows of old."""
        for i, row in enumerate(rows):
            used = (slice(None), slice(0, int(self.lengths[row])))
            _core.assign(new[i][used], old[row][used])
        return new

    @in_turn
    def copy(self, rows: ArrayLike | None = None) -> Self:
        """An independent cache with the same contents; `rows` chooses some, in any order and also several times:
        copy([0, 0, 0]) goes on in three ways behind one beginning that was computed once."""
        rows = np.arange(self.batch_size) if rows is None else _checked_rows(rows, self.batch_size)
        other = self._sharing(self.lengths)
        other._take(rows)
        other.batch_size, other.lengths, other.turn = len(rows), self.lengths[rows], Turn()
        return other

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: what is in use and no more, as the rest of the memory was never written."""
        state, size = dict(vars(self)), (self.batch_size, self.n_head, len(self), self.head_dim)
        for name in ("_k", "_v"):
            state[name] = self._filled(_core.full(size, 0.0), getattr(self, name), range(self.batch_size))
        return {**state, "lengths": self.lengths.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lengths=np.array(state["lengths"]))  # pickle may leave them on another's buffer
        size = (self.batch_size, self.n_head, self.capacity, self.head_dim)
        for name in ("_k", "_v"):
            setattr(self, name, self._filled(_core.empty(size), state[name], range(self.batch_size)))

    def row(self, i: int) -> Self:
        """Row i as a cache of one row on the same memory: what it appends or cuts, this cache has."""
        i = check_integer("kv_cache", "i", i, 0, self.batch_size - 1)
        other = self._sharing(self.lengths[i : i + 1])
        other._k, other._v = self._k[i : i + 1], self._v[i : i + 1]
        return other

    def _sharing(self, lengths: IntArray) -> Self:
        """A cache of the same sizes on the same memory, with lengths (B) of its own."""
        other = type(self).__new__(type(self))
        other.__dict__.update(vars(self), batch_size=len(lengths), lengths=lengths)
        return other


def _checked_rows(rows: ArrayLike, batch_size: int, count: int | None = None) -> IntArray:
    """rows as int64 (count), each one of the cache's."""
    rows = numpy_array(rows, "kv_cache")
    wanted = "at least 1 int" if count is None else f"{count} ints"
    if rows.dtype != np.int64 or rows.ndim != 1 or (rows.size != count if count is not None else rows.size == 0):
        raise ValueError(f"[kv_cache] rows must be {wanted}; got {rows.dtype} of shape {rows.shape}")
    if not (0 <= rows.min() and rows.max() < batch_size):
        raise IndexError(f"[kv_cache] rows must be 0 .. {batch_size - 1}; got {quote(rows.tolist())}")
    return rows


def _checked_lengths(n: ArrayLike, lengths: IntArray) -> IntArray:
    """n as int64 (B), each at most what its row holds."""
    given = numpy_array(n, "kv_cache")
    if given.dtype != np.int64 or given.shape != lengths.shape:
        got = f"{given.dtype} of shape {given.shape}"
        raise ValueError(f"[kv_cache] n must be an int or {len(lengths)} ints; got {got}")
    if (given < 0).any() or (given > lengths).any():
        got = f"n={quote(given.tolist())}, expected at most {quote(lengths.tolist())}"
        raise ValueError(f"[kv_cache] cannot be cut to more than it holds; got {got}")
    return given


class ModelCache:
    """The keys and values of every layer of a GPT, as `gpt.new_cache` makes it, and the ids they came from, for
    `reuse`.
    """

    def __init__(self, n_layer: int, batch_size: int, n_head: int, head_dim: int, capacity: int) -> None:
        self.layers = [_Layer(batch_size, n_head, head_dim, capacity) for _ in range(n_layer)]
        self.ids = np.zeros((batch_size, capacity), np.int64)  # of row i, the first lengths[i] count
        self._share_lengths()

    def _share_lengths(self) -> None:
        """The layers' lengths are one array, and whose turn it is holds for all of them."""
        self.lengths, self.turn = self.layers[0].lengths, self.layers[0].turn
        for layer in self.layers:
            layer.lengths, layer.turn = self.lengths, self.turn

    @property
    def batch_size(self) -> int:
        return self.layers[0].batch_size

    @property
    def capacity(self) -> int:
        return self.layers[0].capacity

    def __len__(self) -> int:
        return len(self.layers[0])

    def __repr__(self) -> str:
        return f"ModelCache(n_layer={len(self.layers)}, {repr(self.layers[0])[8:]}"

    def advance(self, ids: IntArray) -> None:
        """The layers have written the keys and values of ids (B, n): now they count."""
        columns = self.lengths[:, None] + np.arange(ids.shape[1])
        np.put_along_axis(self.ids, columns, ids, axis=1)
        self.lengths += ids.shape[1]

    @in_turn
    def truncate(self, n: int | ArrayLike) -> None:
        """Forget everything behind the first n positions of every row; n may be a list with a number for each row."""
        self.layers[0].truncate(n)

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.truncate(0)

    @in_turn
    def reuse(self, ids: ArrayLike) -> int:
        """Cut a cache of one row to the longest beginning that it shares with ids (T), and return its length n: go on
        with gpt(ids[n:], cache=cache). The last id is never reused, as its logits are to be computed."""
        if self.batch_size != 1:
            raise ValueError(f"[kv_cache] reuse needs a cache of one row; got {self.batch_size}")
        ids = numpy_array(ids, "kv_cache")
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ValueError(f"[kv_cache] ids must be one row of ints; got {ids.dtype} of shape {ids.shape}")
        most = max(0, min(len(self), len(ids) - 1))
        different = np.flatnonzero(self.ids[0, :most] != ids[:most])
        n = int(different[0]) if different.size else most
        self.truncate(n)
        return n

    @in_turn
    def reorder(self, rows: ArrayLike) -> None:
        """Row i becomes what row rows[i] was; the number of rows stays."""
        rows = _checked_rows(rows, self.batch_size, self.batch_size)
        for layer in self.layers:
            layer._take(rows)
        self.ids = self.ids[rows]
        self.lengths[:] = self.lengths[rows]

    @in_turn
    def copy(self, rows: ArrayLike | None = None) -> Self:
        """An independent cache with the same contents, or with the chosen rows (see KVCache.copy)."""
        rows = np.arange(self.batch_size) if rows is None else _checked_rows(rows, self.batch_size)
        return self._made_of([layer.copy(rows) for layer in self.layers], self.ids[rows])

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "ids": self.ids.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, ids=np.array(state["ids"]))
        self._share_lengths()

    def row(self, i: int) -> Self:
        """Row i as a cache of one row on the same memory (see KVCache.row)."""
        layers = [layer.row(i) for layer in self.layers]
        return self._made_of(layers, self.ids[i : i + 1])

    def _made_of(self, layers: list[_Layer], ids: IntArray) -> Self:
        other = type(self).__new__(type(self))
        other.layers, other.ids = layers, ids
        other._share_lengths()
        return other


class _Layer(KVCache):
    """A layer of a ModelCache: its end moves when the whole model is done."""

    append = KVCache.write

"""Keys and values of the past, so that decoding computes only what is new. The result is the same bits as without."""

import numpy as np

from cmha import _core
from cmha.errors import check_integer, quote
from cmha.foreign import numpy_array
from cmha.tensor import Tensor, to_tensor


class KVCache:
    """Preallocated keys and values of one attention layer: (B, H_kv, capacity, hd) each, with a length per row.

    For inference: what append returns carries no gradient, and is a view of the cache's own memory, valid until the
    cache is written again: after truncate, the next append changes it. `cmha.tensor(k_all)` keeps a copy.
    """

    def __init__(self, batch_size, n_head, head_dim, capacity):
        given = {"batch_size": batch_size, "n_head": n_head, "head_dim": head_dim, "capacity": capacity}
        shape = {name: check_integer("kv_cache", name, n, 1) for name, n in given.items()}
        self.batch_size, self.n_head, self.head_dim, self.capacity = shape.values()
        size = (self.batch_size, self.n_head, self.capacity, self.head_dim)
        self._k, self._v = _core.empty(size), _core.empty(size)
        self.lengths = np.zeros(self.batch_size, np.int64)

    def __len__(self):
        """Positions in use (of the longest row)."""
        return int(self.lengths.max())

    def __repr__(self):
        return (f"KVCache(batch_size={self.batch_size}, n_head={self.n_head}, head_dim={self.head_dim}, "
                f"capacity={self.capacity}, length={len(self)})")  # fmt: skip

    def write(self, k, v):
        """Put k, v (B, H_kv, n, hd) behind the present end without moving it; returns all keys and all values."""
        k, v = to_tensor(k, "kv_cache").float().data, to_tensor(v, "kv_cache").float().data
        start, n = len(self), k.shape[2] if k.ndim == 4 else 0
        wanted = (self.batch_size, self.n_head, n, self.head_dim)
        if k.shape != wanted or v.shape != wanted:
            raise ValueError(
                f"[kv_cache] k and v must be (B, H, n, hd); got k {k.shape}, v {v.shape}, "
                f"expected ({self.batch_size}, {self.n_head}, n, {self.head_dim})"
            )
        if start + n > self.capacity:
            raise ValueError(
                f"[kv_cache] the cache is full; got {n} positions behind {start}, expected at most {self.capacity}"
            )
        place = (slice(None), slice(None), slice(start, start + n))
        _core.assign(self._k[place], k)
        _core.assign(self._v[place], v)
        used = (slice(None), slice(None), slice(0, start + n))
        return Tensor(self._k[used]), Tensor(self._v[used])

    def append(self, k, v):
        """(B, H_kv, n, hd) twice -> all keys, all values (B, H_kv, len, hd). Full, mismatched: an error, unchanged.

        The results are views of the cache's memory, valid until the cache is written again.
        """
        k_all, v_all = self.write(k, v)
        self.lengths += k_all.shape[2] - len(self)
        return k_all, v_all

    def truncate(self, n):
        """Forget everything behind the first n positions."""
        if check_integer("kv_cache", "n", n, 0) > len(self):
            raise ValueError(f"[kv_cache] cannot be cut to more than it holds; got n={n}, expected at most {len(self)}")
        np.minimum(self.lengths, n, out=self.lengths)

    def reset(self):
        self.truncate(0)

    def reorder(self, rows):
        """Row i becomes what row rows[i] was (for beam search); the number of rows stays."""
        rows = _checked_rows(rows, self.batch_size)
        for name in ("_k", "_v"):
            old, new = getattr(self, name), _core.empty(getattr(self, name).shape)
            for i, row in enumerate(rows):
                _core.assign(new[i], old[row])
            setattr(self, name, new)
        self.lengths[:] = self.lengths[rows]

    def copy(self):
        """An independent cache with the same contents."""
        other = type(self)(self.batch_size, self.n_head, self.head_dim, self.capacity)
        _core.assign(other._k, self._k)
        _core.assign(other._v, self._v)
        other.lengths[:] = self.lengths
        return other


def _checked_rows(rows, batch_size):
    rows = numpy_array(rows, "kv_cache")
    if rows.dtype != np.int64 or rows.shape != (batch_size,):
        raise ValueError(f"[kv_cache] rows must be {batch_size} ints; got {rows.dtype} of shape {rows.shape}")
    if rows.size and not (0 <= rows.min() and rows.max() < batch_size):
        raise IndexError(f"[kv_cache] rows must be 0 .. {batch_size - 1}; got {quote(rows.tolist())}")
    return rows


class ModelCache:
    """One KVCache per layer with a common length, which advances once, after the last layer: a call that is refused or
    interrupted on the way changes nothing."""

    def __init__(self, n_layer, batch_size, n_head, head_dim, capacity):
        self.layers = [_Layer(batch_size, n_head, head_dim, capacity) for _ in range(n_layer)]
        self._share_lengths()

    def _share_lengths(self):
        self.lengths = self.layers[0].lengths
        for layer in self.layers:
            layer.lengths = self.lengths

    batch_size = property(lambda self: self.layers[0].batch_size)
    capacity = property(lambda self: self.layers[0].capacity)

    def __len__(self):
        return len(self.layers[0])

    def __repr__(self):
        return f"ModelCache(n_layer={len(self.layers)}, {repr(self.layers[0])[8:]}"

    def advance(self, n):
        self.lengths += n

    def truncate(self, n):
        self.layers[0].truncate(n)

    def reset(self):
        self.truncate(0)

    def reorder(self, rows):
        rows = _checked_rows(rows, self.batch_size)
        lengths = self.lengths.copy()
        for layer in self.layers:  # each would permute the common lengths again
            layer.reorder(rows)
        self.lengths[:] = lengths[rows]

    def copy(self):
        other = ModelCache.__new__(ModelCache)
        other.layers = [layer.copy() for layer in self.layers]
        other._share_lengths()
        return other


class _Layer(KVCache):
    """A layer of a ModelCache: its end moves when the whole model is done."""

    append = KVCache.write

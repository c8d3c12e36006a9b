"""Multi-head attention (Vaswani et al. 2017, section 3.2.2), with GPT-2's names.

    MultiHead(x) = concat(head_1 ... head_H) W_o,   head_i = softmax(Q_i K_i^T / sqrt(hd) + mask) V_i

B batch, T queries, S keys, H heads, D = H * hd. Two ways through the same eight steps: one fused kernel (the default),
and the steps one by one (`mha.fused = False`), for reading, tracing and checking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import numpy as np

from cmha import ops, random
from cmha.autograd import lasting, no_grad
from cmha.errors import check_flag, check_integer
from cmha.functional import attention_mask, cat, check_probability, wanted_weights
from cmha.nn.kv_cache import KVCache
from cmha.nn.layers import Linear
from cmha.nn.module import Module
from cmha.tensor import Tensor, make, to_tensor

if TYPE_CHECKING:
    from cmha._core import Array
    from cmha.types import ArrayLike, AttentionOptions, WantedWeights

    class CallOptions(TypedDict, total=False):
        is_causal: bool
        key_value: ArrayLike | None
        key_mask: ArrayLike | None
        residual: Tensor | None


def split_heads(x: ArrayLike, n_head: int) -> Tensor:
    """(B, T, D) -> (B*H, T, hd) for H = n_head. The permute comes before the last reshape, or heads and time get mixed.

    ValueError: D is no multiple of n_head.

    >>> cmha.nn.split_heads(cmha.zeros(2, 3, 8), 4).shape
    (8, 3, 2)
    """
    x = _three_axes("split_heads", "x (B, T, D)", x)
    B, T, D = x.shape
    if D % check_integer("split_heads", "n_head", n_head, 1):
        raise ValueError(f"[split_heads] the last axis must be divisible by n_head; got x {x.shape}, n_head={n_head}")
    x = x.reshape(B, T, n_head, D // n_head)  # (B, T, H, hd)   cut D into heads: a view
    x = x.permute(0, 2, 1, 3)                 # (B, H, T, hd)   bring H forward: a view
    return x.reshape(B * n_head, T, D // n_head)  # (B*H, T, hd)  one batch entry per head: copies unless B, T or H is 1


def merge_heads(x: ArrayLike, n_head: int) -> Tensor:
    """(B*H, T, hd) -> (B, T, D), H = n_head: the mirror of split_heads, in the mirror order.

    ValueError: the first axis is no multiple of n_head.
    """
    x = _three_axes("merge_heads", "x (B*H, T, hd)", x)
    BH, T, hd = x.shape
    if BH % check_integer("merge_heads", "n_head", n_head, 1):
        raise ValueError(f"[merge_heads] the first axis must be divisible by n_head; got x {x.shape}, n_head={n_head}")
    x = x.reshape(BH // n_head, n_head, T, hd)  # (B, H, T, hd)   a view
    x = x.permute(0, 2, 1, 3)                   # (B, T, H, hd)   a view
    return x.reshape(BH // n_head, T, n_head * hd)  # (B, T, D)   copies unless T, H or hd is 1


def _three_axes(op: str, wanted: str, x: ArrayLike) -> Tensor:
    x = to_tensor(x, op)
    if x.ndim != 3:
        raise ValueError(f"[{op}] needs {wanted}; got x {x.shape}")
    return x


def causal_mask(T: int, S: int | None = None) -> Tensor:
    """(T, S) float mask, 0 where query i may see key j and -inf on the future: j <= i + S - T (S = T by default).

    >>> cmha.nn.causal_mask(2, 3).tolist()
    [[0.0, 0.0, -inf], [0.0, 0.0, 0.0]]
    """
    S = T if S is None else S
    T, S = check_integer("causal_mask", "T", T, 0), check_integer("causal_mask", "S", S, 0)
    return to_tensor(np.where(np.tri(T, S, S - T, dtype=bool), 0.0, -np.inf))


class MultiHeadAttention(Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): self-attention, or cross-attention with `key_value`.

    concat(head_1 ... head_H) W_o,  head_i = softmax(q_i k_i^T / sqrt(hd) + mask) v_i

    n_embd: width D. n_head: heads H, a divisor of D. n_kv_head: key and value heads (grouped-query attention, Ainslie
    et al. 2023), a divisor of n_head and by default n_head. bias: in all four layers. dropout: of the attention
    weights, in training. output_projection=False leaves c_proj out. The layers are `c_q`, `c_k`, `c_v`, `c_proj`;
    `fused = False` (an attribute) takes the eight steps of the lesson one by one.
    """

    def __init__(self, n_embd: int, n_head: int, *, n_kv_head: int | None = None, bias: bool = True,
                 dropout: float = 0.0, output_projection: bool = True) -> None:  # fmt: skip
        op = "attention"
        n_embd, n_head = check_integer(op, "n_embd", n_embd, 1), check_integer(op, "n_head", n_head, 1)
        n_kv_head = n_head if n_kv_head is None else check_integer(op, "n_kv_head", n_kv_head, 1)
        if n_embd % n_head:
            near = [h for h in range(n_head, 0, -1) if n_embd % h == 0][:1]
            near += [h for h in range(n_head, n_embd + 1) if n_embd % h == 0][:1]
            raise ValueError(f"[{op}] n_embd must be divisible by n_head; got n_embd={n_embd}, n_head={n_head}. "
                             f"Nearest: {' or '.join(map(str, near))}")  # fmt: skip
        if n_head % n_kv_head:
            got = f"n_head={n_head}, n_kv_head={n_kv_head}"
            raise ValueError(f"[{op}] n_head must be divisible by n_kv_head; got {got}")
        self.n_head, self.n_kv_head, self.head_dim = n_head, n_kv_head, n_embd // n_head
        self.dropout = check_probability(op, "dropout", dropout)
        self.fused = True
        self.c_q = Linear(n_embd, n_embd, bias=bias)
        self.c_k = Linear(n_embd, n_kv_head * self.head_dim, bias=bias)
        self.c_v = Linear(n_embd, n_kv_head * self.head_dim, bias=bias)
        output_projection = check_flag(op, "output_projection", output_projection)
        self.c_proj = Linear(n_embd, n_embd, bias=bias) if output_projection else None

    def describe(self) -> str:
        """Heads and head_dim, for repr."""
        groups = f", n_kv_head={self.n_kv_head}" if self.n_kv_head != self.n_head else ""
        return f"n_head={self.n_head}{groups}, head_dim={self.head_dim}"

    def forward(self, x: ArrayLike, mask: ArrayLike | None = None, cache: KVCache | None = None, *,
                is_causal: bool = False, key_value: ArrayLike | None = None, key_mask: ArrayLike | None = None,
                need_weights: bool | Sequence[int] = False, weight_rows: Sequence[int] | None = None,
                residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """x (B, T, D) -> y (B, T, D), or with need_weights (y, weights (B, H, T, S)); residual (B, T, D) is added to y.

        - mask: bool (True = may attend) or float (added to the scores), (T, S) or broadcastable to (B, H, T, S).
        - cache: a KVCache; keys and values are appended to it, and all it then holds are attended to. No gradients.
        - is_causal: query i sees keys up to i + S - T.
        - key_value: (B, S, D), where keys and values come from; x by default.
        - key_mask: bool (B, S), True = a real token.
        - need_weights: True, or a list of heads; with weight_rows=(start, stop) only of these queries. The softmax
          before dropout, without gradient; y has the same bits as without.

        Hidden keys have no influence, NaN included (with `fused = False`, what arithmetic says); a query that sees
        nothing gets zeros before c_proj. All of these go together. ValueError: shapes that do not fit, a full cache, a
        mask that needs a gradient. A refused call changes nothing.
        """
        is_causal = check_flag("attention", "is_causal", is_causal)
        x = self._checked("x", x)
        wanted = wanted_weights("attention", need_weights, weight_rows, self.n_head, x.shape[1])
        if cache is not None:
            if not isinstance(cache, KVCache):
                raise TypeError(f"[attention] cache must be a KVCache; got {type(cache).__name__}")
            with cache.turn, no_grad():
                return self._attend(x, mask, cache, is_causal, key_value, key_mask, wanted, residual)
        return self._attend(x, mask, None, is_causal, key_value, key_mask, wanted, residual)

    def _attend(self, x: Tensor, mask: ArrayLike | None, cache: KVCache | None, is_causal: bool,
                key_value: ArrayLike | None, key_mask: ArrayLike | None, need_weights: WantedWeights,
                residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        source = x if key_value is None else self._checked("key_value", key_value)
        if source.shape[0] != x.shape[0]:
            raise ValueError(f"[attention] batches must be equal; got x {x.shape}, key_value {source.shape}")
        S = source.shape[1] + (len(cache) if cache is not None else 0)
        options: AttentionOptions = {"mask": self._checked_mask(mask, x, S), "is_causal": is_causal,
                                     "key_mask": self._checked_key_mask(key_mask, x, S)}  # fmt: skip
        q, k, v = self.c_q(x), self.c_k(source), self.c_v(source)  # 1 project: (B, T, D), (B, S, H_kv * hd) twice
        if cache is not None:
            lengths = cache.lengths_with(source.shape[1])
            options |= {} if lengths is None else {"lengths": lengths}
            k, v = cache.append(self._heads(k), self._heads(v))  # 2 remember: (B, H_kv, S, hd)
        if self.training and self.dropout and not random.drops_nothing():
            seed, stream, first_row = random.next_stream()
            options |= {"dropout_p": self.dropout, "seed": seed, "stream": stream, "first_row": first_row}
        attend = self._fused if self.fused and not self._is_looked_into() else self._step_by_step
        y, weights = attend(q, k, v, need_weights, options)  # 3 - 7
        if self.c_proj is not None:
            y = self.c_proj(y, residual=residual)  # 8 mix the heads: (B, T, D)
        elif residual is not None:
            y = residual + y
        return y if weights is None else (y, weights)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, need_weights: WantedWeights,
               options: AttentionOptions) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Steps 3 to 7 in one kernel: heads are split and merged by strides, scores never stand in memory."""
        options = {"scale": 1.0 / math.sqrt(self.head_dim), **options}
        if k.ndim == 3:
            out = make(ops.multi_head_attention, q, k, v, n_head=self.n_head, n_kv_head=self.n_kv_head,
                       need_weights=need_weights, **options)  # fmt: skip
            return out if isinstance(out, tuple) else (out, None)
        out = make(ops.attention, self._heads(q), k, v, need_weights=need_weights, **options)  # a cache's are split
        y, weights = out if isinstance(out, tuple) else (out, None)
        return y.permute(0, 2, 1, 3).reshape(q.shape), weights

    def _step_by_step(self, q: Tensor, k: Tensor, v: Tensor, need_weights: WantedWeights,
                      options: AttentionOptions) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Steps 3 to 7 as the lesson has them: every intermediate is a tensor."""
        B, T, D = q.shape
        H, hd = self.n_head, self.head_dim
        if "lengths" in options:  # behind the end of a short row of a cache stands nothing that may be computed with
            behind = np.arange(k.shape[2]) >= np.asarray(options["lengths"])[:, None, None, None]
            k, v = (x.masked_fill(behind.transpose(0, 1, 3, 2), 0.0) for x in (k, v))
        q, k, v = (self.named(*pair) for pair in (("q", q), ("k", k), ("v", v)))
        q = self.named("q_heads", split_heads(q, H))                    # 3 (B*H, T, hd)
        k = self.named("k_heads", self._split_keys(k))                  #   (B*H, S, hd)
        v = self.named("v_heads", self._split_keys(v))                  #   (B*H, S, hd)
        scores = q.matmul(k.mT).mul_scalar(1.0 / math.sqrt(hd))
        scores = self.named("scores", scores)                           # 4 (B*H, T, S)
        added = self._added_mask(B, T, k.shape[1], options)
        if added is not None:
            scores = self.named("masked_scores", scores.add(added))     # 5 -inf where hidden
        weights = self.named("weights", scores.softmax_last_dim())      # 6 (B*H, T, S)
        kept = self._drop(weights, options)
        y = self.named("y_heads", kept.matmul(v))                       #   (B*H, T, hd)
        y = self.named("merged", merge_heads(y, H))                     # 7 (B, T, D)
        if need_weights is None:
            return y, None
        heads, rows = need_weights
        weights = weights.detach().reshape(B, H, T, k.shape[1])[:, :, slice(*rows)]
        return y, weights if heads is None else cat([weights[:, h : h + 1] for h in heads], axis=1)

    def named(self, name: str, x: Tensor) -> Tensor:
        """Every intermediate of the single steps comes by here: cmha.replace changes it, then cmha.trace sees it."""
        if self._hooks is not None:
            for hook in (*self._hooks.inside.values(), *self._hooks.seeing.values()):
                x = hook(name, x)
        return x

    def _is_looked_into(self) -> bool:
        return self._hooks is not None and bool(self._hooks.inside or self._hooks.seeing)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, n, h * hd) -> (B, h, n, hd): a view."""
        B, n, width = x.shape
        return x.reshape(B, n, width // self.head_dim, self.head_dim).permute(0, 2, 1, 3)

    def _split_keys(self, x: Tensor) -> Tensor:
        """(B, S, H_kv * hd), or (B, H_kv, S, hd) of a cache -> (B*H, S, hd); a group of heads shares one key head."""
        if x.ndim == 3 and self.n_kv_head == self.n_head:
            return split_heads(x, self.n_head)
        x = self._heads(x) if x.ndim == 3 else x
        B, h, S, hd = x.shape
        x = x.reshape(B, h, 1, S, hd).expand(B, h, self.n_head // h, S, hd)
        return x.reshape(B * self.n_head, S, hd)

    def _added_mask(self, B: int, T: int, S: int, options: AttentionOptions) -> Tensor | None:
        """All that hides keys as one float mask: (T, S) where that serves every head, else (B*H, T, S); or None."""
        mask, key_mask = options["mask"], options["key_mask"]
        added = None if mask is None else np.asarray(mask)
        if added is not None and added.dtype == np.bool_:
            added = np.where(added, np.float32(0), np.float32(-np.inf))
        if "lengths" in options:  # rows of a cache that differ in length
            lengths = np.asarray(options["lengths"])[:, None, None, None]  # (B, 1, 1, 1)
            last = lengths - (T - np.arange(T)[:, None] if options["is_causal"] else 1)  # the last key a query sees
            short = np.where(np.arange(S) <= last, np.float32(0), np.float32(-np.inf))  # (B, 1, T or 1, S)
            added = short if added is None else added + short
        elif options["is_causal"]:
            causal = causal_mask(T, S).numpy()
            added = causal if added is None else added + causal
        if key_mask is not None:
            keys = np.where(np.asarray(key_mask), np.float32(0), np.float32(-np.inf))[:, None, None, :]
            added = keys if added is None else added + keys
        if added is not None and added.ndim == 4:
            added = np.broadcast_to(added, (B, self.n_head, T, S)).reshape(B * self.n_head, T, S)
        return None if added is None else to_tensor(added)

    def _drop(self, weights: Tensor, options: AttentionOptions) -> Tensor:
        if "dropout_p" not in options:
            return weights
        first = options["first_row"] * self.n_head * weights.shape[1] * weights.shape[2]
        draws = {"p": options["dropout_p"], "seed": options["seed"], "stream": options["stream"], "first": first}
        return self.named("dropped_weights", make(ops.dropout, weights, **draws))

    def _checked(self, name: str, x: ArrayLike) -> Tensor:
        x = to_tensor(x, "attention").float()
        if x.ndim != 3 or x.shape[2] != self.c_q.weight.shape[0]:
            raise ValueError(f"[attention] {name} must be (B, T, {self.c_q.weight.shape[0]}); got {x.shape}")
        return x

    def _checked_mask(self, mask: ArrayLike | None, x: Tensor, S: int) -> Array | None:
        mask = attention_mask(mask)
        wanted = (x.shape[0], self.n_head, x.shape[1], S)
        if mask is not None and any(m not in (1, n) for m, n in zip(mask.shape, wanted[4 - mask.ndim :], strict=True)):
            got = f"mask {mask.shape}, expected {wanted}"
            raise ValueError(f"[attention] mask must broadcast to (B, H, T, S); got {got}")
        return mask

    def _checked_key_mask(self, key_mask: ArrayLike | None, x: Tensor, S: int) -> Array | None:
        if key_mask is None:
            return None
        key_mask = to_tensor(key_mask, "attention")
        if key_mask.dtype != "bool":
            raise TypeError(f"[attention] key_mask must be bool (True = a real token); got {key_mask.dtype}")
        if key_mask.shape != (x.shape[0], S):
            raise ValueError(f"[attention] key_mask must be (B, S); got {key_mask.shape}, expected {(x.shape[0], S)}")
        return lasting(key_mask.data)

    if TYPE_CHECKING:  # Module.__call__ runs forward, between the hooks

        @overload
        def __call__(self, x: ArrayLike, mask: ArrayLike | None = None, cache: KVCache | None = None, *,
                     need_weights: Literal[False] = False, **options: Unpack[CallOptions]) -> Tensor: ...  # fmt: skip
        @overload
        def __call__(self, x: ArrayLike, mask: ArrayLike | None = None, cache: KVCache | None = None, *,
                     need_weights: Literal[True] | Sequence[int], weight_rows: Sequence[int] | None = None,
                     **options: Unpack[CallOptions]) -> tuple[Tensor, Tensor]: ...  # fmt: skip
        @overload
        def __call__(self, x: ArrayLike, mask: ArrayLike | None = None, cache: KVCache | None = None, *,
                     need_weights: bool | Sequence[int] = False, weight_rows: Sequence[int] | None = None,
                     **options: Unpack[CallOptions]) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

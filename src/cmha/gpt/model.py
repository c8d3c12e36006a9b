"""The GPT-2 model: embeddings, blocks of attention and MLP with layer norm in front, a tied output layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from cmha import _core, functional, random
from cmha.autograd import is_grad_enabled, no_grad
from cmha.errors import check_integer
from cmha.generate import generate, score, stream
from cmha.gpt import pretrained
from cmha.gpt.config import GPTConfig
from cmha.nn import MLP, Dropout, Embedding, LayerNorm, Module, MultiHeadAttention
from cmha.nn.kv_cache import ModelCache
from cmha.nn.recompute import recompute
from cmha.tensor import Tensor, to_tensor

if TYPE_CHECKING:
    from _typeshed import StrPath

    from cmha.nn.kv_cache import KVCache
    from cmha.types import ArrayLike, FloatArray


class Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): GPT-2's block, with the norm in front (Radford et al. 2019)."""

    def __init__(self, cfg: GPTConfig) -> None:
        self.ln_1 = LayerNorm(cfg.n_embd, bias=cfg.bias)
        self.attn = MultiHeadAttention(
            cfg.n_embd, cfg.n_head, bias=cfg.bias, dropout=cfg.dropout, output_projection=cfg.output_projection
        )
        self.attn_dropout = Dropout(cfg.dropout)
        self.ln_2 = LayerNorm(cfg.n_embd, bias=cfg.bias)
        self.mlp = MLP(cfg.n_embd, bias=cfg.bias, dropout=cfg.dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D), causal; cache: this layer's of a ModelCache."""
        if self.attn_dropout.drops():
            x = x + self.attn_dropout(self.attn(self.ln_1(x), cache=cache, is_causal=True))
        else:
            x = self.attn(self.ln_1(x), cache=cache, is_causal=True, residual=x)
        out: Tensor = self.mlp(self.ln_2(x), residual=x)
        return out


class GPT(Module):
    """GPT-2 (Radford et al. 2019): embeddings, L blocks, a layer norm, and the token table again as output layer
    (tied).

    `logits = gpt(ids)`, `logits, loss = gpt(ids, targets)`. The parts have GPT-2's names: wte, wpe, h, ln_f; weights
    start as GPT-2's, N(0, 0.02), those into the residual stream divided by sqrt(2 L). `checkpoint_activations = True`
    (an attribute) keeps only the input of each block and runs the block again in the backward pass (Chen et al. 2016):
    a third more time, a fraction of the memory, the same bits.
    """

    checkpoint_activations = False

    if TYPE_CHECKING:  # Module.__call__ runs forward, between the hooks

        @overload
        def __call__(self, ids: ArrayLike, targets: None = None, *, cache: ModelCache | None = None) -> Tensor: ...
        @overload
        def __call__(
            self, ids: ArrayLike, targets: ArrayLike, *, cache: ModelCache | None = None
        ) -> tuple[Tensor, Tensor]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __init__(self, cfg: GPTConfig) -> None:
        if not isinstance(cfg, GPTConfig):
            raise TypeError(f"[gpt] needs a GPTConfig; got {type(cfg).__name__}")
        self.cfg = cfg
        self.wte = Embedding(cfg.vocab_size, cfg.n_embd)  # also the output layer (tied)
        self.wpe = Embedding(cfg.block_size, cfg.n_embd)
        self.dropout = Dropout(cfg.dropout)
        self.h = [Block(cfg) for _ in range(cfg.n_layer)]
        self.ln_f = LayerNorm(cfg.n_embd, bias=cfg.bias)
        if not random.draws_nothing():
            self._initialise()

    def _initialise(self) -> None:
        """GPT-2's: N(0, 0.02), the two projections back into the residual stream / sqrt(2 L); biases 0, gains 1."""
        for name, p in self.named_parameters():  # one at a time: never a second copy of the model
            if p.ndim == 2:
                std = 0.02 / math.sqrt(2 * self.cfg.n_layer) if name.endswith("c_proj.weight") else 0.02
                _core.assign(p.data, (functional.randn(*p.shape) * std).data)
            elif name.endswith("bias"):
                _core.assign(p.data, functional.zeros(*p.shape).data)

    @overload
    def forward(self, ids: ArrayLike, targets: None = None, *, cache: ModelCache | None = None) -> Tensor: ...
    @overload
    def forward(
        self, ids: ArrayLike, targets: ArrayLike, *, cache: ModelCache | None = None
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self, ids: ArrayLike, targets: ArrayLike | None = None, *, cache: ModelCache | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """ids (B, T) -> logits (B, T, V); with targets (B, T) -> (logits, mean loss in nats), a target of -1 does not
        count.

        With a cache (gpt.new_cache) ids are the positions behind what it holds, and there are no gradients. A refused
        call leaves it as it was. TypeError: ids that are no integers. IndexError: an id outside 0 .. V - 1. ValueError:
        more than block_size positions, a cache that is full or of another model.
        """
        inputs = self._checked_ids("ids", ids)
        wanted = None if targets is None else to_tensor(targets, "gpt")
        if wanted is not None and wanted.shape != inputs.shape:
            raise ValueError(f"[gpt] targets must have the shape of ids; got {wanted.shape}, expected {inputs.shape}")
        with self._behind(cache, inputs):
            x = self._hidden(inputs, cache)  # (B, T, D)
            B, T, D = x.shape
            logits = self._head(x.reshape(B * T, D)).reshape(B, T, self.cfg.vocab_size)
            loss = None if wanted is None else functional.cross_entropy(logits, wanted)
        return logits if loss is None else (logits, loss)

    def last_logits(self, ids: ArrayLike, count: int = 1, *, cache: ModelCache | None = None) -> FloatArray:
        """ids (B, T) -> the logits of the last `count` positions, a NumPy array (B, count, V): what generation needs of
        forward, with the same bits, without dropout or a graph, whatever the mode of the model."""
        inputs = self._checked_ids("ids", ids)
        count = check_integer("gpt", "count", count, 1, max(1, inputs.shape[1]))
        if inputs.size == 0:
            raise ValueError(f"[gpt] ids must hold at least one row and one position; got {inputs.shape}")
        with self._behind(cache, inputs), no_grad(), random.no_dropout():
            x = self._hidden(inputs, cache)[:, -count:]  # (B, count, D)
            logits = self._head(x.reshape(inputs.shape[0] * count, x.shape[2])).numpy()
        return logits.reshape(inputs.shape[0], count, self.cfg.vocab_size)

    def _hidden(self, ids: Tensor, cache: ModelCache | None) -> Tensor:
        """ids (B, T) -> (B, T, D), what the output layer reads."""
        T = ids.shape[1]
        starts = np.zeros(1, np.int64) if cache is None else cache.lengths
        start = int(starts[0])
        if (starts == start).all():
            positions = self.wpe.weight[start : start + T]  # (T, D)
        else:
            positions = self.wpe(starts[:, None] + np.arange(T))  # (B, T, D)
        x = self.dropout(self.wte(ids) + positions)
        caches: Sequence[KVCache | None] = [None] * len(self.h) if cache is None else cache.layers
        again = self.checkpoint_activations and is_grad_enabled()
        for block, layer in zip(self.h, caches, strict=True):
            x = recompute(block, x) if again else block(x, layer)
        out: Tensor = self.ln_f(x)
        return out

    def _head(self, x: Tensor) -> Tensor:
        """(N, D) -> logits (N, V)"""
        return x @ self.wte.weight.T

    @contextmanager
    def _behind(self, cache: ModelCache | None, ids: Tensor) -> Iterator[None]:
        """Inside, ids (B, T) are computed behind what the cache holds, if there is one: they fit, no other thread uses
        it, no graph is built. They count at the end: whatever is refused leaves the cache as it was."""
        if cache is None:
            self._check_positions(ids, None)
            yield
            return
        if not isinstance(cache, ModelCache):
            raise TypeError(f"[gpt] cache must be one of gpt.new_cache(); got {type(cache).__name__}")
        with cache.turn, no_grad():
            self._check_positions(ids, cache)
            yield
            cache.advance(ids.numpy())

    def _check_positions(self, ids: Tensor, cache: ModelCache | None) -> None:
        """That ids (B, T) fit behind what the cache holds, and the cache fits the model."""
        B, T = ids.shape
        start = 0 if cache is None else len(cache)
        if start + T > self.cfg.block_size:
            behind = f" behind {start} in the cache" if start else ""
            raise ValueError(f"[gpt] at most block_size={self.cfg.block_size} positions; got {T}{behind}")
        if cache is not None:
            self._check_fit(cache, B, T)

    def _check_fit(self, cache: ModelCache, B: int, T: int) -> None:
        if B != cache.batch_size or len(self.h) != len(cache.layers):
            raise ValueError(
                f"[gpt] the cache must fit the model and the batch; got {len(cache.layers)} layers and "
                f"{cache.batch_size} rows, expected {len(self.h)} and {B}"
            )
        if len(cache) + T > cache.capacity:
            raise ValueError(
                f"[gpt] the cache is full; got {T} positions behind {len(cache)}, expected at most {cache.capacity}"
            )

    def _checked_ids(self, name: str, ids: ArrayLike) -> Tensor:
        tensor = to_tensor(ids, "gpt")
        if tensor.dtype != "int64":
            raise TypeError(f"[gpt] {name} must be integers; got {tensor.dtype}")
        if tensor.ndim != 2:
            raise ValueError(f"[gpt] {name} must be (B, T); got {tensor.shape}")
        return tensor

    def new_cache(self, batch_size: int, capacity: int | None = None) -> ModelCache:
        """An empty cache of keys and values for `batch_size` rows of `capacity` positions, by default block_size."""
        capacity = self.cfg.block_size if capacity is None else capacity
        return ModelCache(self.cfg.n_layer, check_integer("new_cache", "batch_size", batch_size, 1), self.cfg.n_head,
                          self.cfg.head_dim, check_integer("new_cache", "capacity", capacity, 1))  # fmt: skip

    def crop_block_size(self, n: int) -> None:
        """Keep only the first n positions: a shorter context, a smaller wpe. ValueError: n above block_size."""
        if not check_integer("crop_block_size", "n", n, 1) <= self.cfg.block_size:
            raise ValueError(f"[crop_block_size] can only shrink; got n={n}, expected at most {self.cfg.block_size}")
        weight = functional.tensor(self.wpe.weight[:n], requires_grad=True)
        self.wpe.weight = weight
        self.cfg = GPTConfig(**{**vars(self.cfg), "block_size": n})

    def describe(self) -> str:
        """The number of parameters, for repr."""
        return f"{self.num_parameters():,} parameters"

    def save_pretrained(self, folder: StrPath) -> None:
        """Write config.json and model.safetensors (float32) under Hugging Face's GPT-2 names into `folder`, which is
        made if needed; each file replaces the one before it in one step. `transformers` opens the folder as it is."""
        pretrained.save(self, folder)

    @classmethod
    def from_pretrained(cls, folder: StrPath) -> Self:
        """The model of a Hugging Face GPT-2 folder, in eval mode: config.json, and model.safetensors or its shards.

        float32 stays as it is, float16 and bfloat16 are widened exactly, float64 is rounded to nearest. No code from
        the folder runs, and no second copy of the weights is held. CheckpointError: what a file holds cannot be used
        (all missing, unknown and wrongly shaped tensors in one message); OSError: it cannot be read.
        """
        return pretrained.load(cls, folder)

    generate = generate
    stream = stream
    score = score

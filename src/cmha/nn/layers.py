"""Linear, LayerNorm, Embedding, Dropout and GPT-2's MLP."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cmha import ops, random
from cmha.errors import check_flag, check_integer, check_number
from cmha.functional import check_probability, ones, rand, randn, zeros
from cmha.nn.module import Module
from cmha.tensor import Tensor, make, to_tensor

if TYPE_CHECKING:
    from cmha.types import ArrayLike


class Linear(Module):
    """y = x W + b: weight (n_in, n_out), as GPT-2 stores it, bias (n_out) or None.

    Both start uniform in +-1 / sqrt(n_in). Head h of an attention owns columns h hd .. (h + 1) hd of weight.
    """

    def __init__(self, n_in: int, n_out: int, bias: bool = True) -> None:
        n_in, n_out = check_integer("linear", "n_in", n_in, 1), check_integer("linear", "n_out", n_out, 1)
        bound = 1.0 / math.sqrt(n_in)
        self.weight = (rand(n_in, n_out) * (2 * bound) - bound).detach()
        self.weight.requires_grad = True
        self.bias: Tensor | None = None
        if check_flag("linear", "bias", bias):
            self.bias = (rand(n_out) * (2 * bound) - bound).detach()
            self.bias.requires_grad = True

    def forward(self, x: ArrayLike, *, gelu: bool = False, residual: Tensor | None = None) -> Tensor:
        """x (..., n_in) -> (..., n_out): y, or gelu(y), or residual + y, in one pass over memory.

        ValueError: a last axis that is not n_in.
        """
        x = to_tensor(x, "linear").float()
        parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
        if residual is not None:
            return make(ops.linear_residual, residual, x, *parameters)
        return make(ops.linear_gelu if gelu else ops.linear, x, *parameters)

    if TYPE_CHECKING:

        def __call__(self, x: ArrayLike, *, gelu: bool = False, residual: Tensor | None = None) -> Tensor: ...


class LayerNorm(Module):
    """weight (x - mean) / sqrt(var + eps) + bias over the last axis of size n (Ba et al. 2016, arXiv:1607.06450).

    var divides by n; weight (n) starts as ones, bias (n) as zeros, or None.
    """

    def __init__(self, n: int, eps: float = 1e-5, bias: bool = True) -> None:
        self.weight = ones(check_integer("layer_norm", "n", n, 1), requires_grad=True)
        self.bias = zeros(n, requires_grad=True) if check_flag("layer_norm", "bias", bias) else None
        self.eps = check_number("layer_norm", "eps", eps, lambda value: value > 0, "a number above 0")

    def forward(self, x: ArrayLike) -> Tensor:
        """x (..., n) -> (..., n). ValueError: another last axis."""
        x = to_tensor(x, "layer_norm").float()
        if self.bias is None:
            return make(ops.layer_norm, x, self.weight, eps=self.eps)
        return make(ops.layer_norm, x, self.weight, self.bias, eps=self.eps)

    if TYPE_CHECKING:

        def __call__(self, x: ArrayLike) -> Tensor: ...


class Embedding(Module):
    """A table of n rows, weight (n, width), that starts standard normal."""

    def __init__(self, n: int, width: int) -> None:
        self.weight = randn(
            check_integer("embedding", "n", n, 1), check_integer("embedding", "width", width, 1), requires_grad=True
        )

    def forward(self, ids: ArrayLike) -> Tensor:
        """ids (...) -> rows (..., width). TypeError: ids that are no integers. IndexError: an id outside 0 .. n - 1."""
        ids = to_tensor(ids, "embedding")
        if ids.dtype != "int64":
            raise TypeError(f"[embedding] ids must be integers; got {ids.dtype}")
        return make(ops.embedding, self.weight, ids)

    if TYPE_CHECKING:

        def __call__(self, ids: ArrayLike) -> Tensor: ...


class Dropout(Module):
    """In training an element is 0 with probability p and the others grow by 1 / (1 - p); else the identity.

    Srivastava et al. 2014. Which elements is a function of seed, step, site and place (Philox, Salmon et al. 2011): the
    same for any number of threads, and for a row in any batch. ValueError: p outside 0 .. 1.
    """

    def __init__(self, p: float = 0.0) -> None:
        self.p = check_probability("dropout", "p", p)

    def describe(self) -> str:
        """The probability, for repr."""
        return f"p={self.p}"

    def drops(self) -> bool:
        """Whether it does anything now: in training, with p above 0, and outside of generation."""
        return self.training and self.p > 0 and not random.drops_nothing()

    def forward(self, x: ArrayLike) -> Tensor:
        """x of any shape -> the same shape."""
        x = to_tensor(x, "dropout").float()
        if not self.drops():
            return x
        seed, stream, first_row = random.next_stream()
        row = x.size // x.shape[0] if x.ndim and x.shape[0] else 0
        return make(ops.dropout, x, p=self.p, seed=seed, stream=stream, first=first_row * row)

    if TYPE_CHECKING:

        def __call__(self, x: ArrayLike) -> Tensor: ...


class MLP(Module):
    """GPT-2's feed-forward, gelu(x W_1 + b_1) W_2 + b_2, from D to 4 D to D (Radford et al. 2019)."""

    def __init__(self, n_embd: int, bias: bool = True, dropout: float = 0.0) -> None:
        self.c_fc = Linear(n_embd, 4 * n_embd, bias=bias)
        self.c_proj = Linear(4 * n_embd, n_embd, bias=bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: ArrayLike, *, residual: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); with residual (B, T, D), the sum of the two."""
        x = self.c_fc(x, gelu=True)  # (B, T, 4 D)
        if residual is not None and not self.dropout.drops():
            return self.c_proj(x, residual=residual)  # (B, T, D)
        x = self.dropout(self.c_proj(x))  # (B, T, D)
        return x if residual is None else residual + x

    if TYPE_CHECKING:

        def __call__(self, x: ArrayLike, *, residual: Tensor | None = None) -> Tensor: ...

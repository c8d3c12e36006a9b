"""Calls as users write them, and the types they must have: mypy reads this file, test_types.py runs it."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import cmha
from cmha import GPT, GPTConfig, KVCache, MultiHeadAttention, Tensor
from cmha.nn import Linear, Module, causal_mask, split_heads


def tensors() -> None:
    x = cmha.randn(2, 3, requires_grad=True)
    assert_type(x, Tensor)
    assert_type(x.shape, tuple[int, ...])
    assert_type(x + 1, Tensor)
    assert_type(2.0 * x - np.ones(3), Tensor)
    assert_type(x @ [[1.0], [2.0], [3.0]], Tensor)
    assert_type(x == 0, Tensor)
    assert_type(-x**2, Tensor)
    assert_type(x[0, ..., None, 1:], Tensor)
    assert_type([row for row in x], list[Tensor])
    assert_type(x.sum(axis=0, keepdims=True).max().item(), float)
    assert_type(x.reshape(3, -1).permute((1, 0)).mT, Tensor)
    assert_type(x.grad, Tensor | None)
    x.sum().backward()
    x.grad = None
    assert_type(cmha.split(cmha.cat([x, x]), [1, 3]), list[Tensor])
    assert_type(x.detach().numpy(), NDArray[Any])
    assert_type(np.asarray(x.detach(), np.float64), NDArray[np.float64])
    assert_type(cmha.tensor([[1, 2], [3, 4]]).dtype == "int64", bool)


def attention() -> None:
    q = cmha.randn(1, 4, 5, 8)
    assert_type(cmha.scaled_dot_product_attention(q, q, q, is_causal=True), Tensor)
    assert_type(cmha.scaled_dot_product_attention(q, q, q, need_weights=True), tuple[Tensor, Tensor])
    assert_type(cmha.scaled_dot_product_attention(q, q, q, need_weights=[0, 2]), tuple[Tensor, Tensor])
    mha, x = MultiHeadAttention(12, 3), cmha.randn(2, 5, 12)
    assert_type(mha(x, causal_mask(5)), Tensor)
    assert_type(mha(x, cache=KVCache(2, 3, 4, 8)), Tensor)
    y, weights = mha(x, is_causal=True, need_weights=True)
    assert_type(y, Tensor)
    assert_type(weights, Tensor)
    assert_type(mha(x, need_weights=[1], weight_rows=(0, 2)), tuple[Tensor, Tensor])
    assert_type(split_heads(x, 3), Tensor)


def modules() -> None:
    class Twice(Module):
        def __init__(self, n: int) -> None:
            self.inner = Linear(n, n)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    module = Twice(4).eval()
    assert_type(module, Twice)
    assert_type(module.parameters(), list[Tensor])
    assert_type(module.inner(cmha.ones(1, 4)), Tensor)
    y: Tensor = module(cmha.ones(1, 4))
    assert y.shape == (1, 4)


def gpt() -> None:
    model, ids = GPT(GPTConfig.tiny()), np.zeros((1, 4), np.int64)
    assert_type(model(ids), Tensor)
    logits, loss = model(ids, ids)
    assert_type(loss, Tensor)
    assert_type(logits, Tensor)

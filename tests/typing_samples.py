"""Calls as users write them, and the types they must have: mypy reads this file, test_types.py runs it."""

from collections.abc import Iterator
from os import PathLike
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import cmha
from cmha import GPT, AdamW, CharTokenizer, GPTConfig, KVCache, MultiHeadAttention, Tensor
from cmha.nn import Linear, Module, causal_mask, split_heads
from cmha.text.corpora import Corpus
from cmha.train import Trainer, TrainSettings, parameter_groups


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
    assert_type(GPTConfig.tiny(n_layer=1, dropout=0.1, bias=False).head_dim, int)


def generation() -> None:
    model, array, rows = GPT(GPTConfig.tiny(n_layer=1)), np.array([[1, 2], [3, 4]]), [[1], [2, 3]]
    assert_type(model.generate(array, 2), NDArray[np.int64])
    assert_type(model.generate(cmha.tensor([[1, 2]]), 2, temperature=0, stop=[1, 2]), NDArray[np.int64])
    new, logprobs = model.generate(array, 2, return_logprobs=True, seed=[3, 4])
    assert_type(new, NDArray[np.int64])
    assert_type(logprobs, NDArray[np.float32])
    assert_type(model.generate(rows, 2, num_beams=2), NDArray[np.int64] | list[list[int]])  # as wide, or not
    assert_type(
        model.generate([[1], np.array([2, 3])], 2, return_logprobs=True),
        tuple[NDArray[np.int64] | list[list[int]], NDArray[np.float32] | list[list[float]]],
    )
    text, small = CharTokenizer("abc"), GPT(GPTConfig.tiny(3, n_layer=1))
    assert_type(text.decode(small.generate([text.encode("ab")], 2, stop_strings="c", tokenizer=text, top_k=3)[0]), str)
    assert_type(model.stream([[1]], 2), Iterator[int])
    assert_type(next(model.stream(array[:1], 2, return_logprobs=True)), tuple[int, float])
    assert_type(model.score([1, 2, 3]), NDArray[np.float32])
    assert_type(model.score(array), NDArray[np.float32])
    assert_type(model.score(rows), NDArray[np.float32] | list[NDArray[np.float32]])
    assert_type(model.last_logits(array), NDArray[np.float32])


def training() -> None:
    class Words:
        """A tokenizer of the caller's own."""

        vocab_size = 65

        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

        def decode(self, ids: list[int]) -> str:
            return " ".join("x" * i for i in ids)

        def save(self, folder: str | PathLike[str]) -> None:
            pass

    class Lines:
        def log(self, values: dict[str, Any], *, step: int) -> None:
            pass

    model, settings = GPT(GPTConfig.tiny(n_layer=1)), TrainSettings(steps=1, batch_size=2, betas=(0.9, 0.95))
    corpus = Corpus.from_ids([1] * 40, np.arange(40), Words())
    assert_type(settings.micro_batch_size, int)
    assert_type(settings.min_lr, float)
    assert_type(settings.sample_interval, int | None)
    trainer = Trainer(model, corpus, settings, logger=Lines(), progress=False)
    assert_type(trainer.run(), int | None)
    assert_type(trainer.rows[0]["loss"], float)
    assert_type(trainer.evaluate(), float | None)
    gain = cmha.ones(2, requires_grad=True)
    optimizer = AdamW([{"params": model.parameters(), "weight_decay": 0.1}, {"params": [gain]}], lr=1e-3)
    assert_type(optimizer.state_dict()["m"], list[NDArray[np.float32]])
    assert_type(AdamW(model.parameters(), 1e-3).lr, float)
    assert_type(AdamW(parameter_groups(model, 0.1), 1e-3).params, list[Tensor])


def seeing() -> None:
    gpt, ids = GPT(GPTConfig(11, 8, 2, 2, 12)), [[1, 2, 3, 4]]
    with cmha.trace(gpt) as t, cmha.replace(gpt, {"blocks.1.attn.scores": lambda scores: scores * 0.0}):
        gpt(ids)
    assert_type(t["blocks.0.attn.scores"].numpy(), NDArray[Any])
    assert_type(t["blocks.0.attn.scores"].shape, tuple[int, ...])
    assert_type(list(t), list[str])
    assert_type(t.table("blocks.1.attn"), str)
    with cmha.heads_off(gpt, {0: [1]}), cmha.heads_off(gpt.h[1].attn, range(2)):
        gpt(ids)
    assert_type(cmha.head_importance(gpt, ids, batch_size=2), NDArray[np.float64])
    assert_type(cmha.attention_weights(gpt, ids, layers=[0], heads=np.array([1])), dict[int, NDArray[np.float32]])
    assert_type(cmha.see.eight_steps(gpt.h[0].attn, cmha.randn(1, 3, 12)), list[dict[str, Any]])

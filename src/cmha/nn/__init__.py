"""Layers: modules that hold parameters, and attention."""

from cmha.nn.attention import MultiHeadAttention, causal_mask, merge_heads, split_heads
from cmha.nn.kv_cache import KVCache
from cmha.nn.layers import MLP, Dropout, Embedding, LayerNorm, Linear
from cmha.nn.module import Module

__all__ = [
    "MLP", "Dropout", "Embedding", "KVCache", "LayerNorm", "Linear", "Module", "MultiHeadAttention", "causal_mask",
    "merge_heads", "split_heads",
]  # fmt: skip

"""Differentiable ops: arrays in, (array, vjp) out.

vjp(dy) returns one gradient per array argument (None where there is none) and changes nothing. A gradient may still
have the broadcast shape: summing it to its argument's shape, like all accumulation, is done in autograd.py.
"""

from cmha.ops.arithmetic import add, divide, multiply, negative, power, subtract
from cmha.ops.attention import attention, multi_head_attention
from cmha.ops.cross_entropy import cross_entropy
from cmha.ops.dropout import dropout
from cmha.ops.embedding import embedding
from cmha.ops.gelu import gelu
from cmha.ops.layer_norm import layer_norm
from cmha.ops.linear import linear, linear_gelu, linear_residual
from cmha.ops.matmul import matmul
from cmha.ops.reduce import max, mean, min, sum, var
from cmha.ops.shape import cat, contiguous, expand, index, permute, reshape, where
from cmha.ops.softmax import log_softmax, softmax
from cmha.ops.unary import abs, clip, exp, log, relu, sigmoid, sqrt, tanh

__all__ = [
    "abs", "add", "attention", "cat", "clip", "contiguous", "cross_entropy", "divide", "dropout", "embedding", "exp",
    "expand", "gelu", "index", "layer_norm", "linear", "linear_gelu", "linear_residual", "log", "log_softmax", "matmul",
    "max", "mean", "min", "multi_head_attention", "multiply", "negative", "permute", "power", "relu", "reshape",
    "sigmoid", "softmax", "sqrt", "subtract", "sum", "tanh", "var", "where",
]  # fmt: skip

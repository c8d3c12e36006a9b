"""What must be refused: the second half of the table of cases. One line each: op, call, type of error, its words.

The calls take the tensors of `material()`, so that a test can see that a refused call changed none of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import cmha
from cmha import nn
from cmha.tensor import make as apply

from .cases import op


@dataclass(frozen=True, eq=False)
class Refused:
    op: str
    call: Callable
    error: type | tuple
    words: tuple = ()


AXIS = (ValueError, IndexError)
SIZE = (ValueError, MemoryError)


def material():
    """One tensor of each kind, by name."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    return {
        "x": cmha.tensor(x), "y": cmha.tensor(x.reshape(3, 2)), "z": cmha.tensor(x[:, :2]), "s": cmha.tensor(2.0),
        "e": cmha.zeros((2, 0)), "i": cmha.tensor([0, 1, 2]), "m": cmha.tensor([True, False, True]),
        "c": cmha.tensor(np.arange(24, dtype=np.float32).reshape(2, 3, 4)),
        "q": cmha.tensor(np.ones((2, 4, 5, 3), dtype=np.float32)),
        "g": cmha.tensor(x, requires_grad=True),
    }


def attend(q, k=None, v=None, **options):
    return cmha.scaled_dot_product_attention(q, q if k is None else k, q if v is None else v, **options)


def zeros(*shape):
    return cmha.zeros(shape)


REFUSED = [
    # making tensors
    Refused("tensor complex", lambda t: cmha.tensor(np.ones(2, dtype=complex)), TypeError, ("complex",)),
    Refused("tensor object", lambda t: cmha.tensor(np.array([None, 1], dtype=object)), TypeError),
    Refused("tensor text", lambda t: cmha.tensor(np.array(["a", "b"])), TypeError),
    Refused("tensor date", lambda t: cmha.tensor(np.array(["2020-01-01"], dtype="datetime64[D]")), TypeError),
    Refused("tensor ragged", lambda t: cmha.tensor([[1.0, 2.0], [3.0]]), ValueError),
    Refused("zeros negative", lambda t: cmha.zeros((2, -3)), ValueError, ("-3",)),
    Refused("zeros float size", lambda t: cmha.zeros((2, 3.5)), TypeError, ("3.5",)),
    Refused("zeros overflow", lambda t: cmha.zeros((2**40, 2**40)), SIZE, ("1099511627776",)),
    Refused("full text", lambda t: cmha.full((2,), "a"), TypeError, ("str",)),
    Refused("full too large", lambda t: cmha.full((2,), 2**70), ValueError, (str(2**70),)),
    Refused("randn negative", lambda t: cmha.randn(-1), ValueError, ("-1",)),
    Refused("rand float size", lambda t: cmha.rand(2.5), TypeError, ("2.5",)),
    Refused("arange text", lambda t: cmha.arange("a"), ValueError, ("'a'",)),
    Refused("arange no step", lambda t: cmha.arange(0, 5, 0), ValueError, ("(0, 5, 0)",)),
    Refused("zeros too many axes", lambda t: cmha.zeros((1,) * 9), ValueError, ("9",)),
    # shapes
    Refused("reshape size", lambda t: t["x"].reshape(4, 2), ValueError, ("(2, 3)", "(4, 2)")),
    Refused("reshape two unknown", lambda t: t["x"].reshape(-1, -1), ValueError, ("(-1, -1)",)),
    Refused("reshape not a multiple", lambda t: t["x"].reshape(4, -1), ValueError, ("(2, 3)", "(4, -1)")),
    Refused("reshape unknown of nothing", lambda t: t["e"].reshape(0, -1), ValueError, ("(0, -1)",)),
    Refused("reshape negative", lambda t: t["x"].reshape(-2, -3), ValueError, ("(-2, -3)",)),
    Refused("permute repeated", lambda t: t["c"].permute(0, 0, 0), AXIS, ("(0, 0, 0)",)),
    Refused("permute too few", lambda t: t["c"].permute(0, 1), AXIS, ("(0, 1)", "(2, 3, 4)")),
    Refused("permute too many", lambda t: t["c"].permute(0, 1, 2, 3), AXIS, ("(0, 1, 2, 3)",)),
    Refused("permute out of range", lambda t: t["c"].permute(0, 1, 5), AXIS, ("5",)),
    Refused("transpose out of range", lambda t: t["x"].transpose(0, 2), AXIS, ("2",)),
    Refused("expand wrong size", lambda t: t["x"].expand(4, 3), ValueError, ("(2, 3)", "(4, 3)")),
    Refused("expand fewer axes", lambda t: t["x"].expand(3), ValueError, ("(2, 3)", "(3,)")),
    Refused("item of many", lambda t: t["x"].item(), ValueError, ("(2, 3)",)),
    # indexing
    Refused("index out of range", lambda t: t["x"][2], IndexError, ("2",)),
    Refused("index below", lambda t: t["x"][0, -4], IndexError, ("-4",)),
    Refused("index too many", lambda t: t["x"][0, 0, 0], IndexError, ("(2, 3)",)),
    Refused("index by list", lambda t: t["x"][[0, 1]], TypeError),
    Refused("index by array", lambda t: t["x"][np.array([0, 1])], TypeError),
    Refused("index by float", lambda t: t["x"][1.0], TypeError, ("float",)),
    Refused("index two ellipses", lambda t: t["x"][..., ...], IndexError),
    Refused("index zero step", lambda t: t["x"][::0], ValueError),
    # elementwise
    Refused("add", lambda t: t["x"] + t["y"], ValueError, ("(2, 3)", "(3, 2)")),
    Refused("multiply", lambda t: t["x"] * t["z"], ValueError, ("(2, 3)", "(2, 2)")),
    Refused("compare", lambda t: t["x"] < t["y"], ValueError, ("(2, 3)", "(3, 2)")),
    Refused("where", lambda t: cmha.where(t["m"], t["x"], t["y"]), ValueError, ("(2, 3)", "(3, 2)")),
    Refused("where condition", lambda t: cmha.where(t["x"], t["x"], t["x"]), TypeError, ("bool",)),
    Refused("masked_fill mask", lambda t: t["x"].masked_fill(t["x"], 0.0), TypeError, ("bool",)),
    Refused("masked_fill shape", lambda t: t["y"].masked_fill(t["m"], 0.0), ValueError, ("(3, 2)", "(3,)")),
    Refused("clip text", lambda t: t["x"].clip("a", 2.0), TypeError, ("str",)),
    Refused("clip nan", lambda t: t["x"].clip(float("nan"), 2.0), ValueError, ("nan",)),
    Refused("power of text", lambda t: t["x"] ** "a", TypeError, ("str",)),
    Refused("power of a tensor", lambda t: t["x"] ** t["x"], TypeError, ("Tensor",)),
    Refused("power of a third", lambda t: t["x"] ** 0.3, ValueError, ("0.3",)),
    Refused("mul_scalar", lambda t: t["x"].mul_scalar(t["x"]), TypeError, ("Tensor",)),
    Refused("clip order", lambda t: t["x"].clip(2.0, 1.0), ValueError, ("2.0", "1.0")),
    # along an axis
    Refused("sum axis", lambda t: t["x"].sum(axis=2), AXIS, ("2",)),
    Refused("sum axis twice", lambda t: t["x"].sum(axis=(1, 1)), AXIS, ("(1, 1)",)),
    Refused("sum axis twice, signs differ", lambda t: t["x"].sum(axis=(1, -1)), AXIS),
    Refused("mean axis", lambda t: t["x"].mean(axis=-3), AXIS, ("-3",)),
    Refused("max over two axes", lambda t: t["c"].max(axis=(0, 1)), ValueError, ("(0, 1)",)),
    Refused("axis and dim", lambda t: t["c"].sum(axis=0, dim=1), TypeError, ("axis=0", "dim=1")),
    Refused("softmax of a scalar", lambda t: t["s"].softmax(), ValueError, ("()",)),
    Refused("softmax axis", lambda t: t["x"].softmax(axis=3), AXIS, ("3", "(2, 3)")),
    Refused("max of nothing", lambda t: t["e"].max(axis=1), ValueError, ("(2, 0)",)),
    Refused("argmax of nothing", lambda t: t["e"].argmax(axis=1), ValueError, ("(2, 0)",)),
    Refused("cat shapes", lambda t: cmha.cat([t["x"], t["z"]], axis=0), ValueError, ("(2, 3)", "(2, 2)")),
    Refused("cat of nothing", lambda t: cmha.cat([]), ValueError),
    Refused("cat axis", lambda t: cmha.cat([t["x"], t["x"]], axis=2), AXIS, ("2",)),
    Refused("stack shapes", lambda t: cmha.stack([t["x"], t["y"]]), ValueError, ("(2, 3)", "(3, 2)")),
    # matmul and layers
    Refused("matmul inner", lambda t: t["x"] @ t["z"], ValueError, ("(2, 3)", "(2, 2)", "3 != 2")),
    Refused("matmul batch", lambda t: zeros(2, 3, 4) @ zeros(3, 4, 5), ValueError, ("(2, 3, 4)", "(3, 4, 5)")),
    Refused("matmul scalar", lambda t: t["x"] @ t["s"], ValueError, ("()",)),
    Refused("linear width", lambda t: nn.Linear(4, 5)(t["x"]), ValueError, ("(2, 3)", "(4, 5)")),
    Refused("linear size", lambda t: nn.Linear(0, 5), ValueError, ("0",)),
    Refused("layer_norm width", lambda t: nn.LayerNorm(4)(t["x"]), ValueError, ("(2, 3)", "(4,)")),
    Refused("layer_norm eps", lambda t: apply(op("layer_norm"), t["x"], zeros(3), zeros(3), eps=-1.0), ValueError),
    Refused("embedding id", lambda t: nn.Embedding(2, 3)(t["i"]), IndexError, ("2",)),
    Refused("embedding float ids", lambda t: nn.Embedding(9, 3)(t["x"]), TypeError, ("float32",)),
    Refused("embedding id below 0", lambda t: nn.Embedding(9, 3)(cmha.tensor([[0, -1]])), IndexError, ("-1",)),
    Refused("dropout p", lambda t: nn.Dropout(1.5), ValueError, ("1.5",)),
    Refused("cross_entropy rows", lambda t: cmha.cross_entropy(t["x"], t["i"]), ValueError, ("(2, 3)", "(3,)")),
    Refused("cross_entropy id", lambda t: cmha.cross_entropy(t["x"], cmha.tensor([0, 3])), IndexError, ("3",)),
    Refused("cross_entropy -1 counts", lambda t: cmha.cross_entropy(t["x"], cmha.tensor([0, -1]), ignore_index=-100),
            IndexError, ("-1",)),
    Refused("cross_entropy float targets", lambda t: cmha.cross_entropy(t["x"], zeros(2)), TypeError, ("float32",)),
    # attention
    Refused("attention width", lambda t: attend(t["q"], zeros(2, 4, 5, 2)), ValueError, ("(2, 4, 5, 3)",)),
    Refused("attention keys and values", lambda t: attend(t["q"], v=zeros(2, 4, 6, 3)), ValueError, ("(2, 4, 6, 3)",)),
    Refused("attention batch", lambda t: attend(t["q"], zeros(1, 4, 5, 3), zeros(1, 4, 5, 3)), ValueError),
    Refused("attention heads", lambda t: attend(t["q"], zeros(2, 3, 5, 3), zeros(2, 3, 5, 3)), ValueError, ("4", "3")),
    Refused("attention axes", lambda t: attend(t["c"]), ValueError, ("(2, 3, 4)",)),
    Refused("attention mask shape", lambda t: attend(t["q"], mask=zeros(5, 4)), ValueError, ("(5, 4)",)),
    Refused("attention mask int", lambda t: attend(t["q"], mask=cmha.tensor(np.ones((5, 5), int))), TypeError),
    Refused("attention mask gradient", lambda t: attend(t["q"], mask=zeros(5, 5) + t["g"].sum()), ValueError),
    Refused("attention dropout", lambda t: attend(t["q"], dropout_p=1.5), ValueError, ("1.5",)),
    Refused("heads", lambda t: nn.MultiHeadAttention(64, 5), ValueError, ("64", "5")),
    Refused("no heads", lambda t: nn.MultiHeadAttention(64, 0), ValueError, ("0",)),
    Refused("heads below zero", lambda t: nn.MultiHeadAttention(64, -2), ValueError, ("-2",)),
    Refused("no width", lambda t: nn.MultiHeadAttention(0, 1), ValueError, ("0",)),
    Refused("grouped heads", lambda t: nn.MultiHeadAttention(12, 4, n_kv_head=3), ValueError, ("4", "3")),
    Refused("input width", lambda t: nn.MultiHeadAttention(8, 2)(t["c"]), ValueError, ("(2, 3, 4)", "8")),
    Refused("key_mask shape", lambda t: nn.MultiHeadAttention(4, 2)(t["c"], key_mask=zeros(2, 4) > 0), ValueError,
            ("(2, 4)",)),
    Refused("attention scale", lambda t: attend(t["q"], scale="x"), TypeError, ("'x'",)),
    Refused("attention scale nan", lambda t: attend(t["q"], scale=float("nan")), ValueError, ("nan",)),
    Refused("attention mask of 3 axes", lambda t: attend(t["q"], mask=zeros(2, 5, 5)), ValueError, ("(2, 5, 5)",)),
    Refused("key_mask float", lambda t: nn.MultiHeadAttention(4, 2)(t["c"], key_mask=zeros(2, 3)), TypeError),
    Refused("split_heads", lambda t: nn.split_heads(t["c"], 3), ValueError, ("3", "(2, 3, 4)")),
    Refused("split_heads of 2 axes", lambda t: nn.split_heads(t["x"], 3), ValueError, ("(2, 3)",)),
    Refused("split_heads into none", lambda t: nn.split_heads(t["c"], 0), ValueError, ("0",)),
    Refused("merge_heads", lambda t: nn.merge_heads(t["c"], 3), ValueError, ("3", "(2, 3, 4)")),
    # cache
    Refused("cache size", lambda t: cmha.KVCache(0, 2, 3, 4), ValueError, ("0",)),
    Refused("cache overflow", lambda t: cmha.KVCache(2, 4, 3, 4).append(t["q"], t["q"]), ValueError, ("4", "5")),
    Refused("cache batch", lambda t: cmha.KVCache(3, 4, 3, 9).append(t["q"], t["q"]), ValueError, ("(2, 4, 5, 3)",)),
    # the model
    Refused("config heads", lambda t: cmha.GPT(cmha.GPTConfig(5, 4, 1, 3, 8)), ValueError, ("8", "3")),
    Refused("config size", lambda t: cmha.GPT(cmha.GPTConfig(5, 0, 1, 1, 8)), ValueError, ("0",)),
    # autograd and the optimiser
    Refused("backward of many", lambda t: (t["g"] * 2).backward(), ValueError, ("(2, 3)",)),
    Refused("backward shape", lambda t: (t["g"] * 2).backward(zeros(3, 2)), ValueError, ("(2, 3)", "(3, 2)")),
    Refused("int gradient", lambda t: cmha.tensor([1, 2], requires_grad=True), (TypeError, ValueError), ("int64",)),
    Refused("threads 0", lambda t: cmha.set_num_threads(0), ValueError, ("0",)),
    Refused("threads many", lambda t: cmha.set_num_threads(1025), ValueError, ("1025",)),
    Refused("threads float", lambda t: cmha.set_num_threads(2.0), TypeError, ("2.0",)),
    Refused("threads bool", lambda t: cmha.set_num_threads(True), TypeError, ("True",)),
    Refused("AdamW lr", lambda t: cmha.AdamW([t["g"]], lr=-1.0), ValueError, ("-1.0",)),
    Refused("AdamW betas", lambda t: cmha.AdamW([t["g"]], lr=0.1, betas=(1.0, 0.9)), ValueError, ("1.0",)),
    Refused("AdamW nothing", lambda t: cmha.AdamW([], lr=0.1), ValueError),
    Refused("state_dict", lambda t: nn.Linear(2, 3).load_state_dict({"weight": np.ones((3, 2))}), ValueError,
            ("weight", "bias", "(3, 2)", "(2, 3)")),
]

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


def small_gpt():
    return cmha.GPT(cmha.GPTConfig(5, 4, 1, 1, 8))


BY_AXIS = {
    "softmax": lambda x, **o: x.softmax(**o), "log_softmax": lambda x, **o: x.log_softmax(**o),
    "argmax": lambda x, **o: x.argmax(**o), "max": lambda x, **o: x.max(**o), "min": lambda x, **o: x.min(**o),
    "cat": lambda x, **o: cmha.cat([x, x], **o), "stack": lambda x, **o: cmha.stack([x, x], **o),
    "split": lambda x, **o: cmha.split(x, 1, **o),
}

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
    Refused("tensor too large", lambda t: cmha.tensor(2**70), ValueError, (str(2**70), "int64")),
    Refused("tensor too large in a list", lambda t: cmha.tensor([1, -2**70]), ValueError, (str(-2**70),)),
    Refused("tensor masked", lambda t: cmha.tensor(np.ma.array([1.0], mask=[1])), TypeError, ("filled",)),
    Refused("from_numpy masked", lambda t: cmha.from_numpy(np.ma.array([1.0], mask=[1])), TypeError, ("filled",)),
    Refused("zeros says its name", lambda t: cmha.zeros(-1), ValueError, ("[zeros]", "-1")),
    Refused("ones text", lambda t: cmha.ones("a"), TypeError, ("[ones]", "'a'")),
    Refused("randn says its name", lambda t: cmha.randn(2, -1), ValueError, ("[randn]", "-1")),
    Refused("rand text", lambda t: cmha.rand("a"), TypeError, ("[rand]", "'a'")),
    Refused("full negative", lambda t: cmha.full(-1, 2.0), ValueError, ("[full]", "-1")),
    Refused("zeros float array", lambda t: cmha.zeros(np.array([2.0, 3.0])), TypeError, ("[zeros]",)),
    Refused("zeros 2-D array", lambda t: cmha.zeros(np.ones((2, 2), int)), TypeError, ("[zeros]",)),
    Refused("zeros tensor", lambda t: cmha.zeros(t["i"]), TypeError, ("[zeros]",)),
    Refused("empty but too large", lambda t: cmha.zeros(2**31, 2**31, 0), ValueError, ("(2147483648, 2147483648, 0)",)),
    Refused("flag requires_grad", lambda t: cmha.ones(2, requires_grad="yes"), TypeError, ("'yes'",)),
    Refused("flag requires_grad set", lambda t: setattr(t["x"], "requires_grad", 1), TypeError, ("1",)),
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
    Refused("index too large", lambda t: t["x"][2**70], IndexError, (str(2**70),)),
    Refused("permute by tensor", lambda t: t["c"].permute(t["x"], 1, 2), TypeError, ("[permute]",)),
    Refused("reshape by tensor", lambda t: t["x"].reshape(t["c"], 2), TypeError, ("[reshape]",)),
    Refused("transpose two axes", lambda t: t["c"].transpose((0, 1), 2), TypeError, ("(0, 1)",)),
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
    Refused("add too large", lambda t: t["x"] + 10**30, ValueError, ("[add]", str(10**30))),
    Refused("add text array", lambda t: t["x"] + np.array(["a"]), TypeError, ("[add]",)),
    Refused("equal text array", lambda t: t["x"] == np.array(["a", "b", "c"]), TypeError, ("[equal]",)),
    Refused("masked_fill text", lambda t: t["x"].masked_fill(t["m"], "a"), TypeError, ("[masked_fill] value", "str")),
    Refused("masked_fill None", lambda t: t["x"].masked_fill(t["m"], None), TypeError, ("NoneType",)),
    Refused("masked_fill tensor", lambda t: t["x"].masked_fill(t["m"], t["x"]), TypeError, ("Tensor",)),
    Refused("masked_fill its name", lambda t: t["x"].masked_fill(zeros(2) > 0, 0.0), ValueError, ("[masked_fill]",)),
    Refused("masked_fill grows x", lambda t: t["m"].masked_fill(zeros(2, 3) > 0, 0.0), ValueError, ("(2, 3)", "(3,)")),
    Refused("clip array", lambda t: t["x"].clip(np.zeros(3), 1.0), TypeError, ("ndarray",)),
    Refused("clip too large", lambda t: t["x"].clip(0, 10**400), ValueError, ("[clip] hi",)),
    Refused("format of many", lambda t: f"{t['x']:.3f}", ValueError, ("'.3f'", "(2, 3)")),
    Refused("grad shape", lambda t: setattr(t["g"], "grad", np.ones(3)), ValueError, ("[grad]", "(3,)", "(2, 3)")),
    Refused("grad text", lambda t: setattr(t["g"], "grad", "a"), TypeError, ("[grad]",)),
    # along an axis
    Refused("sum axis", lambda t: t["x"].sum(axis=2), AXIS, ("2",)),
    Refused("sum axis twice", lambda t: t["x"].sum(axis=(1, 1)), AXIS, ("(1, 1)",)),
    Refused("sum axis twice, signs differ", lambda t: t["x"].sum(axis=(1, -1)), AXIS),
    Refused("mean axis", lambda t: t["x"].mean(axis=-3), AXIS, ("-3",)),
    Refused("max over two axes", lambda t: t["c"].max(axis=(0, 1)), ValueError, ("(0, 1)",)),
    Refused("axis and dim", lambda t: t["c"].sum(axis=0, dim=1), TypeError, ("axis=0", "dim=1")),
    *(Refused(f"{name} axis and dim", lambda t, call=call: call(t["c"], axis=0, dim=0), TypeError, ("axis=0", "dim=0"))
      for name, call in BY_AXIS.items()),
    *(Refused(f"{name} two axes", lambda t, call=call: call(t["c"], axis=(0, 1)), (TypeError, ValueError), ("(0, 1)",))
      for name, call in BY_AXIS.items()),
    Refused("keepdims and keepdim", lambda t: t["c"].sum(keepdims=False, keepdim=True), TypeError, ("keepdim=True",)),
    Refused("keepdims text", lambda t: t["c"].mean(keepdims="a"), TypeError, ("'a'",)),
    Refused("keepdim int", lambda t: t["c"].argmax(keepdim=1), TypeError, ("1",)),
    Refused("softmax axis array", lambda t: t["c"].softmax(np.array([0, 1])), TypeError, ("[softmax]",)),
    Refused("sum axis array", lambda t: t["c"].sum(axis=np.array([0, 1])), TypeError, ("[sum]",)),
    Refused("softmax of a scalar", lambda t: t["s"].softmax(), ValueError, ("()",)),
    Refused("softmax axis", lambda t: t["x"].softmax(axis=3), AXIS, ("3", "(2, 3)")),
    Refused("max of nothing", lambda t: t["e"].max(axis=1), ValueError, ("(2, 0)",)),
    Refused("argmax of nothing", lambda t: t["e"].argmax(axis=1), ValueError, ("(2, 0)",)),
    Refused("cat shapes", lambda t: cmha.cat([t["x"], t["z"]], axis=0), ValueError, ("(2, 3)", "(2, 2)")),
    Refused("cat of nothing", lambda t: cmha.cat([]), ValueError),
    Refused("cat axis", lambda t: cmha.cat([t["x"], t["x"]], axis=2), AXIS, ("2",)),
    Refused("stack shapes", lambda t: cmha.stack([t["x"], t["y"]]), ValueError, ("(2, 3)", "(3, 2)")),
    Refused("argmax says its name", lambda t: t["e"].argmax(axis=1), ValueError, ("[argmax]",)),
    Refused("argmax of nothing at all", lambda t: t["e"].argmax(), ValueError, ("[argmax]", "(2, 0)")),
    Refused("cat None", lambda t: cmha.cat(None), TypeError, ("[cat]", "NoneType")),
    Refused("cat text", lambda t: cmha.cat([t["x"], "a"]), TypeError, ("[cat]",)),
    Refused("stack number", lambda t: cmha.stack(1.0), TypeError, ("[stack]", "float")),
    Refused("stack of nothing", lambda t: cmha.stack([]), ValueError, ("[stack]",)),
    Refused("split float", lambda t: cmha.split(t["x"], 1.0), ValueError, ("[split]", "1.0")),
    Refused("split text", lambda t: cmha.split(t["x"], "a"), TypeError, ("[split]", "'a'")),
    Refused("split None", lambda t: cmha.split(None, 1), TypeError, ("[split]",)),
    Refused("split sizes", lambda t: cmha.split(t["x"], [1, 2]), ValueError, ("[1, 2]", "2")),
    Refused("split by text", lambda t: cmha.split(t["x"], [1, "a"]), TypeError, ("'a'",)),
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
    *(Refused(f"cross_entropy ignore_index {wrong!r}"[:40], lambda t, wrong=wrong: cmha.cross_entropy(
        t["x"], [0, 1], ignore_index=wrong), (TypeError, ValueError), ("ignore_index",))
      for wrong in (1.5, "a", None, True, 2**70)),
    Refused("cross_entropy None", lambda t: cmha.cross_entropy(None, [0, 1]), TypeError, ("[cross_entropy]",)),
    Refused("layer_norm eps text", lambda t: nn.LayerNorm(4, eps="a"), TypeError, ("'a'",)),
    Refused("flag Linear", lambda t: nn.Linear(2, 3, bias="no"), TypeError, ("'no'",)),
    Refused("flag LayerNorm", lambda t: nn.LayerNorm(2, bias=1), TypeError, ("1",)),
    Refused("flag train", lambda t: nn.Linear(2, 3).train("a"), TypeError, ("'a'",)),
    Refused("state_dict None", lambda t: nn.Linear(2, 3).load_state_dict(None), TypeError, ("NoneType",)),
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
    Refused("split_heads None", lambda t: nn.split_heads(None, 2), TypeError, ("[split_heads]",)),
    Refused("merge_heads text", lambda t: nn.merge_heads("a", 2), TypeError, ("[merge_heads]",)),
    Refused("flag attention", lambda t: attend(t["q"], is_causal=np.array([True, False])), TypeError, ("is_causal",)),
    Refused("flag attention weights", lambda t: attend(t["q"], need_weights="a"), TypeError, ("need_weights",)),
    Refused("flag is_causal", lambda t: nn.MultiHeadAttention(4, 2)(t["c"], is_causal="no"), TypeError, ("'no'",)),
    Refused("flag need_weights", lambda t: nn.MultiHeadAttention(4, 2)(t["c"], need_weights=2), TypeError, ("2",)),
    Refused("flag projection", lambda t: nn.MultiHeadAttention(4, 2, output_projection="no"), TypeError, ("'no'",)),
    # cache
    Refused("cache size", lambda t: cmha.KVCache(0, 2, 3, 4), ValueError, ("0",)),
    Refused("cache overflow", lambda t: cmha.KVCache(2, 4, 3, 4).append(t["q"], t["q"]), ValueError, ("4", "5")),
    Refused("cache batch", lambda t: cmha.KVCache(3, 4, 3, 9).append(t["q"], t["q"]), ValueError, ("(2, 4, 5, 3)",)),
    Refused("cache shape unquoted", lambda t: cmha.KVCache(3, 4, 3, 9).append(t["q"], t["q"]), ValueError,
            ("(3, 4, n, 3)",)),
    Refused("cache rows", lambda t: cmha.KVCache(2, 4, 3, 9).reorder([[1], [0, 1]]), ValueError, ("[kv_cache]",)),
    Refused("cache text", lambda t: nn.MultiHeadAttention(4, 2)(t["c"], cache="a"), TypeError, ("KVCache", "str")),
    Refused("cache of a model", lambda t: nn.MultiHeadAttention(4, 2)(t["c"], cache=small_gpt().new_cache(2)),
            TypeError, ("KVCache", "ModelCache")),
    Refused("cache of a layer", lambda t: small_gpt()([[1]], cache=cmha.KVCache(1, 1, 8, 4)), TypeError,
            ("new_cache", "KVCache")),
    Refused("cache list", lambda t: small_gpt()([[1]], cache=[1]), TypeError, ("list",)),
    # the model
    Refused("config heads", lambda t: cmha.GPT(cmha.GPTConfig(5, 4, 1, 3, 8)), ValueError, ("8", "3")),
    Refused("config size", lambda t: cmha.GPT(cmha.GPTConfig(5, 0, 1, 1, 8)), ValueError, ("0",)),
    Refused("flag config", lambda t: cmha.GPTConfig(5, 4, 1, 1, 8, bias="no"), TypeError, ("'no'",)),
    Refused("flag config projection", lambda t: cmha.GPTConfig(5, 4, 1, 1, 8, output_projection=0), TypeError, ("0",)),
    Refused("config preset", lambda t: cmha.GPTConfig.preset(["tiny"]), ValueError, ("tiny",)),
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

"""The eight steps of a real forward pass, read off the arrays it made."""

from cmha.autograd import no_grad, watch
from cmha.tensor import to_tensor

# op, step, what it does, the name of what it makes; in the order of MultiHeadAttention._step_by_step
_PROJECT = [("linear", 1, "project", t) for t in "qkv"]
_SPLIT = ("reshape", "permute", "reshape")
_SPLIT_GROUP = ("reshape", "permute", "reshape", "expand", "reshape")  # one key head serves a group of query heads
_ATTEND = [
    ("permute", 4, "transpose k", "k"),
    ("matmul", 4, "q @ k^T", "scores"),
    ("multiply", 4, "divide by sqrt(hd)", "scores"),
    ("add", 5, "add the mask", "scores"),
    ("softmax", 6, "softmax", "weights"),
    ("matmul", 6, "weights @ v", "y"),
]
_MERGE = [(op, 7, f"merge heads: {op}", "y") for op in ("reshape", "permute", "reshape")]
_MIX = [("linear", 8, "mix heads: c_proj", "y")]


def trace(mha, x):
    """Run `mha` step by step and causally on x (B, T, D), without a cache; one dict per array it made, steps 1 to 8.

    Keys: step, name, tensor, shape, strides (in elements), storage ("view" of the array before, "copy" of it, "new"),
    bytes (of the elements, whether or not they were moved), seconds.
    """
    fused, training = mha.fused, mha.training
    x = to_tensor(x, "trace").float()
    try:
        mha.fused, mha.training = False, False
        with no_grad(), watch() as events:
            mha(x, is_causal=True)
    finally:
        mha.fused, mha.training = fused, training
    of_keys = _SPLIT if mha.n_kv_head == mha.n_head else _SPLIT_GROUP
    split = [
        (op, 3, f"split heads: {op}", t) for t, ops in (("q", _SPLIT), ("k", of_keys), ("v", of_keys)) for op in ops
    ]
    plan = _PROJECT + split + _ATTEND + _MERGE + (_MIX if mha.c_proj is not None else [])
    if [event[0] for event in events] != [step[0] for step in plan]:
        raise RuntimeError("cmha internal error: the steps of attention and of trace differ, please report")
    rows = []
    for (op, step, name, tensor), (_, inputs, out, seconds) in zip(plan, events, strict=True):
        if step == 3 and len(rows) == 3:  # step 2 without a cache: k and v pass through as they are
            rows += [_row(2, "remember: no cache", t, "view", events[i][2], 0.0) for t, i in (("k", 1), ("v", 2))]
        storage = "view" if out.same_storage(inputs[0]) else "copy" if op == "reshape" else "new"
        rows.append(_row(step, name, tensor, storage, out, seconds))
    return rows


def _row(step, name, tensor, storage, array, seconds):
    return {"step": step, "name": name, "tensor": tensor, "shape": list(array.shape), "strides": list(array.strides),
            "storage": storage, "bytes": array.nbytes, "seconds": seconds}  # fmt: skip

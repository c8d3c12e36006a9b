"""Multi-head attention, and the GPT around it, on a compiled row-major tensor core."""

from typing import TYPE_CHECKING

from cmha import entry

entry.before_imports()

from cmha import threads  # noqa: E402

threads.start()

from cmha.autograd import is_grad_enabled, no_grad  # noqa: E402
from cmha.errors import CheckpointError  # noqa: E402
from cmha.functional import (  # noqa: E402
    arange,
    cat,
    cross_entropy,
    from_dlpack,
    from_numpy,
    full,
    ones,
    rand,
    randn,
    scaled_dot_product_attention,
    split,
    stack,
    tensor,
    where,
    zeros,
)
from cmha.gpt import GPT, GPTConfig  # noqa: E402
from cmha.nn import KVCache, MultiHeadAttention  # noqa: E402
from cmha.random import manual_seed  # noqa: E402
from cmha.see import attention_weights, head_importance, heads_off, replace, trace  # noqa: E402
from cmha.tensor import Tensor  # noqa: E402
from cmha.text import BPETokenizer, ByteTokenizer, CharTokenizer  # noqa: E402
from cmha.threads import (  # noqa: E402
    get_num_threads,
    memory_stats,
    reset_peak_memory_stats,
    set_num_threads,
    show_config,
)
from cmha.train import AdamW, clip_grad_norm_, cosine_schedule  # noqa: E402

entry.after_imports()

__all__ = [
    "AdamW", "BPETokenizer", "ByteTokenizer", "CharTokenizer", "CheckpointError", "GPT", "GPTConfig", "KVCache",
    "MultiHeadAttention", "Tensor", "arange", "attention_weights", "cat", "clip_grad_norm_", "cosine_schedule",
    "cross_entropy", "from_dlpack", "from_numpy", "full", "get_num_threads", "head_importance", "heads_off",
    "is_grad_enabled", "manual_seed", "memory_stats", "no_grad", "ones", "rand", "randn", "replace",
    "reset_peak_memory_stats", "scaled_dot_product_attention", "set_num_threads", "show_config", "split", "stack",
    "tensor", "trace", "where", "zeros",
]  # fmt: skip


__version__: str

if not TYPE_CHECKING:  # or every name would be one to a type checker

    def __getattr__(name):
        if name == "__version__":
            return threads.installed_version("cmha")
        raise AttributeError(f"module 'cmha' has no attribute {name!r}")

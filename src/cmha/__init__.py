"""Multi-head attention, and the GPT around it, on a compiled row-major tensor core."""

import os
import signal
import sys


def _is_the_command():
    """This process is `cmha` or `python -m cmha`: both import this package before a line of cmha.cli can run."""
    arguments = getattr(sys, "argv", None) or [""]
    if arguments[0] == "-m":  # while Python looks for the module
        return sys.orig_argv[-len(arguments)] in ("cmha", "-mcmha")
    return os.path.basename(arguments[0]) == "cmha"


def _end(kind, error, trace):
    """The command's sys.excepthook: what is raised outside of cmha.cli's own care ends as everything does there."""
    if issubclass(kind, KeyboardInterrupt):
        sys.exit(130)
    if "--debug" in sys.argv:
        sys.__excepthook__(kind, error, trace)
    elif sys.stderr is not None:
        print("cmha: error:", " ".join(str(error).split()), file=sys.stderr)
    sys.exit(2 if issubclass(kind, ValueError) else 1)


_interrupt = None
if _is_the_command():
    sys.excepthook = _end
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # half an import has nothing to tidy up
        _interrupt = signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from cmha import threads  # noqa: E402

threads.start()

from cmha.autograd import is_grad_enabled, no_grad  # noqa: E402
from cmha.errors import CheckpointError  # noqa: E402
from cmha.functional import (  # noqa: E402
    arange,
    cat,
    cross_entropy,
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
from cmha.tensor import Tensor  # noqa: E402
from cmha.text import ByteTokenizer, CharTokenizer  # noqa: E402
from cmha.threads import get_num_threads, set_num_threads, show_config  # noqa: E402
from cmha.train import AdamW, clip_grad_norm_, cosine_schedule  # noqa: E402

if _interrupt is not None:
    signal.signal(signal.SIGINT, _interrupt)

__all__ = [
    "GPT", "AdamW", "ByteTokenizer", "CharTokenizer", "CheckpointError", "GPTConfig", "KVCache", "MultiHeadAttention",
    "Tensor",
    "arange", "cat", "clip_grad_norm_", "cosine_schedule", "cross_entropy", "from_numpy", "full", "get_num_threads",
    "is_grad_enabled", "manual_seed", "no_grad", "ones", "rand", "randn", "scaled_dot_product_attention",
    "set_num_threads",
    "show_config", "split", "stack", "tensor", "where", "zeros",
]  # fmt: skip


def __getattr__(name):
    if name == "__version__":
        return threads.installed_version("cmha")
    raise AttributeError(f"module 'cmha' has no attribute {name!r}")

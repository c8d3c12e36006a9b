"""The rows of the table: an op of bench/sides, its sizes, and what its result may differ by.

B batch, T positions, H heads, D width, hd = D / H, V vocabulary, L layers; m k n as in (m, k) @ (k, n).
"""

from dataclasses import dataclass, field

MODELS = {  # the sizes that people train on a CPU: the lesson's, a character model, nanoGPT's Shakespeare, GPT-2 small
    "tiny": {"L": 2, "H": 4, "D": 64, "V": 65, "block": 32, "B": 8, "T": 32},
    "char": {"L": 4, "H": 4, "D": 128, "V": 65, "block": 64, "B": 12, "T": 64},
    "baby": {"L": 6, "H": 6, "D": 384, "V": 65, "block": 256, "B": 16, "T": 256},
    "GPT-2 124M": {"L": 12, "H": 12, "D": 768, "V": 50257, "block": 1024, "B": 4, "T": 64},
}
GOALS = {"tiny": 3.0, "char": 1.6, "baby": 1.1, "GPT-2 124M": 4.0}
DECODED = ("tiny", "baby", "GPT-2 124M")
WEIGHED = ("tiny", "GPT-2 124M")  # whose memory is measured
NANO = {"L": 2, "H": 2, "D": 16, "V": 13, "block": 8, "B": 2, "T": 8}  # for --smoke

WHOLE_MODELS = ("train", "decode", "generate", "prefill")  # ops whose rows get processes of their own

FORWARD, BACKWARD = 1e-5, 1e-4  # what float32 sums in another order may differ by, as a share of the result's norm


@dataclass(frozen=True)
class Row:
    """kind says what is measured: "time" of calls, peak "memory" of a process, time of an "import", "size" on disk."""

    name: str
    op: str
    sizes: dict = field(default_factory=dict)
    bound: float = FORWARD
    goal: float | None = None  # PyTorch's time over ours that the project has set itself
    kind: str = "time"
    without: tuple = ()  # sides that cannot do this size

    @property
    def family(self):
        """Rows of one family share their processes; the large ones get fresh ones."""
        return f"{self.op} {self.name}" if self.op in WHOLE_MODELS else self.op.removesuffix("_backward")


def _matmul(m, k, n, form="nn", goal=0.9):
    """nn: (m, k) @ (k, n); nt: b is stored (n, k); tn: a is stored (k, m)."""
    name = f"matmul {m}x{k}x{n}" + ("" if form == "nn" else f" {form}")
    return Row(name, "matmul", {"m": m, "k": k, "n": n, "form": form}, goal=goal)


def _attention(B, H, T, hd, forward, both):
    sizes = {"B": B, "H": H, "T": T, "hd": hd}
    without = ("numpy",) if T > 1024 else ()  # its scores would take gigabytes
    yield Row(f"attention T {T}", "attention", sizes, FORWARD, forward, without=without)
    yield Row(f"attention T {T} fwd+bwd", "attention_backward", sizes, BACKWARD, both)


def _mha(B, T, D, H, forward, both):
    sizes = {"B": B, "T": T, "D": D, "H": H}
    yield Row(f"MHA {B},{T},{D},{H}", "mha", sizes, FORWARD, forward)
    yield Row(f"MHA {B},{T},{D},{H} fwd+bwd", "mha_backward", sizes, BACKWARD, both)


def _pair(label, op, sizes, forward=None, both=None):
    yield Row(label, op, sizes, FORWARD, forward)
    yield Row(f"{label} fwd+bwd", f"{op}_backward", sizes, BACKWARD, both)


def full():
    """Every row, small things first."""
    return [
        *(_matmul(n, n, n, goal=goal) for n, goal in ((64, 1.1), (256, 0.95), (1024, 0.95))),
        _matmul(256, 64, 64, goal=1.1),  # tiny: q, k, v and the projection; their dx; their dW
        _matmul(256, 64, 64, "nt", 1.0),
        _matmul(64, 256, 64, "tn", 1.0),
        _matmul(256, 64, 256, goal=1.0),  # tiny: the MLP
        _matmul(256, 256, 64, goal=1.0),
        _matmul(768, 128, 512),  # char
        _matmul(768, 512, 128, "nt"),
        _matmul(128, 768, 512, "tn"),
        _matmul(4096, 384, 1536),  # baby
        _matmul(4096, 1536, 384, "nt"),
        _matmul(384, 4096, 1536, "tn"),
        _matmul(256, 768, 3072),  # GPT-2
        _matmul(1024, 768, 3072),
        _matmul(1024, 3072, 768, "nt"),
        _matmul(768, 1024, 3072, "tn"),
        _matmul(256, 768, 50257, "nt", 1.0),  # its vocabulary head, stored (V, D)
        _matmul(256, 50257, 768, goal=1.0),
        _matmul(50257, 256, 768, "tn", 1.0),
        *_pair("softmax 1024x32", "softmax", {"m": 1024, "n": 32}),
        *_pair("softmax 4096x1024", "softmax", {"m": 4096, "n": 1024}),
        *_pair("layer norm 256x64", "layer_norm", {"m": 256, "n": 64}, 1.0, 1.0),
        *_pair("layer norm 4096x768", "layer_norm", {"m": 4096, "n": 768}, 1.0, 1.0),
        *_pair("GELU 256x256", "gelu", {"m": 256, "n": 256}, 4.0),
        *_pair("GELU 1024x3072", "gelu", {"m": 1024, "n": 3072}, 4.0),
        Row("cross-entropy 65 fwd+bwd", "cross_entropy", {"m": 256, "n": 65}),
        Row("cross-entropy 50257 fwd+bwd", "cross_entropy", {"m": 256, "n": 50257}, goal=6.0),
        Row("AdamW tiny", "adamw", MODELS["tiny"], goal=1.0),
        Row("AdamW baby", "adamw", MODELS["baby"], goal=1.0),
        *_attention(8, 4, 32, 16, None, 3.0),
        *_attention(16, 6, 256, 64, 1.5, 1.9),
        *_attention(4, 12, 1024, 64, 1.5, 1.75),
        *_attention(1, 12, 4096, 64, 1.3, 1.35),
        *_mha(8, 32, 64, 4, 2.0, 2.5),
        *_mha(16, 256, 384, 6, None, 1.2),
        *_mha(4, 1024, 768, 12, None, 1.2),
        *(Row(f"train step {name}", "train", MODELS[name], 1e-3, goal) for name, goal in GOALS.items()),
        *(Row(f"decode a token {name}", "decode", {**MODELS[name], "B": 1}, BACKWARD) for name in DECODED),
        Row("generate 128 GPT-2 124M", "generate", {**MODELS["GPT-2 124M"], "B": 1, "T": 16, "new": 128}, goal=1.25),
        Row("prefill 512 GPT-2 124M", "prefill", {**MODELS["GPT-2 124M"], "B": 1, "T": 512}, BACKWARD, 1.0),
        *(Row(f"memory, training {name}", "train", MODELS[name], kind="memory") for name in WEIGHED),
        Row("import time", "import", kind="import"),
        Row("installed size", "size", kind="size"),
    ]  # fmt: skip


def smoke():
    """One row of each op, on sizes that take no time and agree by no luck."""
    return [
        *(_matmul(17, 23, 29, form, None) for form in ("nn", "nt", "tn")),
        *_pair("softmax 7x33", "softmax", {"m": 7, "n": 33}),
        *_pair("layer norm 7x33", "layer_norm", {"m": 7, "n": 33}),
        *_pair("GELU 7x33", "gelu", {"m": 7, "n": 33}),
        Row("cross-entropy 33 fwd+bwd", "cross_entropy", {"m": 7, "n": 33}),
        Row("AdamW nano", "adamw", NANO),
        *_attention(2, 3, 11, 8, None, None),
        *_mha(2, 11, 24, 3, None, None),
        Row("train step nano", "train", NANO, 1e-3),
        Row("decode a token nano", "decode", {**NANO, "B": 1}, BACKWARD),
        Row("generate 5 nano", "generate", {**NANO, "B": 1, "T": 3, "new": 5}),
        Row("prefill 7 nano", "prefill", {**NANO, "B": 1, "T": 7}, BACKWARD),
        Row("memory, training nano", "train", NANO, kind="memory"),
        Row("import time", "import", kind="import"),
        Row("installed size", "size", kind="size"),
    ]

"""Hugging Face transformers on PyTorch: GPT2LMHeadModel, as its users call it."""

import numpy as np
import torch
import transformers

from sides.torch_side import start  # noqa: F401


def versions():
    return {"transformers": transformers.__version__}


def to_numpy(t):
    return np.asarray(t, np.float32)


def _model(data, s):
    config = transformers.GPT2Config(
        vocab_size=s["V"], n_positions=s["block"], n_layer=s["L"], n_head=s["H"], n_embd=s["D"], eos_token_id=None
    )
    transformers.logging.set_verbosity_error()
    model = transformers.GPT2LMHeadModel(config).eval()
    own = dict(model.transformer.named_parameters())
    with torch.no_grad():
        for name, p in own.items():
            if "c_attn" in name:
                parts = [data[name.replace("c_attn", part)] for part in ("c_q", "c_k", "c_v")]
                p.copy_(torch.tensor(np.concatenate(parts, -1)))
            else:
                p.copy_(torch.tensor(data[name]))
    return model, torch.tensor(data["ids"])


def generate(data, s):
    model, ids = _model(data, s)
    mask, options = torch.ones_like(ids), {"do_sample": False, "max_new_tokens": s["new"], "pad_token_id": 0}

    def run():
        with torch.inference_mode():
            return (model.generate(ids, attention_mask=mask, **options),)

    return run


def prefill(data, s):
    model, ids = _model(data, s)

    def run():
        with torch.inference_mode():
            return (model(ids, use_cache=True, logits_to_keep=1).logits[:, -1],)

    return run


OPS = {"generate": generate, "prefill": prefill}

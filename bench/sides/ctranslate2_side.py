"""CTranslate2, float32: the model is built from its specification and written where it wants to read it."""

import tempfile

import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

THREADS = 1


def start(threads):
    global THREADS
    THREADS = threads


def versions():
    return {"CTranslate2": ctranslate2.__version__}


def to_numpy(t):
    return np.asarray(t, np.float32)


def _spec(data, s):
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        s["L"], s["H"], pre_norm=True, activation=common_spec.Activation.GELUTanh
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = decoder.projection.weight = data["wte.weight"]
    decoder.position_encodings.encodings = data["wpe.weight"]

    def norm(part, name):
        part.gamma, part.beta = data[f"{name}.weight"], data[f"{name}.bias"]

    def linear(part, *names):  # (out, in); q, k and v in one
        part.weight = np.ascontiguousarray(np.concatenate([data[f"{n}.weight"] for n in names], -1).T)
        part.bias = np.concatenate([data[f"{n}.bias"] for n in names])

    norm(decoder.layer_norm, "ln_f")
    for i, layer in enumerate(decoder.layer):
        norm(layer.self_attention.layer_norm, f"h.{i}.ln_1")
        norm(layer.ffn.layer_norm, f"h.{i}.ln_2")
        linear(layer.self_attention.linear[0], *(f"h.{i}.attn.{part}" for part in ("c_q", "c_k", "c_v")))
        linear(layer.self_attention.linear[1], f"h.{i}.attn.c_proj")
        linear(layer.ffn.linear_0, f"h.{i}.mlp.c_fc")
        linear(layer.ffn.linear_1, f"h.{i}.mlp.c_proj")
    spec.register_vocabulary([f"t{i}" for i in range(s["V"])])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "t0"
    spec.validate()
    spec.optimize(quantization="float32")
    return spec


def generate(data, s):
    with tempfile.TemporaryDirectory() as folder:
        _spec(data, s).save(folder)
        options = {"device": "cpu", "intra_threads": THREADS, "inter_threads": 1, "compute_type": "float32"}
        generator = ctranslate2.Generator(folder, **options)
    ids = data["ids"].tolist()
    prompts = [[f"t{i}" for i in row] for row in ids]
    options = {"max_length": s["new"], "min_length": s["new"], "sampling_topk": 1, "end_token": []}

    def run():
        found = generator.generate_batch(prompts, include_prompt_in_result=False, **options)
        return ([prompt + row.sequences_ids[0] for prompt, row in zip(ids, found, strict=True)],)

    return run


OPS = {"generate": generate}

"""Hugging Face's GPT-2 folder: what is read, what is refused, and that nothing is half done."""

import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import cmha
from cmha import GPT, CheckpointError, GPTConfig, tensor_file

from .checking import array, needs_posix, same_bits
from .models import bfloat16, same_model, tiny


def write(path, tensors, dtypes=None):
    """A safetensors file of any element type: {name: array}, and the names of types NumPy does not know."""
    header, offset = {}, 0
    known = {"float32": "F32", "float16": "F16", "float64": "F64", "int64": "I64", "bool": "BOOL", "uint8": "U8"}
    for name, a in tensors.items():
        dtype = (dtypes or {}).get(name) or known[a.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(a.shape), "data_offsets": [offset, offset + a.nbytes]}
        offset += a.nbytes
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(a).tobytes() for a in tensors.values())
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def folder(tmp_path):
    """A folder, its model, and a function that writes its tensors anew."""
    gpt = tiny()
    gpt.save_pretrained(tmp_path)
    return tmp_path


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")


def refused(folder, *words):
    with pytest.raises(CheckpointError, match=r"^\[from_pretrained\] .*; got ") as error:
        GPT.from_pretrained(folder)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
    return text


# --- sizes ----------------------------------------------------------------------------------------------------------

def test_b46_presets_have_gpt2s_parameter_counts():
    counts = {"gpt2": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200}
    for name, count in counts.items():
        assert GPTConfig.preset(name).num_parameters() == getattr(GPTConfig, name)().num_parameters() == count


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"output_projection": False}, {"n_layer": 3, "n_head": 4}])
def test_the_formula_counts_what_is_there(changes):
    gpt = tiny(**changes)
    assert gpt.cfg.num_parameters() == gpt.num_parameters() == sum(p.size for p in gpt.parameters())


# --- weights --------------------------------------------------------------------------------------------------------

def test_b74_conv1d_weights_are_not_transposed(folder):
    """A square c_proj would load without a shape error: x = [1, 0] must give the first row."""
    gpt = GPT(GPTConfig(3, 4, 1, 1, 2))
    gpt.save_pretrained(folder)
    tensors = tensors_of(folder)
    tensors["transformer.h.0.attn.c_proj.weight"] = np.array([[1, 2], [3, 4]], np.float32)
    tensors["transformer.h.0.attn.c_attn.weight"] = np.arange(12, dtype=np.float32).reshape(2, 6)
    save_file(tensors, folder / "model.safetensors")
    attention = GPT.from_pretrained(folder).h[0].attn
    assert array(attention.c_proj([[1.0, 0.0]])).tolist() == [[1, 2]]
    assert [array(c.weight).tolist() for c in (attention.c_q, attention.c_k, attention.c_v)] == [
        [[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]  # fmt: skip


def test_b72_half_precision_is_widened_exactly_and_double_rounded_to_nearest(folder):
    halves = np.array([0x3F80, 0xC049, 0x0001, 0xFF80, 0x7FC0], np.uint16)
    floats = np.array([0x3C00, 0xC248, 0x0001, 0x7BFF, 0x7C00, 0x8000], np.uint16).view(np.float16)
    doubles = np.array([0.1, 1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-40, 1e-45, 1e39, -0.0])
    write(folder / "x", {"b": halves, "h": floats, "d": doubles}, {"b": "BF16"})
    file = tensor_file.TensorFile(folder / "x")
    read = {name: np.concatenate([rows for _, rows in file.blocks(name)]) for name in "bhd"}
    file.close()
    assert read["b"].view(np.uint32).tolist() == [0x3F800000, 0xC0490000, 0x00010000, 0xFF800000, 0x7FC00000]
    assert read["h"][:4].tolist() == [1.0, -3.140625, 5.9604644775390625e-08, 65504.0]
    assert read["h"][4] == np.inf and np.signbit(read["h"][5]) and read["h"][5] == 0
    assert read["d"].tolist()[:4] == [np.float32(0.1), 1.0, 1 + 2.0**-23, 2.0**-149] and read["d"][4] == np.inf
    assert np.signbit(read["d"][5])


@pytest.mark.parametrize("kind", ["F16", "BF16", "F64", "F32"])
def test_f8_sources_of_every_precision(kind, folder):
    tensors = tensors_of(folder)
    make = {"F16": np.float16, "F64": np.float64, "F32": np.float32}
    stored = {n: bfloat16(a) if kind == "BF16" else a.astype(make[kind]) for n, a in tensors.items()}
    write(folder / "model.safetensors", stored, dict.fromkeys(stored, kind))
    gpt = GPT.from_pretrained(folder)
    expected = stored["transformer.h.1.mlp.c_fc.weight"]
    same_bits(gpt.h[1].mlp.c_fc.weight, tensor_file.widened(expected))
    same_bits(gpt.wte.weight, tensor_file.widened(stored["transformer.wte.weight"]))


def test_b72_other_types_matter_only_where_they_are_needed(folder):
    tensors = tensors_of(folder)
    buffers = {f"transformer.h.{i}.attn.bias": np.ones((1, 1, 8, 8), np.uint8) for i in range(2)}
    buffers |= {"transformer.h.0.attn.masked_bias": np.array(-1e4), "h.1.attn.masked_bias": np.array(5)}
    write(folder / "model.safetensors", tensors | buffers, {"transformer.h.0.attn.bias": "F8_E5M2"})
    same_model(GPT.from_pretrained(folder), tiny())
    tensors["transformer.ln_f.bias"] = np.zeros(12, np.int64)
    write(folder / "model.safetensors", tensors)
    refused(folder, "ln_f.bias", "'I64'", "F32, F16, F64, BF16")


def test_a_large_tensor_is_read_in_blocks(folder, monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK", 100)  # two rows of 48 bytes; one of 144 or 192
    same_model(GPT.from_pretrained(folder), tiny())


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("head", ["", "lm_head.weight"])
def test_b46_prefix_and_tied_head_may_be_there_or_not(prefix, head, folder):
    tensors = {prefix + name.removeprefix("transformer."): a for name, a in tensors_of(folder).items()}
    if head:
        tensors[head] = tensors[f"{prefix}wte.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    gpt = GPT.from_pretrained(folder)
    same_model(gpt, tiny())
    assert gpt.num_parameters() == tiny().num_parameters()
    if head:
        tensors[head][10, 11] += 1
        save_file(tensors, folder / "model.safetensors")
        refused(folder, "lm_head.weight differs from wte.weight")


def test_padded_vocabularies_are_sizes_like_others(tmp_path):
    gpt = tiny(vocab_size=64)  # 11 tokens would do
    gpt.save_pretrained(tmp_path)
    assert GPT.from_pretrained(tmp_path).cfg.vocab_size == 64
    change_config(tmp_path, vocab_size=50)
    refused(tmp_path, "wte.weight has shape (64, 12), expected (50, 12)")


def test_f8_all_faults_are_one_error(folder):
    tensors = {name.removeprefix("transformer."): a for name, a in tensors_of(folder).items()}
    del tensors["h.0.ln_1.weight"], tensors["ln_f.bias"]
    tensors |= {"score.weight": np.zeros(3, np.float32), "wpe.weight": np.zeros((8, 13), np.float32)}
    tensors["h.1.mlp.c_fc.weight"] = tensors["h.1.mlp.c_fc.weight"].T.copy()
    tensors["transformer.wte.weight"] = tensors["wte.weight"]
    save_file(tensors, folder / "model.safetensors")
    text = refused(
        folder, "missing h.0.ln_1.weight", "missing ln_f.bias", "unknown 'score.weight'", "'wte.weight' twice",
        "wpe.weight has shape (8, 13), expected (8, 12)", "h.1.mlp.c_fc.weight has shape (48, 12), expected (12, 48)",
    )  # fmt: skip
    assert text.count(",") < 20 and "more" not in text
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    refused(folder, "missing wte.weight", "and 19 more")  # 28 missing, 1 unknown


def test_a_left_out_part_must_do_nothing_in_the_file(tmp_path):
    """Trained elsewhere, zeros and the identity have become something: to drop them would be another model."""
    for left_out, name in (("bias", "h.1.mlp.c_fc.bias"), ("output_projection", "h.0.attn.c_proj.weight")):
        gpt = tiny(**{left_out: False})
        gpt.save_pretrained(tmp_path)
        same_model(GPT.from_pretrained(tmp_path), gpt)
        tensors = tensors_of(tmp_path)
        tensors[f"transformer.{name}"].reshape(-1)[7] += 0.5
        save_file(tensors, tmp_path / "model.safetensors")
        refused(tmp_path, name, "cmha_bias or cmha_output_projection")
        change_config(tmp_path, cmha_bias=..., cmha_output_projection=...)
        assert GPT.from_pretrained(tmp_path).num_parameters() > gpt.num_parameters()


def test_a_left_out_part_may_be_left_out_of_the_file(tmp_path):
    gpt = tiny(bias=False)
    gpt.save_pretrained(tmp_path)
    tensors = {name: a for name, a in tensors_of(tmp_path).items() if not name.endswith("bias")}
    save_file(tensors, tmp_path / "model.safetensors")
    same_model(GPT.from_pretrained(tmp_path), gpt)
    change_config(tmp_path, cmha_bias=True)
    refused(tmp_path, "missing h.0.attn.c_attn.bias", "and 3 more")


def test_loading_draws_no_random_numbers(folder):
    cmha.manual_seed(5)
    expected = array(cmha.randn(3))
    cmha.manual_seed(5)
    GPT.from_pretrained(folder)
    same_bits(cmha.randn(3), expected)


def test_saving_over_the_folder_it_came_from(folder):
    """F10."""
    gpt = GPT.from_pretrained(folder)
    gpt.save_pretrained(folder)
    same_model(GPT.from_pretrained(folder), tiny())


def test_f10_a_reader_beside_a_writer_sees_the_old_model_or_the_new(tmp_path):
    models = [tiny(seed) for seed in (0, 1)]
    models[0].save_pretrained(tmp_path)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for model in models:
                model.save_pretrained(tmp_path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        tables = [array(GPT.from_pretrained(tmp_path).state_dict()["ln_f.bias"]).tolist() for _ in range(60)]
    finally:
        stop.set()
        writer.join()
    known = [array(model.ln_f.bias).tolist() for model in models]
    assert all(table in known for table in tables)


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc, which tells the peak of memory")
def test_loading_holds_no_second_copy(tmp_path):
    """Peak memory of a process that loads 100 MB of weights: those, the imports, and less than a third more."""
    GPT(GPTConfig(20_000, 64, 2, 4, 1024)).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    code = "import cmha, sys\npeak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    code += "before = peak(); cmha.GPT.from_pretrained(sys.argv[1]); print((peak() - before) * 1024)"
    run = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, check=True, text=True)
    assert size < int(run.stdout) < 1.33 * size


# --- shards ---------------------------------------------------------------------------------------------------------

def shard(folder, n=3, **changes):
    """Cuts model.safetensors into n files with an index; changes are merged into the index."""
    tensors, places = tensors_of(folder), {}
    (folder / "model.safetensors").unlink()
    for i in range(n):
        name = f"model-{i + 1:05}-of-{n:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::n]}
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(a.nbytes for a in tensors.values())}, "weight_map": places} | changes
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return index


def change_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def test_shards_are_one_model(folder):
    shard(folder)
    same_model(GPT.from_pretrained(folder), tiny())
    assert len(list(folder.glob("*.safetensors"))) == 3


OUTSIDE = ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..", ".", "", "..\\x.safetensors",
           "x\0.safetensors", "sub/x.safetensors", "pytorch_model.bin", 5, None, ["x.safetensors"]]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_f8_no_name_in_an_index_leaves_the_folder(name, folder):
    index = shard(folder)
    save_file(tensors_of_shards(folder), folder.parent / "x.safetensors")
    index["weight_map"]["transformer.wte.weight"] = name
    change_index(folder, index)
    refused(folder, "plain names", "model.safetensors.index.json")


def tensors_of_shards(folder):
    return {name: a for path in sorted(folder.glob("model-*")) for name, a in load_file(path).items()}


def test_an_index_and_its_files_must_agree(folder):
    index = shard(folder)
    moved = json.loads(json.dumps(index))
    first, second = sorted(set(moved["weight_map"].values()))[:2]
    places = moved["weight_map"]
    places["transformer.wte.weight"] = second if places["transformer.wte.weight"] == first else first
    places["transformer.extra"] = first
    change_index(folder, moved)
    refused(folder, "no 'transformer.extra' in model-00001", "no 'transformer.wte.weight' in", "not in the index")
    change_index(folder, index | {"metadata": {"total_size": 5}})
    refused(folder, "metadata.total_size=5, expected")
    for broken in ({"weight_map": []}, {"metadata": 3, "weight_map": {}}, {}, {"weight_map": None}):
        change_index(folder, broken)
        refused(folder, "weight_map")
    change_index(folder, {"weight_map": {}})
    refused(folder, "missing wte.weight", "and 18 more")
    change_index(folder, index)
    (folder / second).unlink()
    with pytest.raises(FileNotFoundError, match=second):
        GPT.from_pretrained(folder)


# --- config.json ----------------------------------------------------------------------------------------------------

REFUSED = {
    "model_type": ["llama", 3, None], "activation_function": ["relu", "gelu", None],
    "layer_norm_epsilon": [1e-6, "1e-5"],
    "scale_attn_weights": [False, 1], "scale_attn_by_inverse_layer_idx": [True, 0], "reorder_and_upcast_attn": [True],
    "add_cross_attention": [True], "tie_word_embeddings": [False], "quantization_config": [{"bits": 4}],
    "auto_map": [{"AutoModel": "code.py"}], "pruned_heads": [{"0": [1]}], "n_inner": [47, "48", True],
    "vocab_size": [..., 0, -1, 11.0, "11", True, None, [11]], "n_positions": [..., 0, 2**62], "n_layer": [1, 3, 10**9],
    "n_head": [5, 0, True], "n_embd": [13, 24], "resid_pdrop": ["0.1", 1, -0.1, None, True], "attn_pdrop": [[], 1.5],
    "hidden_size": [13], "num_attention_heads": [3], "cmha_bias": [1, None], "cmha_output_projection": ["yes"],
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_f6_a_configuration_that_cannot_be_honoured_names_the_key(key, folder):
    before = (folder / "config.json").read_bytes()
    for value in REFUSED[key]:
        (folder / "config.json").write_bytes(before)
        change_config(folder, **{key: value})
        if key == "n_layer" and value in (1, 3):
            refused(folder, "h.1." if value == 1 else "h.2.")
        elif key in ("n_positions", "n_embd") and value in (2**62, 24):
            refused(folder, "has shape")
        else:
            refused(folder, {"hidden_size": "n_embd", "num_attention_heads": "n_head"}.get(key, key), "config.json")


def test_f6_all_faults_of_a_configuration_are_one_error(folder):
    change_config(folder, n_head=5, activation_function="relu", vocab_size=...)
    refused(folder, "n_head=5", "activation_function='relu'", "no vocab_size")


def test_other_keys_are_not_read(folder):
    change_config(folder, activation_function="gelu_pytorch_tanh", n_inner=48, hidden_size=12)
    change_config(folder, task_specific_params={"x": [1]}, note="mine", n_ctx=8, eos_token_id=[1, 2], dtype="bfloat16")
    same_model(GPT.from_pretrained(folder), tiny())


def test_dropout_rates_that_differ_are_said(folder):
    change_config(folder, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    assert GPT.from_pretrained(folder).cfg.dropout == 0.1
    change_config(folder, attn_pdrop=0.2)
    with pytest.warns(UserWarning, match="dropout") as caught:
        assert GPT.from_pretrained(folder).cfg.dropout == 0
    assert caught[0].filename == __file__


# --- folders --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["pytorch_model.bin", "ckpt.pt", "model.pth"])
def test_f9_pickles_are_refused_with_the_way_out(name, tmp_path):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    refused(tmp_path, repr(name), "docs/bring-your-gpt2.md", "cmha convert")
    refused(tmp_path / name, repr(name), "docs/bring-your-gpt2.md")


def test_what_is_no_folder_of_a_model_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing is downloaded.*gpt2"):
        GPT.from_pretrained(tmp_path / "gpt2")
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        GPT.from_pretrained(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        GPT.from_pretrained(tmp_path / "file")
    tiny().save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        GPT.from_pretrained(tmp_path)


@needs_posix
def test_f10_folders_and_files_of_every_kind(tmp_path):
    odd = tmp_path / "a b" / "\u00e9\u4e2d"
    gpt = tiny()
    gpt.save_pretrained(odd)  # made, with the one above it
    (tmp_path / "link").symlink_to(odd, target_is_directory=True)
    same_model(GPT.from_pretrained(str(tmp_path / "link")), gpt)
    (odd / "blob").write_bytes((odd / "model.safetensors").read_bytes())
    (odd / "model.safetensors").unlink()
    (odd / "model.safetensors").symlink_to("blob")  # as a hub's cache has it
    same_model(GPT.from_pretrained(odd), gpt)
    (odd / "model.safetensors").unlink()
    os.mkfifo(odd / "model.safetensors")
    with pytest.raises(CheckpointError, match="regular file"):
        GPT.from_pretrained(odd)  # and does not wait for a writer
    (odd / "model.safetensors").unlink()
    (odd / "model.safetensors").mkdir()
    with pytest.raises(IsADirectoryError):
        GPT.from_pretrained(odd)

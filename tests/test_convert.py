"""cmha convert: llm.c's model files."""

import numpy as np
import pytest

from cmha import GPT, CheckpointError, cli, no_grad
from cmha.gpt import layout
from cmha.gpt.llmc import read_llmc

from .checking import array, same_bits
from .models import bfloat16, ids, same_model, tiny


def write_llmc(path, gpt, version=3, padded=16, **header):
    """llm.c's own order, from the model's tensors: (out, in), all layers of a kind together."""
    tensors = {name: a for name, a in layout.tensors(gpt)}
    cfg, kinds = gpt.cfg, ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    table = np.full((padded, cfg.n_embd), 99, np.float32)
    table[: cfg.vocab_size] = tensors["wte.weight"]
    parts = [table, tensors["wpe.weight"]]
    for kind in kinds:
        parts += [tensors[f"h.{i}.{kind}.weight"].T for i in range(cfg.n_layer)]
        parts += [tensors[f"h.{i}.{kind}.bias"] for i in range(cfg.n_layer)]
    parts += [tensors["ln_f.weight"], tensors["ln_f.bias"]]
    values = {"magic": 20240326, "kind": version, "T": cfg.block_size, "V": cfg.vocab_size, "L": cfg.n_layer,
              "H": cfg.n_head, "C": cfg.n_embd, "Vp": padded} | header  # fmt: skip
    start = np.zeros(256, np.int32)
    start[:8] = list(values.values())
    flat = np.concatenate([np.ascontiguousarray(a).reshape(-1) for a in parts])
    path.write_bytes(start.tobytes() + (flat if version == 3 else bfloat16(flat)).tobytes())


@pytest.mark.parametrize("version", [3, 5])
def test_convert_reads_llmcs_models(version, tmp_path, capsys):
    gpt, path = tiny(n_layer=3), tmp_path / "model.bin"
    write_llmc(path, gpt, version)
    assert cli.main(["convert", str(path), str(tmp_path / "out")]) == 0
    assert "vocabulary 11" in capsys.readouterr().out
    again = GPT.from_pretrained(tmp_path / "out")
    if version == 3:
        same_model(again, gpt)
        with no_grad():
            same_bits(again(ids(2, 8)), gpt(ids(2, 8)))
    for (name, p), q in zip(again.named_parameters(), gpt.parameters(), strict=True):
        assert bfloat16(array(p)).tolist() == bfloat16(array(q)).tolist(), name
    assert cli.main(["convert", str(path), str(tmp_path / "out")]) == 1
    assert "a model is there already" in capsys.readouterr().err


def test_convert_refuses_what_is_no_model_of_llmc(tmp_path, capsys):
    path, gpt = tmp_path / "model.bin", tiny()
    write_llmc(path, gpt)
    whole = path.read_bytes()
    bad = {"size": [whole[:-1], whole + b"\0", whole[:1024]], "llm.c": [b"", whole[:3], whole[:1023], b"PK\3\4" * 500]}
    for word, contents in bad.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match=rf"^\[convert\] .*{word}.*model\.bin"):
                read_llmc(path)
    headers = {"version": {"kind": 1}, "padded": {"Vp": 10}, "n_head": {"H": 5}, "n_layer": {"L": -1},
               "size": {"L": 2**31 - 1}, "vocab_size": {"V": 0}}  # fmt: skip
    for word, header in headers.items():
        write_llmc(path, gpt, **header)
        with pytest.raises(CheckpointError, match=word):
            read_llmc(path)
    assert cli.main(["convert", str(path), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("cmha: error: [convert] ") and not (tmp_path / "out").exists()

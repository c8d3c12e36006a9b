"""Every example runs, with warnings as errors, and prints what it claims."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cmha import GPT, CharTokenizer, GPTConfig
from cmha.text.corpora import default_text

EXAMPLES = Path(__file__).parent.parent / "examples"
SHORT = {"heads_4_to_8.py": ["12"], "without_c_proj.py": ["12"], "what_the_cache_saves.py": ["20"]}


def call(name, *arguments):
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def run(name, *arguments):
    result = call(name, *SHORT.get(name, []), *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.mark.parametrize("name", ["heads_4_to_8.py", "without_c_proj.py"])
def test_comparison_prints_a_finite_row_for_each_variant(name):
    rows = [line for line in run(name).splitlines() if re.search(r"\d\.\d{4} ", line)]
    assert len(rows) == 2
    parameters, losses = [], []
    for row in rows:
        count, training_loss, validation_loss, _ = row.split()[-4:]
        parameters.append(int(count.replace(",", "")))
        losses += [float(training_loss), float(validation_loss)]
    assert all(0 < loss < 6 for loss in losses)
    if name == "heads_4_to_8.py":
        assert parameters[0] == parameters[1]
    else:
        assert parameters[0] - parameters[1] == 2 * (64 * 64 + 64)  # c_proj of two layers


def test_owners_are_printed_beside_the_wrong_reshape():
    output = run("who_owns_what.py")
    right, wrong = {}, {}
    for line in output.splitlines()[-4:]:
        head, *owners = line.split()
        right[head], wrong[head] = owners[:3], owners[3:]
    assert right["0"] == ["b0t0h0", "b0t1h0", "b0t2h0"]
    assert wrong["0"] == ["b0t0h0", "b0t0h1", "b0t1h0"]  # head 0 got a part of head 1, and never token 2
    assert right["3"] == ["b1t0h1", "b1t1h1", "b1t2h1"]
    assert len(re.findall(r"b\dt\dh\dd\d", output)) == 5 * 48  # every element, at every stage


def test_cache_saves_multiplications_and_not_one_bit():
    output = run("what_the_cache_saves.py")
    without, with_cache = (int(re.search(rf"{word} +([\d,]+)", output)[1].replace(",", "")) for word in ("no", "yes"))
    assert without > 5 * with_cache
    assert "same bits in every logit: True" in output


def test_lesson_claims_hold():
    output = run("lesson_claims.py")
    assert output.count("same bits True") == 3
    assert "8 tensors, 624 numbers" in output
    changes = [float(value) for value in re.findall(r"head \d: largest change ([\d.]+)", output)]
    assert changes[0] == changes[2] == 0 < changes[1]
    moved = re.findall(r"(\S+) +moved by (\S+), gradient (\S+)", output)
    assert [name for name, _, _ in moved] == [
        f"{layer}.{kind}" for layer in ("c_q", "c_k", "c_v", "c_proj") for kind in ("weight", "bias")
    ]
    assert all(float(distance) > 0 for _, distance, _ in moved)


def test_the_head_that_looks_back_is_found(tmp_path):
    """In a model whose layer 1, head 1 does so by construction."""
    text = default_text()
    tokenizer = CharTokenizer(text)
    gpt = GPT(GPTConfig(tokenizer.vocab_size, 16, 2, 2, 32))
    state = {name: np.array(tensor) for name, tensor in gpt.state_dict().items()}
    state["wte.weight"] *= 0
    state["wpe.weight"] = 5 * np.eye(16, 32, dtype=np.float32)
    state["h.1.attn.c_q.weight"][:, 16:] = 20 * np.eye(32, 16, k=-1)  # the query of position t is that of key t - 1
    state["h.1.attn.c_k.weight"][:, 16:] = 20 * np.eye(32, 16)
    gpt.load_state_dict(state)
    gpt.save_pretrained(str(tmp_path))
    tokenizer.save(str(tmp_path))
    output = run("previous_token_head.py", str(tmp_path))
    assert "layer 1, head 1 looks at the token before" in output
    rows = re.findall(r"^ +(\d) +(\d) +([\d.]+) +(\d+)% +([+-][\d.]+)$", output, re.MULTILINE)
    assert len(rows) == 4
    for layer, head, mean, largest, _ in rows:
        assert (float(mean) > 0.95 and largest == "100") == ((layer, head) == ("1", "1"))
    assert len(re.findall(r"^\S+ @|^\S+ *@$", output, re.MULTILINE)) >= 10  # the diagonal of the map


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("previous_token_head.py", []),
        ("previous_token_head.py", ["a", "b"]),
        *(("heads_4_to_8.py", [text]) for text in ("0", "-3", "1.5", "\u0663", "9" * 5000)),
        ("without_c_proj.py", ["many"]),
        ("what_the_cache_saves.py", ["3", "4"]),
        ("what_the_cache_saves.py", ["2001"]),
        ("who_owns_what.py", ["x"]),
        ("lesson_claims.py", ["x"]),
    ],
)
def test_a_wrong_argument_is_one_line_of_usage(name, arguments):
    done = call(name, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("usage: python ") and done.stderr.count("\n") == 1 and name in done.stderr


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for folder in (tmp_path / "nonexist", tmp_path):
        done = call("previous_token_head.py", str(folder))
        assert done.returncode == 1 and done.stdout == ""
        assert "error: " in done.stderr and done.stderr.count("\n") == 1 and str(folder.name) in done.stderr


def test_every_example_is_short_and_tested():
    source = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 80, path
        assert path.name == "learn.py" or f'"{path.name}"' in source, f"{path.name} has no test"

"""The command line: what is refused and how, exit codes, pipes, signals, locales."""

import inspect
import io
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import cmha
from cmha.cli import main
from cmha.generate import generate, stream
from cmha.train.checkpoint import newest

from .checking import needs_linux, needs_posix

TEXT = "the cat sat on the mat, and the dog did not. caf\u00e9 \u201cyes\u201d\n" * 30
SIZES = ["--n-layer", "1", "--n-embd", "8", "--n-head", "2", "--block-size", "12"]
SMALL = ["--steps", "4", "--eval-interval", "2", *SIZES]


def command(*arguments, **options):
    environment = os.environ | options.pop("env", {})
    return subprocess.Popen([sys.executable, "-m", "cmha", *map(str, arguments)], env=environment, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a short run."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    assert main(["train", str(folder / "a.txt"), "--out", str(folder / "run"), *SMALL]) == 0
    return folder / "run"


def refused(capsys, code, *arguments):
    """The one line that a failing call ends with."""
    assert main(list(map(str, arguments))) == code
    captured = capsys.readouterr()
    *progress, line = captured.err.splitlines()
    assert line.startswith("cmha: error: ") and captured.out == "" and "Traceback" not in captured.err
    assert not any("error" in text for text in progress)
    return line


@pytest.mark.parametrize(
    "arguments",
    [
        "train --steps 1e3", "train --steps 0", "train --steps -5", "train --steps 2.0", "train --steps 1_000",
        "train --lr abc", "train --lr 0", "train --lr nan", "train --lr inf", "train --n-head 0", "train --dropout 1",
        "train --heads 0", "train --step 5", "train --steps 5 --steps 6", "train --preset huge", "train --seed -1",
        "train --no-output-projection False", "train --no-output-projection 0", "train --no-output-projection no",
        "train --no-output-projection=false", "train --output-projection=False", "train --threads 2000", "train --out",
        "train --n-head 7", "train --min-lr 1", "train --warmup-steps 9 --steps 8", "train --vocab-size 300",
        "train --init x", "train --debug=1", "train --resume=x --out y", "train --init . --n-layer 3",
        "train --init . --tokenizer char", "train --init . --no-output-projection", "train --grad-accumulation 3",
        "train --grad-accumulation 2 --micro-batch-size 3 --batch-size 8", "train --micro-batch-size 9",
        "train --schedule linear", "train --decay-steps 5", "train --overfit-one-batch=no", "train --sample-interval 0",
        "train --schedule wsd --steps 9 --decay-steps 10", "train --resume --resume",
        "generate", "generate x --temperature -1", "generate x --top-k 0", "generate x --top-p 0", "generate x y",
        "generate x --num-beams 2 --top-k 3", "generate x --length-penalty 2", "generate x --min-p 2",
        "generate x --stop=", "score", "score x", "score x y --stride 0",
        "generate x --max-new-tokens -1", "generate x --seed 1.5", "generate x --seed 1,", "generate x --seed 1,2",
        "generate x --prompt a --prompt b --seed 1 --seed 2,3", "generate x --num-beams 2 --length-penalty -1e3",
        "trace --n-head 7", "trace --json=True", "trace --json False --n-embd 8", "trace x --n-head 2",
        "tokenize", "tokenize x", "tokenize x --out y", "tokenize x --out y.safetensors --tokenizer z",
        "tokenize x --out y.safetensors --vocab-size 300", "plot", "plot x --out y.pdf", "plot x --out",
        "heads x text --out .html", "heads x text --out y/.png", "plot x --out .svg", "trace --picture .svg",
        "tokenize x --out .safetensors", "train -",
        "info x", "nonsense", "--nonsense",
    ],
)  # fmt: skip
def test_b83_wrong_usage_is_one_line_and_exit_code_2(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(capsys, 2, *arguments.split())
    assert os.listdir(tmp_path) == []


def test_a_value_out_of_range_is_told_the_range(capsys):
    for value in (2**63, 10**40, "9" * 5000):
        assert f"must be an integer from 0 to {2**63 - 1}; got " in refused(capsys, 2, "train", "--seed", value)
    assert "must be an integer of at least 0; got '-1'" in refused(capsys, 2, "train", "--seed=-1")
    for value in ("inf", "0", "nan"):
        assert "must be a finite number above 0" in refused(capsys, 2, "train", "--lr", value)


def test_b83_empty_values(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in ([""], ["--out", ""], ["--no-output-projection", ""], ["--lr", ""], ["--tokenizer", ""]):
        refused(capsys, 2, "train", *arguments)
    refused(capsys, 2, "generate", "x", "--prompt", "")
    assert os.listdir(tmp_path) == []


def test_what_a_file_holds_is_exit_code_1(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_text("too short")
    assert "No such file" in refused(capsys, 1, "train", "missing.txt")
    assert "0xff at offset 3" in refused(capsys, 1, "train", "bad.txt")
    assert "empty" in refused(capsys, 1, "train", "empty.txt")
    assert "validation split" in refused(capsys, 1, "train", "short.txt", "--block-size", "4")
    for name in ("generate", "trace"):
        assert refused(capsys, 1, name, "missing") == "cmha: error: no such run: 'missing'"
        assert "not a run: 'short.txt' is not a folder" in refused(capsys, 1, name, "short.txt")
        assert "holds no config.json" in refused(capsys, 1, name, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["bad.txt", "empty.txt", "short.txt"]


@pytest.mark.parametrize("sizes", ["--batch-size 999999999", "--n-embd 4000000 --n-head 1", "--n-layer 99999999"])
def test_what_cannot_fit_in_memory_is_refused_before_it_is_made(run, sizes, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, 1, "train", run.parent / "a.txt", "--steps", 1, *sizes.split())
    assert "GiB" in line and os.listdir(tmp_path) == []


def test_run_folder(run, capsys):
    assert sorted(os.listdir(run)) == [
        "checkpoints", "config.json", "log.jsonl", "model.safetensors", "tokenizer_cmha.json",
    ]  # fmt: skip
    assert sorted(os.listdir(run / "checkpoints")) == ["step-2.safetensors", "step-4.safetensors"]
    assert {json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()} == {2, 4}
    before = {name: (run / name).read_bytes() for name in os.listdir(run) if name != "checkpoints"}
    line = refused(capsys, 1, "train", run.parent / "a.txt", "--out", run, *SMALL)
    assert "must not hold a run" in line
    assert before == {name: (run / name).read_bytes() for name in before}


def test_runs_are_numbered_and_printed_last(run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = run.parent / "a.txt"
    for number in ("001", "002"):
        assert main(["train", *SMALL, str(text), "--seed", "3"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"runs/{number}"
    models = {(tmp_path / "runs" / number / "model.safetensors").read_bytes() for number in ("001", "002")}
    assert len(models) == 1 and (run / "model.safetensors").read_bytes() not in models


def test_files_between_options_and_a_tokenizer_of_a_run(run, capsys, tmp_path):
    text = run.parent / "a.txt"
    other = tmp_path / "b.txt"
    other.write_bytes("\ufeff".encode() + b"cat\r\n" * 20)
    out = tmp_path / "out"
    assert main(["train", str(text), *SMALL, "--tokenizer", str(run), str(other), "--out", str(out)]) == 0
    assert (out / "tokenizer_cmha.json").read_bytes() == (run / "tokenizer_cmha.json").read_bytes()
    other.write_text("\u20ac" * 99, encoding="utf-8")
    capsys.readouterr()
    line = refused(capsys, 1, "train", other, *SMALL, "--tokenizer", run, "--out", tmp_path / "no")
    assert "'\u20ac' at position 0" in line and not (tmp_path / "no").exists()


def test_generate_continues_the_prompt(run, capsys):
    assert main(["generate", str(run), "--prompt", "the cat", "--max-new-tokens", "25", "--seed", "5"]) == 0
    first = capsys.readouterr()
    assert first.out.startswith("the cat") and len(first.out) == 7 + 25 + 1 and first.err == ""
    assert main(["generate", str(run), "--prompt", "the cat", "--max-new-tokens", "25"]) == 0
    drawn = capsys.readouterr()
    word, seed = drawn.err.split()
    assert word == "seed"
    assert main(["generate", str(run), "--prompt", "the cat", "--max-new-tokens", "25", "--seed", seed]) == 0
    assert capsys.readouterr().out == drawn.out
    assert main(["generate", str(run), "--prompt", "a\u20acb"]) == 1
    (line,) = capsys.readouterr().err.splitlines()  # no seed before it
    assert "'\u20ac' at position 1" in line


def test_generate_with_every_option(run, tmp_path, capsys, monkeypatch):
    options = ["--max-new-tokens", "30", "--seed", "3"]

    def said(*more):
        assert main(["generate", str(run), *options, *map(str, more)]) == 0
        return capsys.readouterr().out

    free = said("--prompt", "the cat")
    stop = free[12:14]
    cut = said("--prompt", "the cat", "--stop", "no such text", "--stop", stop)
    assert free.startswith(cut[:-1]) and cut[:-1] == free[: free.index(stop, 7)]
    filters = ["--top-k", 3, "--min-p", "0.1", "--top-p", "0.9", "--repetition-penalty", "1.3", "--temperature", "0.9"]
    assert len(said("--prompt", "the cat", *filters)) == 7 + 30 + 1
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"the cat")
    assert said("--prompt-file", file) == free
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the cat")))
    assert said("--prompt-file", "-") == free
    several = said("--prompt", "the cat", "--prompt", "a")
    assert several.startswith(free + "-" * 40 + "\na") and len(several) == len(free) + 41 + 1 + 30 + 1
    first = json.loads((run / "tokenizer_cmha.json").read_text())["characters"].index(free[7])
    lines = said("--prompt", "the cat", "--logprobs").splitlines()
    assert len(lines) == 30 and lines[0].split("\t")[0] == str(first) and float(lines[0].split("\t")[1]) < 0
    assert len(said("--prompt", "the cat", "--prompt", "a cat s", "--logprobs", "--stop-id", first).splitlines()) < 60
    assert said("--prompt", "the cat", "--stop-id", first) == "the cat\n"
    options[2:] = []
    assert said("--prompt", "the cat", "--num-beams", 3) == said("--prompt", "the cat", "--num-beams", 3)
    assert "no such file" in refused(capsys, 1, "generate", run, "--prompt-file", tmp_path / "no").lower()
    file.write_bytes(b"")
    assert "at least one character" in refused(capsys, 1, "generate", run, "--prompt-file", file)


def test_score(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 4, encoding="utf-8")
    found = []
    for stride in ([], ["--stride", "1"], ["--stride", "12"]):
        assert main(["score", str(run), str(text), *stride]) == 0
        captured = capsys.readouterr()
        lines = dict(line.rsplit("  ", 1) for line in captured.out.splitlines())
        assert [name.strip() for name in lines] == ["perplexity", "bits per byte", "tokens"] and captured.err == ""
        found.append(float(lines[next(iter(lines))]))
    assert 1 < min(found) and len(set(found)) == 3
    tokenizer, gpt = cmha.CharTokenizer.load(run), cmha.GPT.from_pretrained(run)
    expected = np.exp(-gpt.score(tokenizer.encode(text.read_text()), stride=1).mean(dtype=np.float64))
    assert abs(found[1] - expected) < 1e-4 * expected
    assert "from 1 to 12; got 13" in refused(capsys, 1, "score", run, text, "--stride", 13)
    text.write_text("t", encoding="utf-8")
    assert "at least two tokens; got 1" in refused(capsys, 1, "score", run, text)
    assert "no such run" in refused(capsys, 1, "score", tmp_path / "no", text)


def test_options_of_generating_are_named_in_full():
    for function in (generate, stream):
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) .*'top_q'"):
            function(None, [[0]], 3, top_q=1)
        names = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
        names += ["stop", "stop_strings", "tokenizer", "seed"]
        names += ["num_beams", "length_penalty"] if function is generate else []
        more = ["progress"] if function is generate else []
        assert inspect.getfullargspec(function).kwonlyargs == [*names, "return_logprobs", "cache", *more]


def test_trace(run, capsys):
    assert main(["trace", "--json", "--n-embd", "6", "--n-head", "3", "--batch-size", "2", "--block-size", "5"]) == 0
    traced = json.loads(capsys.readouterr().out)
    assert traced["config"] == {"n_embd": 6, "n_head": 3, "head_dim": 2, "batch_size": 2, "block_size": 5}
    numbers = [step["step"] for step in traced["steps"]]
    assert numbers == sorted(numbers) and set(numbers) == set(range(1, 9))
    assert main(["trace", str(run), "--batch-size", "3"]) == 0
    out = capsys.readouterr().out
    assert "(3, 12, 8)" in out and "view" in out and "copy" in out
    assert main(["trace", str(run), "--block-size", "5"]) == 0 and "(8, 5, 8)" in capsys.readouterr().out
    assert "got 13, expected at most 12" in refused(capsys, 1, "trace", run, "--block-size", 13)


def test_info_version_and_help(capsys):
    assert main(["info"]) == 0 and "threads" in capsys.readouterr().out
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("cmha ")
    assert main([]) == 0 and "cmha train" in capsys.readouterr().out
    for name in ("train", "generate", "trace", "info"):
        assert main([name, "--help"]) == 0
        assert f"usage: cmha {name}" in capsys.readouterr().out


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        main(["train", str(tmp_path / "missing"), "--debug"])


@needs_linux
def test_p7_a_reader_that_leaves_ends_it_silently(run):
    with command("generate", run, "--max-new-tokens", 5000, "--seed", 1, stdout=-1, stderr=-1) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141
    with open("/dev/full", "wb") as full:
        with command("generate", run, "--max-new-tokens", 3, "--seed", 1, stdout=full, stderr=-1) as process:
            error = process.stderr.read().decode()
    assert process.returncode == 1 and error.count("\n") == 1 and error.startswith("cmha: error: No space left")


@pytest.mark.parametrize("arguments", [["info"], ["--help"], ["train"]])
def test_what_fails_while_the_package_is_imported_is_one_line(arguments, tmp_path):
    script = tmp_path / "cmha"  # as pip writes it
    script.write_text("import sys\nfrom cmha.cli import main\nsys.exit(main())\n")
    for program in (["-m", "cmha"], ["-mcmha"], [script]):
        environment = os.environ | {"CMHA_SIMD": "foo"}
        program = [sys.executable, *program, *arguments]
        process = subprocess.run(program, env=environment, capture_output=True, text=True)
        assert process.returncode == 2 and process.stdout == ""
        assert process.stderr.startswith("cmha: error: [CMHA_SIMD] ") and process.stderr.count("\n") == 1


@needs_posix
def test_p5_ctrl_c_while_the_package_is_imported(tmp_path):
    program = [sys.executable, "-X", "importtime", "-m", "cmha", "train", "--out", tmp_path / "out"]
    with subprocess.Popen(program, stdout=-1, stderr=-1, text=True) as process:
        while "numpy" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        error = process.stderr.read()
    assert process.returncode == 130 and "Traceback" not in error and "ignored" not in error


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_p7_any_locale_takes_and_prints_any_text(run, locale):
    options = ["--prompt", "caf\u00e9", "--max-new-tokens", 40, "--seed", 1]
    process = command("generate", run, *options, env=locale, stdout=-1, stderr=-1)
    out, error = process.communicate()
    assert process.returncode == 0, error
    assert out.startswith((b"caf\xc3\xa9", b"caf\\xe9"))


def assert_saved(out):
    """The newest checkpoint is whole, and as far as the log is, or further."""
    logged = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    checkpoint, damaged = newest(out)
    assert damaged == [] and checkpoint.step >= logged[-1] and checkpoint.evaluated == logged[-2:]


@needs_posix
@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_p5_a_signal_saves_and_ends(run, name, code, tmp_path):
    out = tmp_path / "out"
    options = [*SIZES, "--steps", 10**6, "--eval-interval", 5, "--out", out]
    process = command("train", run.parent / "a.txt", *options, stdout=-1, stderr=-1)
    while process.poll() is None and not (out / "log.jsonl").exists():
        pass
    process.send_signal(getattr(signal, name))
    stdout, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert stdout.decode().splitlines() == ([] if name == "SIGHUP" else [str(out)]) and b"Traceback" not in error
    assert_saved(out)
    assert main(["generate", str(out), "--max-new-tokens", "2", "--seed", "1"]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a terminal of its own")
def test_p5_a_closed_terminal_saves_and_ends(run, tmp_path):
    out = tmp_path / "out"
    options = [*SIZES, "--steps", 10**6, "--eval-interval", 5, "--out", out]
    here, there = os.openpty()
    # a session of its own, with this terminal in control of it: its end is what a closed window is
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    program = [sys.executable, "-c", take, sys.executable, "-m", "cmha", "train", run.parent / "a.txt", *options]
    program = list(map(str, program))
    with subprocess.Popen(program, stdin=there, stdout=there, stderr=there, start_new_session=True) as process:
        os.close(there)
        while process.poll() is None and not (out / "log.jsonl").exists():
            os.read(here, 4096)
        os.close(here)
        assert process.wait(60) == 129
    assert_saved(out)


def test_a_run_that_ends_before_its_first_save_leaves_nothing(run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = run.parent / "a.txt"
    assert "finite" in refused(capsys, 1, "train", text, *SMALL, "--lr", "1e30")
    assert "finite" in refused(capsys, 1, "train", text, *SMALL, "--lr", "1e30", "--out", "a/b")
    monkeypatch.setattr("cmha.train.checkpoint.Checkpoint.save", lambda *_: 1 / 0)
    refused(capsys, 1, "train", text, *SMALL)
    assert os.listdir(tmp_path) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("kept")
    refused(capsys, 1, "train", text, *SMALL, "--out", "mine")
    assert os.listdir(tmp_path / "mine") == ["notes"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(text), *SMALL]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "runs/001"


@needs_posix
def test_a_closed_stdout_is_an_error(run):
    for arguments in (["generate", run, "--seed", "1"], ["info"], ["trace"]):
        program = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "cmha", *arguments]
        process = subprocess.run(list(map(str, program)), capture_output=True, text=True)
        assert (process.returncode, process.stderr) == (1, "cmha: error: stdout is closed\n")


@needs_linux
def test_help_that_cannot_be_written_is_no_success():
    for arguments in ([], ["train"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "cmha", *arguments, "--help"], stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert done.returncode == 1 and done.stderr.startswith("cmha: error:") and done.stderr.count("\n") == 1


def test_what_a_model_writes_does_not_steer_a_terminal(monkeypatch):
    from cmha.cli.options import for_screen

    text = "a\x1b[31m\x07\r\tb\n\x7f\x9b\u00e9"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert for_screen(text) == "a\u241b[31m\u2407\u240d\tb\n\u2421\ufffd\u00e9"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert for_screen(text) == text

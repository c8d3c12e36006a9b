"""The benchmark still runs: every kind of row on tiny sizes, and what it promises about results that differ."""

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from .checking import needs_posix

ROOT = Path(__file__).resolve().parent.parent
COMPARE = ROOT / "bench" / "compare.py"


@pytest.fixture
def bench(monkeypatch):
    """The modules of bench/ by name, as compare.py sees them."""
    monkeypatch.syspath_prepend(str(COMPARE.parent))
    import compare
    import measure
    import processes
    import rows
    import table

    yield {"compare": compare, "measure": measure, "processes": processes, "rows": rows, "table": table}
    for name in ("arguments", "compare", "measure", "processes", "rows", "table", "data", "machine", "whole"):
        sys.modules.pop(name, None)


def run(*options, **kwargs):
    command = [sys.executable, str(COMPARE), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


def test_smoke_compares_with_numpy(tmp_path):
    file = tmp_path / "out.json"
    names = ["matmul 17x23x29 nt", "softmax", "AdamW", "installed size"]
    only = [word for name in names for word in ("--only", name)]
    done = run("--smoke", "--peers", "numpy", "--json", str(file), *only)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text(encoding="utf-8"))
    assert [r["name"] for r in report["rows"]] == [
        "matmul 17x23x29 nt", "softmax 7x33", "softmax 7x33 fwd+bwd", "AdamW nano", "installed size"
    ]  # fmt: skip
    for result in report["rows"]:
        assert result["value"] > 0 and result["ratios"]["numpy"] > 0
        assert result["name"] in done.stdout
        assert result["kind"] != "time" or 0 <= result["differences"]["numpy"] < 1e-5
    assert "machine" in done.stdout and "NumPy" in done.stdout and "GFLOP/s" in done.stdout


def test_training_and_decoding_rows_run_without_peers():
    done = run("--smoke", "--peers", "cmha", "--only", "nano", "--only", "MHA")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout and "train step nano" in done.stdout


def test_every_op_has_data_work_and_a_smoke_row(bench):
    import data

    full, smoke = bench["rows"].full(), bench["rows"].smoke()
    assert {r.op for r in full} == {r.op for r in smoke}
    assert {r.op for r in full if r.kind in ("time", "memory")} == set(data.DATA) == set(data.WORK)
    for listed in (full, smoke):
        assert len({r.name for r in listed}) == len(listed)
    for row in smoke:
        if row.kind == "time":
            assert data.digest(data.make(row.op, row.sizes)) == data.digest(data.make(row.op, row.sizes))
            assert all(flops + size > 0 for flops, size in data.WORK[row.op](row.sizes))


def test_parameters_of_gpt2_are_counted():
    sys.path.insert(0, str(COMPARE.parent))
    try:
        import data
        import rows

        assert data.parameters(rows.MODELS["GPT-2 124M"]) == 124_439_808
    finally:
        sys.path.remove(str(COMPARE.parent))


def test_difference_sees_one_wrong_element(bench):
    difference = bench["measure"].difference
    a = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    b = a.copy()
    b[77] += 1
    assert difference([a], [a]) == 0 and difference([a], [b]) > 5e-3
    assert difference([a], [a[:-1]]) == np.inf and difference([a], [np.full_like(a, np.nan)]) == np.inf


def test_a_row_whose_results_differ_gets_no_ratio(bench, tmp_path):
    _, args = bench["compare"].parse(["--smoke"])
    sides, _, _ = bench["processes"].present([bench["processes"].Side(n, n) for n in ("cmha", "numpy")], 1)
    bar = bench["compare"].tqdm([], file=io.StringIO())
    judge = bench["measure"].Bench(sides, args, {"flops": 1e9, "bytes": 1e9}, bar, tmp_path)
    row = bench["rows"].Row("softmax 7x33", "softmax", {"m": 7, "n": 33}, bound=0.0)
    with judge.pool:
        result = judge.measure(row)
    bar.close()
    assert result.differences["numpy"] > 0 and not result.ratios and "numpy" in result.differs
    assert any("no ratio" in line for line in bench["table"].notes(result))


@pytest.mark.parametrize(("width", "style"), [(200, "full"), (90, "ratios"), (40, "paragraphs")])
def test_table_fits_the_terminal(bench, width, style):
    lines = []
    name, peers = "attention T 1024 fwd+bwd", ["numpy", "torch", "torch+malloc", "jax"]
    paper = bench["table"].Table([name], peers, True, lines.append, width)
    result = bench["measure"].Result(name, "time", 1.75, value=0.0123, share=0.61, reached=False)
    result.ratios, result.values = {"torch": 1.5, "torch+malloc": 12.34}, {"torch": 0.01845, "torch+malloc": 0.15}
    paper.head({"machine": "some CPU"})
    paper.row(result)
    assert paper.style == style and all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    assert "12.3 ms" in text and "61%" in text and "1.75 !" in text and "1.50" in text


MISTAKES = {
    "compare.py": {
        "--only nope": "no row contains 'nope'; there are: matmul 17x23x29; ",
        "--only ''": "no row contains ''; there are: matmul",
        "--list --only nope": "no row contains 'nope'; there are: ",
        "--peers bogus": "no such side: 'bogus'; there are: cmha, numpy, torch, torch+malloc, ",
        "--peers numpy,bogus --list": "no such side: 'bogus'",
        "--peers ''": "no such side: ''; there are: cmha, numpy",
        "--json {folder}/no/out.json": "no such folder: '{folder}/no'",
        "--json {folder}": "must be a file",
        "--plot {folder}/out.odd": "must end in .png, .svg, .pdf; got '{folder}/out.odd'",
        "--plot {folder}/no/out.png": "no such folder: '{folder}/no'",
        "--threads 0": "must be an integer above 0; got '0'",
        "--seconds nan": "must be a number above 0; got 'nan'",
        "--torch-python /nonexist": "no such program: '/nonexist'",
        "--jax-python {folder}": "no such program: '{folder}'",
        "--markdown {folder}/none.json": "--markdown needs what --json wrote: ",
        "--bogus": "unrecognized arguments: --bogus",
    },
    "growth.py": {
        "--plot {folder}/out.odd": "must end in .png, .svg, .pdf",
        "--plot {folder}/no/out.png": "no such folder",
        "--json {folder}/no/out.json": "no such folder",
        "--threads 0": "must be an integer above 0",
        "--threads two": "must be an integer above 0; got 'two'",
    },
    "king_james.py": {"none.txt": "no such file: 'none.txt'", "{folder}/text --steps 26": "a multiple of 25; got 26"},
    "scaling.py": {"--presets tiny,bogus": "no such preset: 'bogus'; there are: tiny, char, baby", "--rounds x": "'x'"},
}


@pytest.mark.parametrize("script, options", [(script, options) for script in MISTAKES for options in MISTAKES[script]])
def test_a_mistake_is_one_line_before_anything_is_measured(script, options, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="without it --plot has another mistake")
    monkeypatch.syspath_prepend(str(COMPARE.parent))
    (tmp_path / "text").write_text("text")
    options, words = (text.format(folder=tmp_path) for text in (options, MISTAKES[script][options]))
    smoke = ["--smoke"] if script in ("compare.py", "growth.py") else []
    monkeypatch.setattr(sys, "argv", [script, *smoke, *shlex.split(options)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(COMPARE.with_name(script)), run_name="__main__")
    captured = capsys.readouterr()
    assert ended.value.code == 2 and captured.out == ""
    assert captured.err.startswith(f"{script}: error: ") and captured.err.count("\n") == 1 and words in captured.err


@needs_posix
def test_a_python_that_has_no_torch_is_an_error_where_it_was_asked_for(tmp_path):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -S \"$@\"\n")
    program.chmod(0o755)
    done = run("--smoke", "--only", "softmax", "--peers", "torch", "--torch-python", str(program))
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert f"torch cannot be imported by {program}: " in done.stderr


def test_plot_without_matplotlib_names_the_extra(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    for script in (COMPARE, COMPARE.with_name("growth.py")):
        command = [sys.executable, str(script), "--smoke", "--plot", str(tmp_path / "out.png")]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
        assert done.returncode == 2 and "cmha[plot]" in done.stderr and done.stderr.count("\n") == 1


def made_up_report(bench, names):
    """What --json writes, with numbers that tell which is which."""
    rows = {row.name: row for row in bench["rows"].full()}
    results = []
    for i, name in enumerate(names):
        result = bench["measure"].Result(name, rows[name].kind, rows[name].goal, value=0.001 * (i + 1), share=0.5)
        result.ratios = {"numpy": 3.0 + i, "torch": 2.5 + i, "torch+malloc": 1.25 + i}
        result.disturbed = 0.5 if i else 0.0
        results.append(asdict(result))
    head = {"machine": "some CPU", "threads": "2", "versions": "cmha 1, NumPy 2"}
    return {"head": head, "load_before": 0.1, "load_after": 0.2, "peers": ["numpy", "torch", "torch+malloc", "jax"],
            "rounds": 5, "best": False, "rows": results}  # fmt: skip


def test_markdown_has_a_line_for_every_row_measured_or_not(bench, tmp_path, capsys):
    file = tmp_path / "report.json"
    bench["table"].write_json(file, made_up_report(bench, ["GELU 256x256", "softmax 1024x32"]))
    assert bench["compare"].main(["--markdown", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "some CPU, 2 threads; cmha 1, NumPy 2; medians of 5 rounds; load 0.1 before and 0.2 after."
    assert lines[2:4] == ["| row | cmha | of peak | PyTorch | NumPy | JAX | goal |", "|" + " --- |" * 7]
    assert [line.split(" | ")[0][2:] for line in lines[4:]] == [row.name for row in bench["rows"].full()]
    assert "| GELU 256x256 | 1 ms | 50% | 1.25 | 3.00 |  | 4 |" in lines  # the faster of PyTorch's two
    assert "| softmax 1024x32 | ~2 ms | 50% | 2.25 | 4.00 |  |  |" in lines
    assert "| matmul 64x64x64 | not measured here |  |  |  |  | 1.1 |" in lines


def test_how_fast_has_the_rows_of_the_list_and_a_reason_for_each_goal_that_is_missed(bench):
    text = (ROOT / "docs" / "how-fast.md").read_text(encoding="utf-8")
    text, _, rest = text.partition("<!-- compare.py --markdown -->")[2].partition("<!-- end -->")
    head, _, *lines = (line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|"))
    columns = {name.strip(): i for i, name in enumerate(head)}
    cells = [[cell.strip() for cell in line] for line in lines]
    rows = bench["rows"].full()
    assert [line[0] for line in cells] == [row.name for row in rows]
    reasons = rest.partition("### Goals that are missed, and why")[2].partition("\n## ")[0]
    told = dict(re.findall(r"`([^`]+)`\s+\(([\d.]+)\)", reasons))
    missed = {}
    for row, line in zip(rows, cells, strict=True):
        line += [""] * (len(columns) - len(line))
        assert (line[columns["goal"]] or None) == (row.goal and f"{row.goal:g}")
        if row.goal and line[columns["PyTorch"]] and float(line[columns["PyTorch"]]) < row.goal:
            missed[row.name] = line[columns["PyTorch"]]
    assert told == missed


def test_the_plot_has_plain_numbers_on_its_axis(bench, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    file = tmp_path / "out.svg"
    bench["table"].write_plot(file, made_up_report(bench, [row.name for row in bench["rows"].full()][:9]))
    labels = re.findall(r"<!-- (.*?) -->", file.read_text(encoding="utf-8"))
    assert {"1", "2", "4", "8"} <= set(labels) and not any("10^" in label or "mathdefault" in label for label in labels)


@pytest.mark.full
def test_growth_runs_and_counts(tmp_path):
    """Two points of each axis: attention's memory is linear in T, its time and everything else grows."""
    file = tmp_path / "growth.json"
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "growth.py", "--smoke", "--json", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["axes"]["attention T"]
    assert found["values"] == [128, 256] and found["bytes"][1] <= 2.1 * found["bytes"][0]

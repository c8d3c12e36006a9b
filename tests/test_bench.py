"""The benchmark still runs: every kind of row on tiny sizes, and what it promises about results that differ."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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
    for name in ("compare", "measure", "processes", "rows", "table", "data", "machine", "whole"):
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
    done = run("--smoke", "--peers", "", "--only", "nano", "--only", "MHA")
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
    args = bench["compare"].parse(["--smoke"])
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


def test_mistakes_end_with_one_line(tmp_path):
    for options, words in {
        ("--only", "no such row"): "no row contains",
        ("--peers", "nump"): "no such side",
        ("--json", str(tmp_path / "no" / "out.json")): "no such folder",
        ("--threads", "0"): "above 0",
    }.items():
        done = run("--smoke", *options)
        assert done.returncode and words in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_plot_without_matplotlib_names_the_extra(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('hidden')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = run("--smoke", "--plot", str(tmp_path / "out.png"), env={**os.environ, "PYTHONPATH": path})
    assert done.returncode and "cmha[plot]" in done.stderr.splitlines()[-1]


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

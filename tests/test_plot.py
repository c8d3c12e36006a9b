"""cmha plot: what is drawn is what the logs hold; any terminal, any pipe, any name."""

import json
import os
import subprocess
import sys

import pytest

from cmha.cli import main
from cmha.see.curves import draw_text, read_curves


def write_log(folder, rows, end="\n"):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": s, "loss": a, "val_loss": b, "lr": 0.1}) for s, a, b in rows]
    (folder / "log.jsonl").write_text("\n".join(lines) + end)
    return folder


ROWS = [(100, 4.0, 3.0), (200, 2.0, None), (300, 1.5, 1.25), (500, 1.0, 1.5)]


@pytest.fixture
def run(tmp_path):
    return write_log(tmp_path / "one", ROWS)


def test_curves_hold_every_point(run):
    curves = read_curves(run)
    assert curves.training == [(100, 4.0), (200, 2.0), (300, 1.5), (500, 1.0)]
    assert curves.validation == [(100, 3.0), (300, 1.25), (500, 1.5)]


def test_a_line_half_written_at_the_end_is_left_out_and_others_are_named(tmp_path):
    killed = write_log(tmp_path / "killed", ROWS, end='\n{"step": 600, "lo')
    assert read_curves(killed).training[-1] == (500, 1.0)
    for line in ('{"step": 600}', "[]", "{", '{"step": 1, "loss": NaN}', '{"step": 1, "loss": "x"}', "7", "",
                 '{"step": null, "loss": 1.0}', '{"step": 1, "loss": 1.0, "val_loss": Infinity}'):  # fmt: skip
        bad = write_log(tmp_path / "bad", ROWS, end=f"\n{line}\n")
        with pytest.raises(ValueError, match="line 5 of .*bad/log.jsonl"):
            read_curves(bad)
    (bad / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match="must hold a line"):
        read_curves(bad)


@pytest.mark.parametrize("columns", [1, 29, 40, 80, 200])
def test_the_plane_shows_both_ends_of_each_curve(run, columns):
    *plane, axis, steps, training, validation = draw_text([read_curves(run)], columns).split("\n")
    assert all(len(line) <= max(29, columns) for line in [*plane, axis, steps])
    assert plane[0].startswith("  4.000 |*") and plane[15].startswith("  1.000 |") and plane[15].endswith("*")
    assert plane[5].split("|")[1].startswith("o") and plane[5].startswith("  3.000 |")  # the first of validation
    assert len(plane[15]) == len(axis) and steps.split() == ["step", "100", "500"]
    assert training == "* training: last 1.0000, lowest 1.0000 at step 500"
    assert validation == "o validation: last 1.5000, lowest 1.2500 at step 300"
    for column in range(9, len(axis)):  # no curve has a hole, also where it is steep
        assert sum(line[column : column + 1] in ("*", "o") for line in plane) >= 1


def test_one_point_and_equal_losses_have_a_plot(tmp_path):
    text = draw_text([read_curves(write_log(tmp_path / "a", [(5, 2.0, 2.0)]))], 60)
    assert "2.000 |o" in text and "lowest 2.0000 at step 5" in text
    several = [read_curves(write_log(tmp_path / name, [(n, 2.0, None), (n + 9, 1.0, None)])) for n, name in
               enumerate("bcdefghijk")]  # fmt: skip
    assert draw_text(several, 60).count("(training)") == 10


@pytest.mark.parametrize("environment", [{"LC_ALL": "C"}, {"NO_COLOR": "1", "COLUMNS": "30"}, {"TERM": "dumb"}])
def test_p7_through_a_pipe_it_is_plain_text(run, environment):
    command = [sys.executable, "-W", "error", "-m", "cmha", "plot", str(run), str(run)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, check=True)
    assert done.stderr == b"" and done.stdout.decode("ascii").isprintable() is False  # line breaks
    assert b"\x1b" not in done.stdout and done.stdout.count(b"\n") == 20


@pytest.mark.parametrize("columns", [1, 80])
def test_losses_and_steps_that_reach_the_ends_of_their_types_have_a_plot(tmp_path, columns):
    big = write_log(tmp_path / "big", [(1, 1e308, -1e308), (2, -1e308, 1e308), (3, 0.5, 1e308)])
    *plane, axis, steps, training, validation = draw_text([read_curves(big)], columns).split("\n")
    assert plane[0].startswith(" 1e+308 |*") and plane[15].startswith("-1e+308 |o") and plane[0].endswith("o")
    assert training.endswith("last 0.5000, lowest -1e+308 at step 2") and validation.endswith("-1e+308 at step 1")
    last = 2**63 - 1
    text = draw_text([read_curves(write_log(tmp_path / "far", [(last - 9, 2.0, None), (last, 1.0, None)]))], columns)
    assert text.split("\n")[17].split() == ["step", str(last - 9), str(last)]


def test_a_picture_of_losses_beyond_an_axis_is_one_clear_line(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the extra `plot`")
    run = write_log(tmp_path / "big", [(1, 1e308, None), (2, -1e308, None)])
    assert main(["plot", str(run), "--out", str(tmp_path / "x.png")]) == 1
    assert "[plot] a picture needs losses from -1e+100 to 1e+100; got 1e+308" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


@pytest.mark.skipif(os.name == "nt", reason="names hold no control characters there")
def test_a_name_with_control_characters_is_spelled_out(tmp_path, capsys):
    runs = [str(write_log(tmp_path / name, ROWS)) for name in ("a\x1b[31mb", "c\nd")]
    assert main(["plot", *runs]) == 0
    out = capsys.readouterr().out
    assert "a\\x1b[31mb: last" in out and "c\\nd: last" in out and "\x1b" not in out


def test_wrong_runs_are_one_line(run, tmp_path, capsys):
    write_log(tmp_path / "bad", [(1, 2.0, None)], end="\nx\n")
    for code, arguments in [
        (2, []), (2, [run, "--out", "x.gif"]), (2, [run, "--out", "png"]), (1, [tmp_path / "none"]), (1, [tmp_path]),
        (1, [run, tmp_path / "bad"]), (1, [run / "log.jsonl"]),
    ]:  # fmt: skip
        assert main(["plot", *map(str, arguments)]) == code
        captured = capsys.readouterr()
        assert captured.err.startswith("cmha: error: ") and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_is_the_same_file_every_time_whatever_the_names_are(tmp_path, capsys, kind):
    pytest.importorskip("matplotlib", reason="the extra `plot`")
    runs = [str(write_log(tmp_path / name, ROWS)) for name in ("$x^$", "\u6f22_a", "b")]
    found = []
    for name in (f"1.{kind}", f"2.{kind.upper()}"):
        assert main(["plot", *runs, "--out", str(tmp_path / name)]) == 0
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1] and len(found[0]) > 5000
    assert found[0].startswith(b"\x89PNG" if kind == "png" else b"<?xml")
    capsys.readouterr()


def test_without_matplotlib_the_extra_is_named(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(run), "--out", str(tmp_path / "x.png")]) == 1
    assert "pip install 'cmha[plot]'" in capsys.readouterr().err and not (tmp_path / "x.png").exists()

"""Pictures of attention: labels, the terminal, PNG and SVG, and the page in a real browser."""

import base64
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cmha
from cmha.cli import main
from cmha.see.labels import token_labels, visible
from cmha.see.maps import Maps, attention_maps
from cmha.see.page import page
from cmha.see.terminal import RAMP, has_colour, heat_maps
from cmha.text import ByteTokenizer, CharTokenizer

from .models import tiny

HOSTILE = '"><img src=x onerror=alert(1)></script><script>alert(2)</script>&lt;\'\n\u202e\xe9$'


def byte_model(**changes):
    return tiny(vocab_size=256, block_size=256, **changes)


def some_maps(heads, tokens, layers=1, text="abc <d>\n"):
    rng = np.random.default_rng(1)
    weights = np.tril(rng.random((layers, heads, tokens, tokens)).astype(np.float32) ** 4) + np.eye(tokens) * 1e-3
    weights /= weights.sum(axis=-1, keepdims=True)
    labels = [visible(text[i % len(text)]) for i in range(tokens)]
    return Maps("a title", labels, dict(enumerate(weights)), "")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a model with two layers of two heads, that reads bytes."""
    folder = tmp_path_factory.mktemp("heads") / "run"
    byte_model().save_pretrained(str(folder))
    ByteTokenizer().save(str(folder))
    return folder


def test_labels_spell_out_what_would_hide():
    assert token_labels(ByteTokenizer(), b'a "<\n\\') == ["a", "\u2423", '"', "<", "\\n", "\\\\"]
    assert token_labels(ByteTokenizer(), "\xe9".encode()) == ["\\xc3", "\\xa9"]  # each is half a character
    assert token_labels(CharTokenizer("\xe9\u202e\x1b"), [1, 2, 0]) == ["\xe9", "\\u202e", "\\x1b"]
    assert visible("the cat") == "the\u2423cat"


def test_maps_are_the_weights_of_the_model_over_the_text():
    gpt = byte_model()
    maps = attention_maps(gpt, ByteTokenizer(), "hello", [1])
    assert maps.labels == list("hello") and maps.note == "" and list(maps.weights) == [1]
    expected = cmha.attention_weights(gpt, np.array([list(b"hello")]))[1][0]
    assert np.array_equal(maps.weights[1], expected)


@pytest.mark.parametrize("block_size, length, kept", [(256, 200, 200), (256, 201, 200), (30, 31, 30), (30, 30, 30)])
def test_long_texts_are_cut_with_a_note(block_size, length, kept):
    maps = attention_maps(tiny(vocab_size=256, block_size=block_size), ByteTokenizer(), "x" * length)
    assert len(maps.labels) == kept and maps.weights[0].shape == (2, kept, kept)
    assert (f"the first {kept} of {length} tokens" in maps.note) == (kept < length)


def test_terminal_maps_without_colour_are_plain_characters():
    maps = some_maps(3, 5)
    text = heat_maps(maps, width=80)
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80
    rows = [line for line in text.splitlines() if re.match(r" *\S+ [ .:\-=+*#%@]{3}", line)][-5:]
    level = RAMP[min(9, int(maps.weights[0][0, 0, 0] * 10))]
    assert rows[0].split(" ", 1)[1].startswith(level) and level == "@"
    for query, row in enumerate(rows):
        cells = row.ljust(80)[2 : 2 + 5]
        assert cells == "".join(RAMP[min(9, int(w * 10))] for w in maps.weights[0][0, query])


def test_terminal_maps_with_colour_have_a_cell_for_each_weight():
    text = heat_maps(some_maps(2, 6, layers=2), colour=True, width=100)
    assert text.count("\x1b[48;5;") == 10 + 2 * 2 * 6 * 6
    bare = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert max(map(len, bare.splitlines())) <= 100
    assert all(line.count("\x1b[0m") for line in text.splitlines() if "\x1b" in line)  # no colour runs on


@pytest.mark.parametrize("heads, tokens, width", [(4, 1, 80), (144, 20, 80), (4, 200, 80), (2, 200, 230), (1, 9, 10)])
def test_terminal_maps_fit_the_terminal(heads, tokens, width):
    text = heat_maps(some_maps(heads, tokens), width=width)
    drawn = text.splitlines()[2:]  # behind title and note
    assert max(map(len, drawn)) <= max(width, 16)
    assert ("the first" in text) == (tokens > width - 12)


def test_a_terminal_that_knows_little_gets_what_it_can_write():
    text = heat_maps(some_maps(1, 8, text="a \xe9"), width=80, encoding="ascii")
    text.encode("ascii")
    assert "_" in text and "\\xe9" in text


def test_colour_only_where_it_is_wanted(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert has_colour(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colour(Terminal())


def test_the_command_prints_to_a_pipe_in_any_locale(run):
    command = [sys.executable, "-m", "cmha", "heads", str(run), "a \xe9", "--layer", "1"]
    path = str(Path(cmha.__file__).parent.parent)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": path}
    result = subprocess.run(command, capture_output=True, env=environment)
    assert result.returncode == 0 and result.stderr == b"" and b"\x1b" not in result.stdout
    assert b"layer 1" in result.stdout and b"layer 0" not in result.stdout and b"head 1" in result.stdout


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["--out", "maps.pdf"], 2, "*.html or *.png or *.svg; got 'maps.pdf'"),
        (["--layer", "2"], 1, "got 2, expected 0 to 1"),
        (["--layer", "-1"], 2, "at least 0"),
        (["--out", "no/such/folder.html"], 1, "No such file"),
    ],
)
def test_what_the_command_refuses(run, capsys, arguments, code, words):
    assert main(["heads", str(run), "abc", *arguments]) == code
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_an_empty_text_and_a_missing_run_are_refused(run, capsys, tmp_path):
    assert main(["heads", str(run), ""]) == 2
    assert main(["heads", str(tmp_path / "none"), "abc"]) == 1
    assert "no such run" in capsys.readouterr().err


def embedded(html):
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_the_page_holds_every_weight_and_no_markup_of_the_text():
    gpt = byte_model()
    maps = attention_maps(gpt, ByteTokenizer(), HOSTILE, title=HOSTILE)
    html = page(maps)
    template = (Path(cmha.__file__).parent / "see" / "heads.html").read_text(encoding="utf-8")
    assert html.count("<script") == template.count("<script") and "<img" not in html
    data = embedded(html)
    assert data["title"] == HOSTILE and "".join(data["labels"]).startswith('"><img\u2423src=x')
    below = np.tril_indices(len(maps.labels))
    for layer in data["layers"]:
        for head, text in enumerate(layer["heads"]):
            levels = np.frombuffer(base64.b64decode(text), np.uint8)
            assert np.abs(levels / 255 - maps.weights[layer["layer"]][head][below]).max() <= 0.5 / 255 + 1e-6
    assert not re.search(r"(?:https?:)?//[a-z]|url\(|@import|\bsrc=|href=", re.sub(r'id="data">.*?</script>', "", html)
                         .replace(cmha.see.page.html.escape(HOSTILE), ""))  # fmt: skip


def test_weights_that_are_not_finite_are_told_and_stay_valid_json():
    """B86."""
    gpt = byte_model()
    state = {n: np.array(t) for n, t in gpt.state_dict().items()}
    state["h.0.attn.c_q.weight"][0, 0] = np.nan
    gpt.load_state_dict(state)
    maps = attention_maps(gpt, ByteTokenizer(), "abc")
    assert "not finite" in maps.note

    def refuse(word):
        raise AssertionError(word)

    json.loads(re.search(r'id="data">(.*?)</script>', page(maps), re.DOTALL)[1], parse_constant=refuse)
    assert "abc"[0] in heat_maps(maps, width=80)


@pytest.mark.parametrize("kind", ["png", "svg"])
@pytest.mark.parametrize("heads, tokens", [(2, 1), (1, 45)])
def test_figures_are_drawn_with_the_text_as_text(kind, heads, tokens, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from cmha.see.figure import save_figure

    path = tmp_path / f"maps.{kind}"
    save_figure(some_maps(heads, tokens, layers=1, text="$x^2$ \u4f60<"), str(path))
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") if kind == "png" else b"<svg" in data and data.count(b"layer 0, head") >= 1
    assert len(list(tmp_path.iterdir())) == 1


def drawn(maps, path):
    """The texts of a figure as .svg, in the order of drawing, and the file."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from cmha.see.figure import save_figure

    save_figure(maps, str(path))
    source = path.read_text(encoding="utf-8")
    return [html.unescape(text) for text in re.findall(r"<!-- (.*?) -->", source)], source


def test_a_figure_says_what_its_colours_rows_and_columns_are(tmp_path):
    texts, _ = drawn(some_maps(2, 7), tmp_path / "maps.svg")
    assert {"0", "0.01", "0.1", "0.4", "1", "weight. A row is a query,", "a column the key it looks at."} <= set(texts)


def test_many_maps_of_a_long_text_are_one_image_and_few_labels(tmp_path):
    texts, source = drawn(some_maps(12, 200, layers=2, text="abcdefg"), tmp_path / "maps.svg")
    assert source.count("<image") <= 2  # all maps, and the scale
    assert [t for t in texts if t.startswith("layer")] == [f"layer {i}, head {j}" for i in range(2) for j in range(12)]
    labels = [t for t in texts if t in set("abcdefg")]
    assert 14 * 8 <= len(labels) <= 14 * 25  # at the left of each layer, under each column


@pytest.mark.parametrize("heads, tokens, layers", [(2, 5, 1), (1, 150, 1), (13, 3, 2)])
def test_every_cell_of_a_figure_has_the_colour_of_its_weight(heads, tokens, layers, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from matplotlib.image import imread

    from cmha.see.figure import _side, save_figure
    from cmha.see.picture import DOTS

    maps = some_maps(heads, tokens, layers)
    for weights in maps.weights.values():
        weights[...] = np.tri(tokens) * 0.25  # whose level is the square root, a half: the colour in the middle
    save_figure(maps, str(tmp_path / "maps.png"))
    dots = np.rint(imread(tmp_path / "maps.png")[..., :3] * 255).astype(int)
    middle = np.abs(dots - (108, 166, 205)).max(axis=-1) <= 2
    inside = layers * heads * np.tri(tokens).sum()  # cells; the frame covers some dots, the scale has some more
    side = round(_side(tokens, layers, heads) * DOTS / tokens)  # of a cell, in dots
    assert side >= 1 and 0.97 * inside * side**2 < middle.sum() + 4 * side * tokens * layers * heads
    assert middle.sum() < 1.03 * inside * side**2 + 200


def test_labels_that_are_long_are_cut_and_the_title_is_wrapped(tmp_path):
    maps = some_maps(1, 3)
    maps.labels, maps.title = ["x" * 50, "y", "z"], "a long title " * 9
    texts, source = drawn(maps, tmp_path / "maps.svg")
    assert "x" * 11 + "\u2026" in texts and "x" * 12 not in source
    assert len([t for t in texts if t.startswith("a long title") or t.startswith("long title")]) >= 2


def test_without_matplotlib_the_error_names_the_extra(run, capsys, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["heads", str(run), "abc", "--out", str(tmp_path / "a.png")]) == 1
    assert "pip install 'cmha[plot]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# --- in a browser ---------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="looking at the page needs playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("looking at the page needs chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


def opened(browser, path, scheme="light"):
    """The page, and what went wrong on it: errors, messages of the console, dialogs, requests to elsewhere."""
    shown, faults = browser.new_page(color_scheme=scheme), []
    shown.on("pageerror", lambda error: faults.append(str(error)))
    shown.on("console", lambda message: faults.append(message.text))
    shown.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    shown.on("request", lambda request: None if request.url == path.as_uri() else faults.append(request.url))
    shown.goto(path.as_uri())
    return shown, faults


def test_a_hostile_text_stays_text_in_the_browser(browser, run, tmp_path):
    path = tmp_path / "maps.html"
    assert main(["heads", str(run), HOSTILE, "--out", str(path)]) == 0
    shown, faults = opened(browser, path)
    assert faults == [] and shown.locator("img").count() == 0
    assert shown.locator("#text span").all_text_contents() == token_labels(ByteTokenizer(), HOSTILE.encode())
    shown.locator("#text span").nth(3).hover()
    assert "\u201ci\u201d (3)" in shown.locator("#value").text_content()
    shown.locator("button.head").nth(3).click()
    assert shown.locator("#which").text_content() == "layer 1, head 1" and faults == []


@pytest.mark.parametrize(
    "layers, heads, tokens, scheme",
    [(1, 4, 1, "dark"), (1, 4, 200, "light"), (12, 12, 9, "dark"),
     *(pytest.param(12, 12, n, s, marks=pytest.mark.full) for n in (1, 200) for s in ("light", "dark"))],
)
def test_every_size_is_drawn(browser, tmp_path, layers, heads, tokens, scheme):
    path, maps = tmp_path / "maps.html", some_maps(heads, tokens, layers)
    path.write_text(page(maps), encoding="utf-8")
    shown, faults = opened(browser, path, scheme)
    assert faults == [] and shown.locator("button.head").count() == layers * heads
    script = """(at) => [...document.querySelectorAll("button.head canvas")[at].getContext("2d")
        .getImageData(0, 0, 1, 1).data]"""
    low, high = {"light": ([255] * 3, [8, 48, 107]), "dark": ([24, 27, 31], [253, 231, 100])}[scheme]
    assert shown.evaluate(script, layers * heads - 1) == [*high, 255]  # the first query sees only itself
    if tokens > 1:
        corner = script.replace("getImageData(0, 0", f"getImageData({tokens - 1}, 0")
        assert shown.evaluate(corner, 0) == [*low, 255]  # and nothing of the future
    shown.close()

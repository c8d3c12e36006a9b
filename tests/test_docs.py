"""What the documents say is run, or looked up."""

import re
from pathlib import Path

import pytest

from cmha import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def text(path):
    return path.read_text(encoding="utf-8")


def blocks(document, language):
    """(line number, code) of each fenced block of that language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    return [(document.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    """In order, in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    if "cmha train --out runs/seen\n" in text(path):  # the model of the page, with fewer steps
        assert cli.main(["train", "--out", "runs/seen", "--steps", "20"]) == 0
    namespace = {}
    for line, code in blocks(text(path), "python"):
        exec(compile("\n" * (line - 1) + code, path, "exec"), namespace)


def test_readme_has_the_blocks():
    assert len(blocks(text(ROOT / "README.md"), "python")) >= 3


def test_readme_has_the_two_commands():
    """.ci/run takes the second from there and runs it as it stands."""
    lines = text(ROOT / "README.md").splitlines()
    assert "pip install . && cmha train" in lines
    assert "pip install -e '.[test]' && pytest" in lines


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", text(path)):
        assert "://" in target or (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(path):
    for name in re.findall(r"`((?:src|tests|docs|examples|bench)/[\w./]+)`", text(path)):
        assert (ROOT / name).exists() or "softsign" in name, f"{path.name} names {name}"


def test_map_names_what_is_there():
    """A row of the map that names `permute` and a file: the word stands in that file."""
    rows = re.findall(r"^\| (Where .*\?) \| (.*) \|$", text(ROOT / "README.md"), re.MULTILINE)
    assert len(rows) >= 9
    for question, place in rows:
        words = re.findall(r"`(\w+)`", place)
        files = [ROOT / name for name in re.findall(r"`(src/[\w./]+)`", place)]
        sources = "".join(text(file) for file in files if file.is_file())
        for word in words:
            assert re.search(rf"\b{word}\b", sources), f"{question}: no {word} in {place}"


def test_trace_is_what_the_command_prints(capsys):
    """The table of docs/attention.md, but for the times."""
    document = text(ROOT / "docs" / "attention.md")
    (shown,) = (code for _, code in blocks(document, "text") if code.startswith("$ cmha trace "))
    command, *rows = shown.splitlines()
    assert cli.main(command.split()[2:]) == 0
    printed = capsys.readouterr().out.splitlines()

    def without_time(lines):
        return [re.sub(r" +(time|[\d,]+ us)$", "", line) for line in lines]

    assert without_time(rows) == without_time(printed)
    storage = [row.split()[-4] for row in rows if re.search("(split|merge) heads", row)]
    assert storage == 4 * ["view", "view", "copy"]  # q, k, v are split, y is merged

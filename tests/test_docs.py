"""What the documents say is run, or looked up."""

import ast
import doctest
import importlib
import inspect
import itertools
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import cmha
from cmha import cli
from cmha.cli.options import Parser

ROOT = Path(__file__).parent.parent
NAMES = ["README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md"]
DOCUMENTS = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
PUBLIC = ["cmha", *(f"cmha.{name}" for name in ("nn", "gpt", "generate", "text", "train", "see", "ops"))]


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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_are_shown_exist(path):
    """Every `cmha ...` line of a shell block has a command and options that its parser takes."""
    for line, code in blocks(text(path), "sh"):
        for shown in code.splitlines():
            words = shlex.split(shown.rpartition("&& ")[2].removesuffix("&").partition(" >")[0], comments=True)
            if "cmha" in words and words[0] != "pip":  # alone, or behind nohup, mpiexec
                name, *words = words[words.index("cmha") + 1 :]
                command = importlib.import_module(f"cmha.cli.{name}")
                parser = Parser(prog=f"{path.name}:{line}")
                command.add_options(parser)
                parser.parse_intermixed_args(words)


def test_chinese_readme_says_what_the_readme_says():
    """The same code, but for comments; no command and no number that is not there."""
    english, chinese = text(ROOT / "README.md"), text(ROOT / "README.zh-CN.md")
    for (_, ours), (_, theirs) in zip(blocks(english, "python"), blocks(chinese, "python"), strict=True):
        assert ast.dump(ast.parse(ours)) == ast.dump(ast.parse(theirs))

    def commands(document):
        return [shlex.split(line, comments=True) for _, code in blocks(document, "sh") for line in code.splitlines()]

    assert len(commands(chinese)) >= 7
    for command in commands(chinese):
        assert command in commands(english), f"README.md has no {command}"
    numbers = set(re.findall(r"\d[\d.,]*\d|\d", chinese)) - set(re.findall(r"\d[\d.,]*\d|\d", english))
    assert not numbers, f"README.md has no {numbers}"


def public_objects():
    """(name, object) of everything that a public module's __all__ names."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        yield from ((f"{name}.{word}", getattr(module, word)) for word in module.__all__)


def public_members(cls):
    """(name, object) of a class's methods and properties, inherited ones too."""
    ours = [part for part in cls.__mro__ if part.__module__.startswith("cmha")]
    for name, value in (pair for part in ours for pair in vars(part).items()):
        value = getattr(value, "__func__", value)  # what a classmethod holds
        if not name.startswith("_") and (callable(value) or isinstance(value, property)):
            yield name, value


def docstrings():
    """(name, docstring or None) of every public name, and of the members of the classes among them."""
    for name, value in public_objects():
        yield name, value.__doc__
        if inspect.isclass(value):
            yield from ((f"{name}.{member}", what.__doc__) for member, what in public_members(value))


def test_every_public_name_has_a_docstring():
    silent = [name for name, said in docstrings() if not said]
    assert not silent, f"without a docstring: {', '.join(silent)}"


def test_indented_lines_of_a_docstring_stay_lines():
    """The reference runs them together unless `::` stands before them."""
    for name, said in docstrings():
        paragraphs = ["", *inspect.cleandoc(said).split("\n\n")]
        for before, paragraph in itertools.pairwise(paragraphs):
            assert not paragraph.startswith(" ") or before.startswith(" ") or before.endswith("::"), name


def test_the_reference_has_every_public_name():
    """Each is the object of a directive of docs/api (a class brings its members along)."""
    documented = set()
    for page in sorted((ROOT / "docs" / "api").glob("*.rst")):
        module = None
        for directive, name in re.findall(r"^\.\. (\w+):: ([\w.]+)$", text(page), re.MULTILINE):
            if directive == "currentmodule":
                module = name
            elif directive == "automodule":
                documented |= {id(value) for of, value in public_objects() if of.startswith(f"{name}.")}
            elif directive.startswith("auto"):
                where, _, word = (name if name.startswith("cmha.") else f"{module}.{name}").rpartition(".")
                documented.add(id(getattr(importlib.import_module(where), word)))
    missing = sorted(name for name, value in public_objects() if id(value) not in documented)
    assert not missing, f"docs/api does not have {', '.join(missing)}"


def test_examples_in_docstrings_are_true():
    attempted = 0
    for module in pkgutil.walk_packages(cmha.__path__, "cmha."):
        if module.name != "cmha.__main__":
            result = doctest.testmod(importlib.import_module(module.name), extraglobs={"cmha": cmha})
            assert not result.failed, module.name
            attempted += result.attempted
    assert attempted >= 10


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

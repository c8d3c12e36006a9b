"""The package as strangers meet it: what its metadata says, what its wheel may hold, and files that must agree."""

import importlib.metadata
import importlib.util
import re
import tomllib
import zipfile
from pathlib import Path

import pytest

import cmha

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def script(name):
    """A file of .ci as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def distribution():
    try:
        return importlib.metadata.distribution("cmha")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("cmha is not installed, only on the path")


# --- metadata -------------------------------------------------------------------------------------------------------

def test_the_version_is_that_of_the_metadata():
    assert cmha.__version__ == distribution().version == PROJECT["version"]


def test_a_plain_install_needs_three_packages():
    plain = [line for line in distribution().requires if "extra ==" not in line]
    assert sorted(re.match(r"[\w-]+", line)[0] for line in plain) == ["numpy", "safetensors", "tqdm"]


def test_metadata_name_licence_python_and_command():
    found = distribution()
    assert found.metadata["License-Expression"] == "MIT"
    assert found.metadata.get_all("License-File") == ["LICENSE"]
    assert found.metadata["Requires-Python"] == ">=3.11"
    assert set(found.metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    (command,) = found.entry_points.select(group="console_scripts")
    assert (command.name, command.value) == ("cmha", "cmha.cli:main")


# --- wheels ---------------------------------------------------------------------------------------------------------

METADATA = "Metadata-Version: 2.4\nName: cmha\nVersion: 1.2\n" + "".join(
    f"Requires-Dist: {line}\n" for line in ("numpy>=1.26", "safetensors", "tqdm", 'tokenizers; extra == "bpe"'))
GOOD = {"cmha/__init__.py": "", "cmha/_core.abc.so": "", "cmha/_core.pyi": "", "cmha/py.typed": "",
        "cmha-1.2.dist-info/METADATA": METADATA, "cmha-1.2.dist-info/licenses/LICENSE": "MIT"}


def wheel(folder, changes):
    path = folder / "cmha-1.2-cp311-cp311-macosx_11_0_arm64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (GOOD | changes).items():
            if content is not None:
                archive.writestr(name, content)
    return path


def test_a_good_wheel_is_let_through(tmp_path, capsys):
    script("check_wheel").check(wheel(tmp_path, {}))
    assert "requires numpy, safetensors, tqdm" in capsys.readouterr().out


@pytest.mark.parametrize("changes, why", [
    ({"cmha/_core/c/softmax.c": ""}, "sources"),
    ({"cmha/_core.pyi": None}, "types"),
    ({"cmha/py.typed": None}, "types"),
    ({"cmha-1.2.dist-info/licenses/LICENSE": None}, "licence"),
    ({"cmha.libs/libgomp.so.1": ""}, "more than the package"),
    ({"tests/cases.py": ""}, "more than the package"),
    ({"cmha/_core.xyz.so": ""}, "compiled modules"),
    ({"cmha/_core.abc.so": None}, "compiled modules"),
    ({"cmha-1.2.dist-info/METADATA": METADATA + "Requires-Dist: torch\n"}, "needs .*torch"),
    ({"cmha/_core.abc.so": bytes(1_500_001)}, "the limit is 1500000"),
])
def test_a_wheel_that_should_not_be_published_is_stopped(tmp_path, changes, why):
    with pytest.raises(AssertionError, match=why):
        script("check_wheel").check(wheel(tmp_path, changes))


def test_tests_of_wheels_need_files_that_are_there():
    settings = PYPROJECT["tool"]["cibuildwheel"]
    files = re.findall(r"tests/test_\w+\.py", settings["test-command"])
    assert len(files) > 5
    for name in [*files, *settings["test-sources"]]:
        assert (ROOT / name).exists(), name


# --- files that must agree ------------------------------------------------------------------------------------------

def test_the_oldest_python_is_the_same_everywhere():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    digits = oldest.replace(".", "")
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{digits}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == oldest
    assert f'PYTHONS = ["cp{digits}"' in text(".ci/identifiers.py")
    assert f"oldest=$(find_python {oldest})" in text(".ci/run")
    assert f"Python {oldest} or later" in text("README.md")
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert versions[0] == oldest


def test_every_extra_is_in_the_readme_table():
    assert set(re.findall(r"^\| `(\w+)` \|", text("README.md"), re.MULTILINE)) == set(PROJECT["optional-dependencies"])


def test_citation_and_changelog_know_the_version():
    assert f"\nversion: {PROJECT['version']}\n" in text("CITATION.cff")
    assert f"\nlicense: {PROJECT['license']}\n" in text("CITATION.cff")
    headings = re.findall(r"^## (.*)$", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])


def parts():
    return re.findall(r"^part (\w+) ", text(".ci/run"), re.MULTILINE)


def test_every_part_of_the_local_check_has_a_job_and_a_word_of_explanation():
    workflow = text(".github/workflows/ci.yml")
    jobs = re.findall(r"bash \.ci/run (\w+)", workflow)
    jobs += re.search(r"^ +part: \[(.*)\]$", workflow, re.MULTILINE)[1].split(", ")
    elsewhere = ["test", "cross"]  # on machines of their own: the job `tests`
    assert sorted(jobs + elsewhere) == sorted(parts())
    explained = re.findall(r"^\| `(\w+)` \|", text("CONTRIBUTING.md"), re.MULTILINE)
    assert sorted(explained) == sorted(parts())


def test_every_action_is_pinned_to_a_commit_and_rights_are_the_least():
    for path in WORKFLOWS:
        workflow = path.read_text(encoding="utf-8")
        for action, comment in re.findall(r"uses: (\S+)(.*)$", workflow, re.MULTILINE):
            if not action.startswith("./"):
                assert re.search(r"@[0-9a-f]{40}$", action) and re.search(r"# v\d", comment), f"{path.name}: {action}"
        assert "\npermissions:\n  contents: read\n" in workflow, path.name
        assert workflow.count("checkout@") == workflow.count("persist-credentials: false"), path.name
        assert workflow.count("runs-on:") == workflow.count("timeout-minutes:"), path.name


LAST_JOBS = [("release", "publish", "pypi"), ("docs", "deploy", "github-pages")]


@pytest.mark.parametrize("workflow, job, environment", LAST_JOBS)
def test_only_the_last_job_may_publish_and_it_runs_nothing_of_ours(workflow, job, environment):
    head, last = text(f".github/workflows/{workflow}.yml").split(f"\n  {job}:\n")
    assert "write" not in head.split("jobs:")[0] and "id-token" not in head
    assert "id-token: write" in last and environment in last
    assert "run:" not in last and "checkout" not in last
    if job == "publish":
        assert "if: github.event_name == 'push'" in last and "needs: [sdist, test-wheels]" in last


@pytest.mark.parametrize("arguments", [["v9.9.9"], ["0.1.0"], []])
def test_a_tag_that_is_not_the_version_is_stopped(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["check_tag.py", *arguments])
    with pytest.raises(SystemExit, match="the version in pyproject.toml"):
        script("check_tag")


def test_the_quick_start_is_found_in_the_readme():
    """What .ci/quick_start.py runs on a machine with nothing but the wheel."""
    commands = script("quick_start").commands(text("README.md"))
    assert commands[0] == "cmha train"
    assert {line.split()[1] for line in commands} >= {"train", "generate", "trace", "heads", "plot"}
    assert all("--steps 20" in line for line in commands[1:] if line.startswith("cmha train"))

"""What editors and type checkers are told is true: the calls of typing_samples.py give those types, the stub is the
module. mypy itself takes a while: `pytest -m full`, and .ci/run."""

import ast
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest

import cmha

from . import typing_samples

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = [f for _, f in inspect.getmembers(typing_samples, inspect.isfunction)]
SAMPLES = [f for f in FUNCTIONS if f.__module__ == typing_samples.__name__]


def is_of(value, kind):
    """isinstance, for the parametrised types that the samples name."""
    origin, arguments = get_origin(kind), get_args(kind)
    if hasattr(origin, "__value__"):  # NDArray, from NumPy 2.5 on
        origin = get_origin(origin.__value__)
    if origin in (Union, types.UnionType):
        return any(is_of(value, one) for one in arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return type(value) is tuple and len(value) == len(arguments) and all(map(is_of, value, arguments))
    if origin in (tuple, list):
        return type(value) is origin and all(is_of(one, arguments[0]) for one in value)
    return kind is Any or isinstance(value, origin or kind)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda f: f.__name__)
def test_calls_give_what_their_types_say(sample, monkeypatch):
    checked = []

    def check(value, kind):
        assert is_of(value, kind), f"a {type(value).__name__}, not {kind}"
        checked.append(kind)
        return value

    monkeypatch.setattr(typing_samples, "assert_type", check)
    sample()
    assert checked


def test_the_marker_and_the_stub_lie_in_the_package():
    package = Path(cmha.__file__).parent
    assert (package / "py.typed").is_file() and (package / "_core.pyi").is_file()


@pytest.mark.parametrize("layer", ["Linear", "LayerNorm", "Embedding", "Dropout", "MLP"])
def test_a_layer_is_called_as_its_forward_is(layer):
    """To type checkers each declares its __call__, as Module's own takes anything."""
    classes = {c.name: c for c in ast.parse(inspect.getsource(cmha.nn.layers)).body if isinstance(c, ast.ClassDef)}
    functions = {f.name: f for f in ast.walk(classes[layer]) if isinstance(f, ast.FunctionDef)}
    call, forward = functions["__call__"], functions["forward"]
    assert ast.unparse([call.args, call.returns]) == ast.unparse([forward.args, forward.returns])


def mypy(*arguments, folder=ROOT):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("needs mypy (extra dev)")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    run = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, timeout=500,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in paths if p)},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.full
def test_the_package_is_clean_under_mypy_strict():
    mypy("mypy")


@pytest.mark.full
def test_who_installs_the_package_gets_its_types(tmp_path):
    shutil.copy(typing_samples.__file__, tmp_path / "samples.py")
    mypy("mypy", "--strict", "samples.py", folder=tmp_path)


@pytest.mark.full
def test_the_stub_says_what_the_compiled_module_has():
    mypy("mypy.stubtest", "cmha._core", "--allowlist", "tests/stubtest-allow.txt")

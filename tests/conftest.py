"""What holds for every test: a fresh build, the thread count put back, the same examples every time in CI."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

import cmha
from cmha import _core

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "cmha" / "_core"

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, database=None)
settings.register_profile("soak", deadline=None, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config):
    """A test of yesterday's kernel is worse than no test: stop when a source is newer than what was built from it."""
    built = Path(_core.__file__).resolve()
    if SOURCES not in built.parents and built.parent != SOURCES.parent:
        return                                      # an installed package: nothing here to compare it with
    newer = [p for p in SOURCES.rglob("*") if p.suffix in {".c", ".h", ".pyx", ".pxi", ".pxd"}
             and p.stat().st_mtime > built.stat().st_mtime]
    if newer:
        pytest.exit(f"{newer[0].relative_to(ROOT)} is newer than {built.name}: build again (pip install -e .)", 2)


@pytest.fixture(autouse=True)
def thread_count():
    """A test may ask for any number of threads; the next one starts from the default."""
    before = cmha.get_num_threads()
    yield
    cmha.set_num_threads(before)


@pytest.fixture
def rng():
    return np.random.default_rng(20)

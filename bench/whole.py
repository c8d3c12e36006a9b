"""Rows about a library as a whole: how long its import takes, how much disk it needs."""

import json
import subprocess
import time

IMPORT_NAMES = {"cmha": "cmha", "numpy": "numpy", "torch": "torch", "jax": "jax, jax.numpy"}

# Runs in the side's own Python: bytes of a distribution and of all it requires (extras left out).
SIZE = """
import importlib.metadata as metadata, importlib.util, json, re, sys
from pathlib import Path

def of_tree(folder):  # a source tree: what would be installed of it
    return sum(p.stat().st_size for p in folder.rglob("*") if p.suffix in (".py", ".so", ".typed") and p.is_file())

def size(name, seen):
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen:
        return 0
    seen.add(key)
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(name)
        return of_tree(Path(spec.origin).parent) if spec and spec.origin else 0
    files = [Path(found.locate_file(f)) for f in found.files or ()]
    total = sum(f.stat().st_size for f in files if f.is_file())
    spec = importlib.util.find_spec(name)
    origin = Path(spec.origin).resolve() if spec and spec.origin else None
    if origin and origin not in [f.resolve() for f in files if f.name == "__init__.py"]:
        total = of_tree(Path(spec.origin).parent)  # installed for development
    for requirement in found.requires or ():
        if "extra ==" not in requirement and "sys_platform" not in requirement and "python_version" not in requirement:
            total += size(re.match(r"[A-Za-z0-9._-]+", requirement)[0], seen)
    return total

seen = set()
total = size(sys.argv[1], seen)
for extra in sys.argv[2:]:
    total += size(extra, seen)
print(json.dumps(total))
"""
NEEDS = {"cmha": ("numpy", "safetensors", "tqdm")}  # named here too: a source tree has no list of requirements


def import_seconds(side, threads):
    """Time of an import in a new process, less that of starting Python."""

    def seconds(program):
        start = time.perf_counter()
        subprocess.run([side.python, "-c", program], check=True, env=_environment(side, threads), capture_output=True)
        return time.perf_counter() - start

    return seconds(f"import {IMPORT_NAMES[side.library]}") - seconds("pass")


def installed_bytes(side, threads):
    command = [side.python, "-c", SIZE, side.library, *NEEDS.get(side.library, ())]
    done = subprocess.run(command, check=True, env=_environment(side, threads), capture_output=True, text=True)
    return json.loads(done.stdout)


def _environment(side, threads):
    """Compiled .pyc files are what an import finds, so writing them is allowed here."""
    return {name: value for name, value in side.environment(threads).items() if name != "PYTHONDONTWRITEBYTECODE"}

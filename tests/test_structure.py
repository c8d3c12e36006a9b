"""The house stays one that can be lived in: imports go downward, files stay short, nothing loads code."""

import ast
import re
from pathlib import Path

import pytest

from . import digests

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "cmha"
MODULES = sorted(SOURCE.rglob("*.py"))

# From the bottom to the top; a module imports from its own layer or a lower one.
LAYERS = [
    {"entry", "errors"},
    {"_core", "files", "tensor_file"},
    {"ops", "types"},
    {"along_axes", "autograd", "foreign", "interchange", "tensor", "random", "functional", "threads"},
    {"nn"},
    {"gpt", "text", "generate"},
    {"train"},
    {"see", "serve", "cli", "__main__"},
]
LAYER = {name: n for n, names in enumerate(LAYERS) for name in names}


def part(path):
    """The name under cmha that the layers speak of."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path):
    """(line, dotted name under cmha) of every import of the package, also those inside functions."""
    package = ("cmha", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[:len(package) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            names = [f"{base}.{a.name}" for a in node.names] if base == "cmha" else [base]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "cmha")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_downward(path):
    name = part(path)
    if name == "__init__":
        return                                              # the front door shows everything
    assert name in LAYER, f"{name} has no layer: tests/test_structure.py lists them"
    for line, imported in imports(path):
        target = imported.split(".")[1] if "." in imported else "__init__"
        if target == "__init__" and LAYER[name] == len(LAYERS) - 1:
            continue                                        # the top layer may come through the front door
        assert target in LAYER, f"{path.name}:{line} imports {imported}, which has no layer"
        assert LAYER[target] <= LAYER[name], f"{path.name}:{line}: {name} imports {target}, which stands above it"


def test_no_cycles_between_modules():
    graph = {}
    dotted = [".".join(("cmha", *p.relative_to(SOURCE).with_suffix("").parts)) for p in MODULES]
    names = {name.removesuffix(".__init__"): p for name, p in zip(dotted, MODULES, strict=True)}
    for name, path in names.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = set()
        for node in tree.body:                              # imports inside functions cannot close a cycle at import
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cmha"):
                inner = {f"{node.module}.{a.name}" for a in node.names} & set(names)
                found |= inner or {node.module}
        graph[name] = {f for f in found if f in names and f != "cmha"} - {name}
    done, path = set(), []

    def visit(name):
        assert name not in path, f"import cycle: {' -> '.join([*path[path.index(name):], name])}"
        if name not in done:
            path.append(name)
            for other in sorted(graph[name]):
                visit(other)
            path.pop()
            done.add(name)

    for name in graph:
        if name != "cmha":
            visit(name)


def test_no_long_files():
    kinds = {".py", ".pyx", ".pxi", ".pxd", ".c", ".h"}
    folders = [ROOT / n for n in ("src", "tests", "bench", "examples")]
    files = [p for folder in folders if folder.exists() for p in folder.rglob("*") if p.suffix in kinds]
    generated = {"_core.c"}
    long = {str(p.relative_to(ROOT)): n for p in files if p.name not in generated
            and (n := len(p.read_text(encoding="utf-8").splitlines())) > 400}
    assert not long, f"longer than 400 lines: {long}"


def test_nothing_loads_code():
    """F9: no pickle, eval, exec or torch.load anywhere in the package."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name.split(".")[0] for a in node.names} | {(getattr(node, "module", "") or "").split(".")[0]}
                assert not names & {"pickle", "marshal", "shelve", "dill", "joblib"}, where
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), where
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                assert (owner, node.func.attr) not in {("torch", "load"), ("np", "load"), ("yaml", "load")}, where


def test_no_assert_on_input():
    """It vanishes under -O."""
    for path in MODULES:
        found = [n.lineno for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Assert)]
        assert not found, f"{path.relative_to(ROOT)}: assert in lines {found}"


def test_every_kernel_has_a_digest():
    text = (SOURCE / "_core" / "c" / "kernels.h").read_text(encoding="utf-8")
    kernels = set(re.findall(r"^KERNEL\((\w+),", text, re.MULTILINE))
    no_output = {name for name in kernels if name.endswith("_scratch")}
    assert kernels - no_output == set(digests.KERNELS)


def test_only_one_file_names_instructions():
    """simd.h knows intrinsics, parallel.h OpenMP, dispatch.c the processor."""
    for path in [*(SOURCE / "_core").rglob("*.[ch]")]:
        text = path.read_text(encoding="utf-8")
        if not path.name.startswith("simd"):
            assert not re.search(r"\b_mm\d*_\w+\(|immintrin\.h|arm_neon\.h", text), path.name
        if path.name != "parallel.h":
            assert not re.search(r"#pragma omp|\bomp_\w+\(|omp\.h", text), path.name


def test_no_fast_math():
    """N10: neither in the build nor in a source."""
    for path in [ROOT / "setup.py", ROOT / "pyproject.toml", *(SOURCE / "_core").rglob("*.[ch]")]:
        for line in path.read_text(encoding="utf-8").splitlines():
            code = line.split("#")[0] if path.suffix in (".py", ".toml") else line
            assert not re.search(r"[\"']-(ffast-math|Ofast|march=native|funsafe)", code), f"{path.name}: {line}"

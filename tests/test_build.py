"""What is built: setup.py with compilers of every kind, and nothing in the module that another processor lacks.

Building takes minutes, so setup.py runs here with a compiler that answers its questions (the real one does) and copies
an empty file in place of every object: what is tested is what it was asked to compile.
"""

import ast
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import cmha
from cmha import _core

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / "setup.py"
C = ROOT / "src" / "cmha" / "_core" / "c"
X86 = platform.machine().lower() in ("x86_64", "amd64")
GCC = shutil.which("gcc")

COMPILER = """#!/bin/sh
# Arguments before --: a pattern of options to refuse, and options that make the real compiler look like another.
refuse=$1 disguise=$2
shift 3
for word do
    shift
    case "$word" in $refuse) echo "cc: error: unrecognized option $word" >&2; exit 1;; esac
    case "$word" in *probe.c) probe=1;; -c) compile=1;; esac
    [ "$last" = -o ] && out=$word
    last=$word
    case "$word" in -march=*|-Xclang|-pthread) [ -n "$disguise" ] && continue;; esac
    set -- "$@" "$word"
done
if [ -n "$probe" ]; then exec gcc $disguise "$@"; fi
: > "$out"
"""
SOME = ("matmul.c", "softmax.c", "dispatch.c", "team.c")
CYTHON = "def cythonize(modules, **options):\n    return modules\n"


def build(folder, refuse="none", disguise="", environ=()):
    """setup.py build_ext in a copy of the tree's C: (exit code, what it said, the compiler's command lines)."""
    pytest.importorskip("setuptools")
    if GCC is None or os.name != "posix":
        pytest.skip("no gcc here to answer for the real compiler")
    tree = folder / "a tree with spaces"
    shutil.copytree(C, tree / "src" / "cmha" / "_core" / "c",
                    ignore=lambda _, names: {n for n in names if n.endswith(".c") and n not in SOME})
    (tree / "src" / "cmha" / "_core" / "_core.c").write_text("")
    shutil.copy(SETUP, tree)
    (tree / "setup.py").write_text(SETUP.read_text(encoding="utf-8").replace("_core.pyx", "_core.c"), encoding="utf-8")
    (folder / "fake" / "Cython").mkdir(parents=True)
    (folder / "fake" / "Cython" / "__init__.py").write_text("")
    (folder / "fake" / "Cython" / "Build.py").write_text(CYTHON)
    compiler = folder / "a compiler with spaces"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    command = shlex.join([str(compiler), refuse, disguise, "--"])
    env = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "LDFLAGS", "CPPFLAGS")}
    env |= {"CC": command, "LDSHARED": command, "PYTHONPATH": str(folder / "fake"), **dict(environ)}
    done = subprocess.run([sys.executable, "setup.py", "-v", "build_ext", "--build-lib", "out"], cwd=tree, env=env,
                          capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    return done.returncode, said, [line for line in said.splitlines() if line.startswith(str(compiler)) or
                                   line.startswith(f"'{compiler}") or line.startswith(f'"{compiler}')]


def words_of(lines, source="matmul.c", variant="base"):
    """The options with which one source of one variant was compiled."""
    (line,) = [line for line in lines if f"/{source} " in line and f"-DCMHA_VARIANT={variant}" in line]
    return shlex.split(line.split(" -- ")[1])


def variants_in(lines):
    return set(re.findall(r"-DCMHA_VARIANT=(\w+)", "\n".join(lines)))


# --- setup.py ---------------------------------------------------------------------------------------------------------


def test_every_variant_of_the_target_from_a_path_with_spaces_and_a_compiler_of_several_words(tmp_path):
    code, said, lines = build(tmp_path)
    assert code == 0, said
    assert variants_in(lines) == ({"base", "avx2", "avx512"} if X86 else {"base", "neon"})
    assert "-fopenmp" in words_of(lines) and "-ffp-contract=off" in words_of(lines)
    if X86:
        assert "-mavx2" not in words_of(lines) and "-mavx2" in words_of(lines, variant="avx2")


def test_a_compiler_that_refuses_openmp_builds_for_one_thread(tmp_path):
    code, said, lines = build(tmp_path, refuse="-fopenmp")
    assert code == 0, said
    assert said.count("building for one thread") == 1 and "unrecognized option" not in said
    assert "-fopenmp" not in words_of(lines) and "base" in variants_in(lines)


@pytest.mark.skipif(not X86, reason="these options are those of x86-64")
def test_a_compiler_that_is_too_old_for_a_variant_builds_the_others(tmp_path):
    code, said, lines = build(tmp_path, refuse="-mavx512*")
    assert code == 0 and "building without avx512" in said, said
    assert variants_in(lines) == {"base", "avx2"}


def test_clang_takes_the_pragma_past_its_driver(tmp_path):
    """Apple's driver refuses -fopenmp, and wants a library with it."""
    code, said, lines = build(tmp_path, disguise="-D__clang__")
    assert code == 0, said
    assert " ".join(words_of(lines)).count("-Xclang -fopenmp") == 1


def test_the_target_decides_not_this_machine(tmp_path):
    other = ("-U__x86_64__ -D__aarch64__", {"base", "neon"}) if X86 else ("-U__aarch64__ -D__riscv", {"base"})
    code, said, lines = build(tmp_path, disguise=other[0])
    assert code == 0 and variants_in(lines) == other[1], said


@pytest.mark.skipif(not X86, reason="these options are those of x86-64")
def test_b89_march_native_in_cflags_is_overruled(tmp_path):
    """B89: the build machine does not leak into the product."""
    code, said, lines = build(tmp_path, environ={"CFLAGS": "-O2 -march=native"})
    assert code == 0, said
    for variant in ("base", "avx2"):
        assert [w for w in words_of(lines, variant=variant) if w.startswith("-march=")][-1] == "-march=x86-64"


@pytest.mark.parametrize("flags", ["-mavx2", "-ffast-math", "-Ofast", "--no-such-option"])
def test_b89_flags_that_break_a_promise_end_the_build(tmp_path, flags):
    if flags == "-mavx2" and not X86:
        pytest.skip("an option of x86-64")
    code, said, lines = build(tmp_path, environ={"CFLAGS": flags})
    assert code == 1 and not lines
    assert len(re.findall("^cmha: .*CFLAGS", said, re.MULTILINE)) == 1, said


def test_macos_builds_for_one_architecture_at_a_time():
    (node,) = [n for n in ast.parse(SETUP.read_text(encoding="utf-8")).body
               if isinstance(n, ast.FunctionDef) and n.name == "one_architecture"]
    known = {"sysconfig": sysconfig}
    exec(compile(ast.Module([node], []), "setup.py", "exec"), known)
    one_architecture = known["one_architecture"]
    universal = "-fno-common -arch arm64 -arch x86_64 -g"
    assert one_architecture({}, universal, "arm64")["ARCHFLAGS"] == "-arch arm64"
    assert one_architecture({}, universal, "x86_64")["_PYTHON_HOST_PLATFORM"].endswith("-x86_64")
    assert one_architecture({}, "-O3", "arm64") == {}
    assert one_architecture({"ARCHFLAGS": "-arch x86_64"}, universal, "arm64") == {}
    with pytest.raises(SystemExit, match="one -arch"):
        one_architecture({"ARCHFLAGS": "-arch arm64 -arch x86_64"}, universal, "arm64")


# --- the module -------------------------------------------------------------------------------------------------------


def functions(module):
    """{address: the variant it was compiled for, "" outside of the kernels} for every function of an ELF file.
    Functions of one file are named alike in all variants; they stand behind its name, which comes once for each."""
    order = [name for name in ("base", "avx2", "avx512", "neon") if name in _core.build_info()["variants"]]
    kernels = {p.name for p in C.glob("*.c")} - {"dispatch.c", "team.c"}
    table = subprocess.run(["readelf", "-sW", module], capture_output=True, text=True, check=True).stdout
    table = table[table.index("'.symtab'"):]
    seen, variant, found = dict.fromkeys(kernels, 0), "", {}
    for line in table.splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
            continue
        address, kind, bind, name = int(fields[1], 16), fields[3], fields[4], fields[7]
        if kind == "FILE":
            variant = ""
            if name in kernels:
                variant, seen[name] = order[seen[name]], seen[name] + 1
        elif kind == "FUNC" and address:
            found[address] = variant if bind == "LOCAL" else next((v for v in order if name.endswith(f"_{v}")), "")
    assert set(seen.values()) == {len(order)}
    return found


@pytest.mark.skipif(not X86 or not sys.platform.startswith("linux"), reason="reads an ELF file of x86-64")
@pytest.mark.skipif(not (shutil.which("objdump") and shutil.which("readelf")), reason="binutils are not installed")
def test_b89_only_the_variants_have_wide_instructions():
    """B89: no VEX or EVEX instruction (all of AVX's begin with v), no ymm or zmm register outside of them."""
    table = subprocess.run(["readelf", "-SW", _core.__file__], capture_output=True, text=True, check=True).stdout
    if ".symtab" not in table:
        pytest.skip("the module is stripped")
    variant_at, variant, wide = functions(_core.__file__), "", {}
    command = ["objdump", "-d", "--no-show-raw-insn", "--section=.text", _core.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listing:
        for line in listing.stdout:
            if line.endswith(">:\n"):
                variant, name = variant_at.get(int(line.split()[0], 16), ""), line.split()[1]
            elif re.search(r":\tv[a-z]|%[yz]mm", line):
                wide.setdefault(variant, set()).add(name)
    assert listing.returncode == 0
    assert not set(wide) - {"avx2", "avx512"}, {v: sorted(names)[:10] for v, names in wide.items()}
    assert {"avx2", "avx512"} & set(_core.build_info()["variants"]) == set(wide)  # or the test does not see them


@pytest.mark.full
@pytest.mark.skipif(not X86 or shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
def test_b89_runs_on_a_processor_without_avx():
    """B89: imports and computes on Nehalem, the bits of this processor."""
    code = ("import json; from cmha import _core; from tests import digests; import cmha\n"
            "print(_core.get_variant(), digests.digest(digests.KERNELS['matmul']()))")
    done = subprocess.run(["qemu-x86_64", "-cpu", "Nehalem", sys.executable, "-c", code], cwd=ROOT, capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    from . import digests

    assert done.stdout.split() == ["base", digests.digest(digests.KERNELS["matmul"]())]


@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo") or not X86, reason="Linux lists what a processor has")
def test_the_processor_is_seen_as_the_system_sees_it():
    flags = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(encoding="ascii"), re.MULTILINE)[1].split()
    known = ["avx", "fma", "avx2", "avx512f", "avx512dq", "avx512bw", "avx512vl"]
    assert _core.build_info()["cpu_features"] == [name for name in known if name in flags]


def test_no_openmp_library_is_loaded():
    """A second one beside PyTorch's crashes on macOS, and one of its own would be 300 kB of every wheel."""
    if shutil.which("ldd") is None:
        pytest.skip("no ldd here")
    needed = subprocess.run(["ldd", _core.__file__], capture_output=True, text=True).stdout
    assert "libc" in needed and not re.search("lib(gomp|omp|iomp)", needed)


def test_show_config_says_what_was_built_and_what_runs():
    config = cmha.show_config()
    for value in config.values():
        assert isinstance(value, str) or isinstance(value, list) and all(isinstance(item, str) for item in value)
    assert config["simd"] in config["simd_available"] and set(config["simd_available"]) <= set(config["simd_built"])
    assert len(config["flags"]) == len(config["simd_built"]) and config["simd_built"][-1] == "base"
    assert config["threads_kind"] in ("own team (OpenMP pragma)", "OpenMP (vcomp)", "none")
    assert (config["threads_kind"] != "none") == _core.has_openmp()
    assert re.match(r"(gcc|clang|Apple clang|MSVC) \d", config["compiler"])
    assert re.match(r"3\.\d+\.\d+$", config["cython"])
    for flags, name in zip(config["flags"], config["simd_built"], strict=True):
        assert ("avx512" in flags.lower()) == (name == "avx512")


def test_one_header_knows_the_compiler():
    """What is not C11 stands in compiler.h; simd.h, which names instructions, has two cases more."""
    foreign = r"__builtin_|__attribute__|__declspec|#pragma|__atomic|__asm|\b0x[0-9a-f.]+p"
    for path in [*C.glob("*.[ch]")]:
        if path.name not in ("compiler.h", "simd.h"):
            code = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            assert not re.search(foreign, code), path.name

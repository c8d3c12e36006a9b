"""Compiles every C source of the core for the platforms that this machine is not, each variant with its own flags.

    pip install ziglang && python .ci/compile_elsewhere.py

Nothing is linked and nothing runs: this shows that another platform's headers and another compiler take the sources, with
all warnings as errors. One line for each target and variant; exit code 1 at the first failure. clang and the headers are
those of the package ziglang. There are no headers of Microsoft's in it: the last two targets are clang in MSVC's
disguise, over the headers of mingw-w64, with every GNU extension an error; they show that the MSVC side of compiler.h is
C that reads well, not that cl.exe takes it.
"""

import ast
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ziglang

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "cmha" / "_core" / "c"
SHARED = [SOURCES / "dispatch.c", SOURCES / "team.c"]
KERNELS = sorted(set(SOURCES.glob("*.c")) - set(SHARED))
ZIG = Path(ziglang.__file__).parent
HEADERS = ZIG / "lib"

STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wvla", "-Werror", "-ffp-contract=off", "-O1", f"-I{SOURCES}"]
OWN_TEAM = ["-Xclang", "-fopenmp", "-DCMHA_OPENMP"]
MSVC = ["-std=c11", "-Wgnu", "-fms-compatibility", "-fmsc-version=1940", "-U__GNUC__", "-Xclang", "-fopenmp", "-DCMHA_OPENMP",
        "-D_INC_CORECRT_MATH_DEFINES", "-isystem", str(HEADERS / "include"),
        "-isystem", str(HEADERS / "libc" / "include" / "any-windows-any")]
TARGETS = {  # clang's name -> (zig's subcommand, flags); cc knows each system's headers, clang only what it is told
    "x86_64-linux-musl": ("cc", ["-std=gnu11", *OWN_TEAM]),
    "aarch64-linux-musl": ("cc", ["-std=gnu11", *OWN_TEAM]),
    "x86_64-macos": ("cc", ["-std=gnu11", *OWN_TEAM]),
    "aarch64-macos": ("cc", ["-std=gnu11", *OWN_TEAM]),
    "x86_64-windows-gnu": ("cc", ["-std=gnu11"]),
    "aarch64-windows-gnu": ("cc", ["-std=gnu11"]),
    "x86_64-pc-windows-msvc": ("clang", MSVC),
    "aarch64-pc-windows-msvc": ("clang", MSVC),
}


def variants(target):
    """{name: flags} of setup.py for this target, read off its assignments: importing it would build."""
    known = {}
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("X86", "ARM", "AVX2", "AVX512", "VARIANTS"):
            exec(compile(ast.Module([node], []), "setup.py", "exec"), known)
    mine = {"1", known["ARM"] if target.startswith("aarch64") else known["X86"]}
    return {name: flags for name, (where, flags, _) in known["VARIANTS"].items() if where in mine}


def compile_all(target, name, sources, flags):
    """One compiler over several sources; what it says when it fails, else ''."""
    command, more = TARGETS[target]
    option = ["-target", target] if command == "cc" else [f"--target={target}"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([ZIG / "zig", command, *option, "-c", *STRICT, *more, *flags, *map(str, sources)],
                              cwd=folder, capture_output=True, text=True)
    return f"{target} {name}: {' '.join(flags)}\n{done.stderr}" if done.returncode or done.stderr else ""


def main():
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ZIG_GLOBAL_CACHE_DIR"] = os.environ["ZIG_LOCAL_CACHE_DIR"] = cache
        Path(cache, "omp.h").write_text("int omp_get_thread_num(void);\nint omp_get_num_threads(void);\n")
        MSVC.extend(["-isystem", cache])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            tasks = []
            for target in TARGETS:
                here = variants(target)
                have = [f"-DCMHA_HAVE_{name.upper()}={' '.join(flags)}" for name, flags in here.items()]
                tasks.append((target, "dispatch, team", pool.submit(compile_all, target, "shared", SHARED, have)))
                for name, flags in here.items():
                    flags = [*flags, f"-DCMHA_VARIANT={name}", f"-DCMHA_{name.upper()}"]
                    tasks.append((target, name, pool.submit(compile_all, target, name, KERNELS, flags)))
            for target, name, task in tasks:
                trouble = task.result()
                if trouble:
                    pool.shutdown(cancel_futures=True)
                    sys.exit(trouble)
                print(f"{target}: {name}: no warnings", flush=True)


if __name__ == "__main__":
    main()

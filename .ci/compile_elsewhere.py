"""Compiles every C source of the core for the platforms that this machine is not, each variant with its own flags.

    pip install ziglang && python .ci/compile_elsewhere.py

Nothing is optimised, linked or run: this shows that another compiler takes the sources with the headers of another
system, all warnings as errors. One line for each target and variant; exit code 1 at the first failure. clang and the
headers are those of the package ziglang. It has none of Microsoft's: the last two targets are clang in MSVC's disguise,
with a few declarations instead of a C library and every GNU extension an error. They show that the MSVC side of
compiler.h and simd.h is whole and that the rest is plain C11, not that cl.exe takes it.
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

STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wvla", "-Werror", "-ffp-contract=off", f"-I{SOURCES}"]
NO_BACK_END = ["-c", "-emit-llvm", "-O1", "-Xclang", "-disable-llvm-passes"]  # all that looks at sources, and quick
PRAGMA = ["-Xclang", "-fopenmp", "-DCMHA_OPENMP"]
POSIX = ["-std=gnu11", *PRAGMA]
MSVC = ["-std=c11", "-fms-compatibility", "-fmsc-version=1940", "-Wgnu", "-Wno-language-extension-token", *PRAGMA]
MSVC += ["-ffreestanding"]
LIBRARY = {  # for MSVC
    "math.h": "double sqrt(double);\nfloat sqrtf(float);\n"
              "#define INFINITY ((float)1e300)\n#define NAN (INFINITY * 0.0f)\n",
    "omp.h": "int omp_get_thread_num(void);\nint omp_get_num_threads(void);\n",
    "string.h": "#include <stddef.h>\nvoid *memcpy(void *, const void *, size_t);\nvoid *memset(void *, int, size_t);\n"
                "int strcmp(const char *, const char *);\n",
}
TARGETS = {  # clang's name -> (flags, folders of the system's headers)
    "x86_64-linux-musl": (POSIX, ["x86_64-linux-musl", "generic-musl"]),
    "aarch64-linux-musl": (POSIX, ["aarch64-linux-musl", "generic-musl"]),
    "x86_64-apple-macos11": (POSIX, ["any-darwin-any"]),
    "aarch64-apple-macos11": (POSIX, ["any-darwin-any"]),
    "x86_64-w64-windows-gnu": (["-std=gnu11"], ["any-windows-any"]),
    "aarch64-w64-windows-gnu": (["-std=gnu11"], ["any-windows-any"]),
    "x86_64-pc-windows-msvc": (MSVC, []),
    "aarch64-pc-windows-msvc": (MSVC, []),
}


def variants(target):
    """{name: flags} of setup.py for this target, read off its assignments: importing it would build."""
    wanted, known = ("X86", "ARM", "AVX2", "AVX512", "VARIANTS"), {}
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in wanted:
            exec(compile(ast.Module([node], []), "setup.py", "exec"), known)
    mine = {"1", known["ARM"] if target.startswith("aarch64") else known["X86"]}
    return {name: flags for name, (where, flags, _) in known["VARIANTS"].items() if where in mine}


def compile_all(target, sources, flags, library):
    """Several sources with one command; what the compiler says about them, '' if nothing."""
    more, folders = TARGETS[target]
    headers = [HEADERS / "include", *(HEADERS / "libc" / "include" / f for f in folders)] + [library] * (not folders)
    command = [ZIG / "zig", "clang", f"--target={target}", "-nostdinc", *(f"-isystem{h}" for h in headers)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, *STRICT, *more, *NO_BACK_END, *flags, *map(str, sources)], cwd=folder,
                              capture_output=True, text=True)
    return done.stderr or ("" if done.returncode == 0 else f"exit code {done.returncode}")


def main():
    with tempfile.TemporaryDirectory() as library, ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, text in LIBRARY.items():
            Path(library, name).write_text(text)
        tasks = []
        for target in TARGETS:
            here = variants(target)
            have = [f"-DCMHA_HAVE_{name.upper()}={' '.join(flags)}" for name, flags in here.items()]
            tasks.append((f"{target}: shared", pool.submit(compile_all, target, SHARED, have, library)))
            for name, flags in here.items():
                flags = [*flags, f"-DCMHA_VARIANT={name}", f"-DCMHA_{name.upper()}"]
                tasks.append((f"{target}: {name}", pool.submit(compile_all, target, KERNELS, flags, library)))
        for what, task in tasks:
            said = task.result()
            if said:
                pool.shutdown(cancel_futures=True)
                sys.exit(f"{what}\n{said}")
            print(f"{what}: no warnings", flush=True)


if __name__ == "__main__":
    main()

"""Build cmha._core: one Cython module, and every C kernel once per instruction set (see _core/c/variant.h).

Environment: CMHA_DEBUG=1 turns Cython's bounds checks on; CMHA_SANITIZE=1 builds under ASan and UBSan;
CMHA_NO_OPENMP=1 builds without threads. Needs gcc or clang.
"""

import os
import platform
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE = Path("src/cmha/_core")
KERNELS = sorted(str(p) for p in (CORE / "c").glob("*.c") if p.name not in ("dispatch.c", "team.c"))
HEADERS = sorted(str(p) for p in (CORE / "c").glob("*.h"))
X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
ARM = platform.machine().lower() in ("aarch64", "arm64")
AVX2 = ["-mavx2", "-mfma"]
VARIANTS = {  # name -> (flags, on this machine)
    "base": ([], True),
    "avx2": (["-DCMHA_AVX2", *AVX2], X86),
    "avx512": (["-DCMHA_AVX512", *AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"], X86),
    "neon": (["-DCMHA_NEON"], ARM),
}
DEBUG, SANITIZE = bool(os.environ.get("CMHA_DEBUG")), bool(os.environ.get("CMHA_SANITIZE"))
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
SANITIZERS += ["-fno-wrapv"]  # Python's own flags have -fwrapv, which makes overflow legal and so unseen
# Never -ffast-math (it turns subnormals off for the whole process), never -march=native (the wheel must run elsewhere).
FLAGS = ["-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
FLAGS += ["-O1", "-g1", "-fno-inline", "-DCMHA_SANITIZE", *SANITIZERS] if SANITIZE else ["-O3", "-g0"]


class BuildVariants(build_ext):
    """Compiles the kernels of each variant with its own flags and links all of them into the one extension."""

    def build_extension(self, ext):
        openmp = [] if os.environ.get("CMHA_NO_OPENMP") else self.openmp_flags()
        if not openmp:
            print("cmha: this is not gcc with OpenMP: building for one thread")
        objects, tasks = [], []
        for name, (flags, here) in VARIANTS.items():
            if not here or not self.compiles("int main(void) { return 0; }", flags):
                continue
            ext.define_macros.append((f"CMHA_HAVE_{name.upper()}", "1"))
            folder = os.path.join(self.build_temp, name)
            all_flags = [*FLAGS, *openmp, f"-DCMHA_VARIANT={name}", *flags]
            tasks += [(source, folder, all_flags) for source in KERNELS]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for built in pool.map(lambda task: self.compile_kernel(*task), tasks):
                objects += built
        ext.extra_objects = objects
        ext.extra_compile_args = [*FLAGS, *openmp] + ([] if SANITIZE else ["-O2"])  # for calls and checks
        ext.extra_link_args = ["-pthread"] + (SANITIZERS if SANITIZE else [])  # no libgomp: see team.c
        super().build_extension(ext)

    def compile_kernel(self, source, folder, flags):
        built = self.compiler.object_filenames([source], output_dir=folder)
        newest = max(os.path.getmtime(path) for path in (source, *HEADERS, "setup.py"))
        if self.force or not os.path.exists(built[0]) or os.path.getmtime(built[0]) <= newest:
            self.compiler.compile([source], output_dir=folder, extra_postargs=flags)
        return built

    def compiles(self, program, flags):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(program)
            try:
                self.compiler.compile([str(source)], output_dir=folder, extra_postargs=flags)
            except Exception:  # each compiler class raises its own
                return False
            return True

    def openmp_flags(self):
        """gcc's way of cutting blocks out is what team.c answers to; clang's is another."""
        program = "#if !defined(_OPENMP) || defined(__clang__)\n#error no\n#endif\nint main(void) { return 0; }\n"
        return ["-fopenmp", "-pthread"] if self.compiles(program, ["-fopenmp"]) else []


core = Extension(
    "cmha._core",
    [str(CORE / "_core.pyx"), str(CORE / "c" / "dispatch.c"), str(CORE / "c" / "team.c")],
    include_dirs=[str(CORE / "c")],
    depends=[*KERNELS, *HEADERS, *(str(p) for p in CORE.glob("*.pxi"))],
)
checked = {"boundscheck": True, "wraparound": False, "initializedcheck": True, "cdivision": False}
fast = {"boundscheck": False, "wraparound": False, "initializedcheck": False, "cdivision": True}
setup(
    ext_modules=cythonize(
        [core],
        build_dir="build/cython",
        compiler_directives={"language_level": "3", "embedsignature": True, **(checked if DEBUG else fast)},
    ),
    cmdclass={"build_ext": BuildVariants},
)

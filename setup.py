"""Build cmha._core: one Cython module, and every C kernel once per instruction set (see _core/c/variant.h).

Environment: CMHA_DEBUG=1 turns Cython's bounds checks on; CMHA_SANITIZE=1 builds under ASan and UBSan;
CMHA_NO_OPENMP=1 builds without threads. CC and CFLAGS are heard, with two limits: what is built runs on every processor
of its architecture, and gives the promised bits. So -march=native is overruled by the plain -march that comes after it
(wider code is in the variants, chosen at run time), and CFLAGS that still turn wider instructions on, or -ffast-math,
end the build. Needs gcc, clang, or MSVC (Visual Studio 2022).
"""

import contextlib
import os
import platform
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE = Path("src/cmha/_core")
KERNELS = sorted(str(p) for p in (CORE / "c").glob("*.c") if p.name not in ("dispatch.c", "team.c"))
HEADERS = sorted(str(p) for p in (CORE / "c").glob("*.h"))
DEBUG, SANITIZE = bool(os.environ.get("CMHA_DEBUG")), bool(os.environ.get("CMHA_SANITIZE"))

# What the compiler builds for, asked of the compiler: another machine's Python may run it (cross-building).
X86 = "defined(__x86_64__) || defined(_M_X64)"
ARM = "defined(__aarch64__) || defined(_M_ARM64)"
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
VARIANTS = {  # name -> (the target it is for, flags of gcc and clang, flags of MSVC)
    "base": ("1", [], []),
    "avx2": (X86, AVX2, ["/arch:AVX2"]),
    "avx512": (X86, AVX512, ["/arch:AVX512"]),
    "neon": (ARM, [], []),
}
BASELINES = [  # (target, the flag that takes back what CFLAGS say, what may not be there after it)
    (X86, "-march=x86-64", "defined(__SSE3__) || defined(__AVX__)"),
    (f"({ARM}) && !defined(__APPLE__)", "-march=armv8-a",
     "defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_SVE)"),
]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
SANITIZERS += ["-fno-wrapv"]  # Python's own flags have -fwrapv, which makes overflow legal and so unseen
FLAGS = ["-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
FLAGS += ["-O1", "-g1", "-fno-inline", "-DCMHA_SANITIZE", *SANITIZERS] if SANITIZE else ["-O3", "-g0"]
MSVC_FLAGS = ["/std:c11", "/O2", "/fp:precise"]  # and no contraction: compiler.h


@contextlib.contextmanager
def silence():
    """Nothing on stdout and stderr, from child processes either."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(kept, 1):
            os.dup2(copy, number)
            os.close(copy)


def one_architecture(environ, cflags, machine):
    """python.org's Python for macOS builds for two processors at once, whose kernels need flags of their own: what to
    set in the environment so that it builds for this machine's alone."""
    words = environ.get("ARCHFLAGS", cflags).split()
    found = {after for before, after in zip(words, words[1:], strict=False) if before == "-arch"}
    if len(found) < 2:
        return {}
    if "ARCHFLAGS" in environ:
        raise SystemExit(f"cmha: ARCHFLAGS must have one -arch; got {environ['ARCHFLAGS']}, build a wheel for each")
    version = sysconfig.get_config_var("MACOSX_DEPLOYMENT_TARGET") or "11.0"
    return {"ARCHFLAGS": f"-arch {machine}", "_PYTHON_HOST_PLATFORM": f"macosx-{version}-{machine}"}


class BuildVariants(build_ext):
    """Compiles the kernels of each variant with its own flags and links all of them into the one extension."""

    def build_extension(self, ext):
        self.msvc = self.compiler.compiler_type == "msvc"
        common = [*(MSVC_FLAGS if self.msvc else FLAGS), *self.baseline()]
        openmp = [] if os.environ.get("CMHA_NO_OPENMP") else self.openmp_flags()
        if not openmp:
            print("cmha: no OpenMP asked for, or none that is known with this compiler: building for one thread")
        else:
            ext.define_macros.append(("CMHA_OPENMP", None))  # for all; the flag for kernels, as Cython's C wants omp.h
        objects, tasks = [], []
        for name, (target, flags, msvc_flags) in VARIANTS.items():
            flags = [*common, *openmp, *(msvc_flags if self.msvc else flags)]
            if not self.holds(target):
                continue
            if not self.holds("1", flags):
                print(f"cmha: this compiler does not take {' '.join(flags)}: building without {name}")
                continue
            ext.define_macros.append((f"CMHA_HAVE_{name.upper()}", " ".join(flags)))
            all_flags = [*flags, f"-DCMHA_VARIANT={name}", f"-DCMHA_{name.upper()}"]
            all_flags += ["-DCMHA_OPENMP"] if openmp else []
            tasks += [(source, os.path.join(self.build_temp, name), all_flags) for source in KERNELS]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for built in pool.map(lambda task: self.compile_kernel(*task), tasks):
                objects += built
        ext.extra_objects = objects
        ext.extra_compile_args = common + ([] if SANITIZE or self.msvc else ["-O2"])  # for calls and checks
        if not self.msvc:
            ext.extra_link_args = ["-pthread"] + (SANITIZERS if SANITIZE else [])  # no OpenMP library: see team.c
        super().build_extension(ext)

    def compile_kernel(self, source, folder, flags):
        built = self.compiler.object_filenames([source], output_dir=folder)
        newest = max(os.path.getmtime(path) for path in (source, *HEADERS, "setup.py"))
        if self.force or not os.path.exists(built[0]) or os.path.getmtime(built[0]) <= newest:
            self.compiler.compile([source], output_dir=folder, extra_postargs=flags)
        return built

    def holds(self, condition, flags=()):
        """Does the preprocessor's condition hold, where the compiler takes these flags?"""
        with tempfile.TemporaryDirectory() as folder, silence():
            source = Path(folder, "probe.c")
            source.write_text(f"#if !({condition})\n#error no\n#endif\nint main(void) {{ return 0; }}\n")
            try:
                self.compiler.compile([str(source)], output_dir=folder, extra_postargs=list(flags))
            except Exception:  # each compiler class raises its own
                return False
            return True

    def baseline(self):
        """Flags that make the build one for every processor of its architecture; SystemExit where that cannot be."""
        if not self.holds("1"):
            raise SystemExit("cmha: the C compiler does not compile an empty program; CC and CFLAGS say which and how")
        if self.holds("defined(__FAST_MATH__) || defined(_M_FP_FAST)"):
            raise SystemExit("cmha: CFLAGS must not have -ffast-math or -Ofast: results would not be the promised bits")
        for target, flag, forbidden in BASELINES:
            if self.holds(target):
                flags = [] if self.msvc else [flag]
                if self.holds(forbidden, flags):
                    raise SystemExit(f"cmha: CFLAGS turn on instructions ({forbidden}) that not every processor has; "
                                     "take -m options out, faster ones are chosen at run time anyway")
                return flags
        return []

    def openmp_flags(self):
        """For the pragma alone: team.c answers gcc and clang, and no library of theirs is linked; MSVC has its own."""
        if self.msvc:
            flags = ["/openmp"]
        elif os.name == "nt":
            return []
        elif self.holds("defined(__clang__)"):
            flags = ["-Xclang", "-fopenmp", "-pthread"]  # past the driver: Apple's refuses -fopenmp
        else:
            flags = ["-fopenmp", "-pthread"]
        return flags if self.holds("defined(_OPENMP)", flags) else []


if sys.platform == "darwin":
    os.environ.update(one_architecture(os.environ, sysconfig.get_config_var("CFLAGS") or "", platform.machine()))

core = Extension(
    "cmha._core",
    [str(CORE / "_core.pyx"), str(CORE / "c" / "dispatch.c"), str(CORE / "c" / "team.c")],
    include_dirs=[str(CORE / "c")],
    depends=[*KERNELS, *HEADERS, *(str(p) for p in CORE.glob("*.pxi"))],
)
# Proven by tests/test_free_threads.py on a Python without a GIL: importing this module leaves it off.
directives = {"language_level": "3", "embedsignature": True, "freethreading_compatible": True}
checked = {"boundscheck": True, "wraparound": False, "initializedcheck": True, "cdivision": False}
fast = {"boundscheck": False, "wraparound": False, "initializedcheck": False, "cdivision": True}
setup(
    ext_modules=cythonize(
        [core],
        build_dir="build/cython",
        compiler_directives=directives | (checked if DEBUG else fast),
    ),
    cmdclass={"build_ext": BuildVariants},
)

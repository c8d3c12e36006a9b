"""cmha info: what the core was built with and what it uses on this machine."""

from __future__ import annotations

from argparse import Namespace

from cmha.cli.options import Parser

DESCRIPTION = "Shows how the core was built and what it uses here: instruction set, threads, compiler."
EPILOG = """\
CMHA_SIMD=base|avx2|avx512|neon forces an instruction set, OMP_NUM_THREADS sets the threads; results are the same bits.
"""


def add_options(parser: Parser) -> None:
    pass


def run(args: Namespace) -> None:
    import cmha

    values = cmha.show_config()
    width = max(map(len, values))
    for name, value in values.items():
        if isinstance(value, list):  # flags, which have spaces, one below the other
            value = (f"\n{'':<{width}}  " if any(" " in item for item in value) else ", ").join(value)
        print(f"{name:<{width}}  {value}")

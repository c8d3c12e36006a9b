"""How training scales over processes: measured on this machine, then modelled for several.

    python bench/scaling.py [--presets tiny,char,baby] [--rounds N] [--json FILE]

Measured, in alternating rounds, medians: tokens/s of `cmha train` with one process of one thread, with one process of
two threads, and with two processes of one thread each under mpiexec; and the time of one exchange of gradients between
two processes of this machine.

Modelled: p machines of two threads, the same batch for all of them together, every machine computing 1/p of it. A step
takes   compute / p + update + 2 (1 - 1/p) G / link + 2 log2(p) latency   where G are the bytes of the gradient.
`update`, what every machine does in full, is what two steps of half the batch take longer than one.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from arguments import Parser, output, positive

WAYS = {"1 process, 1 thread": (1, 1), "1 process, 2 threads": (1, 2), "2 processes, 1 thread": (2, 1)}
SIZES = {"tiny": (8, 300), "char": (12, 40), "baby": (8, 3)}  # windows in a step, steps of each half
LINKS = {"1 Gb/s": (117e6, 50e-6), "10 Gb/s": (1.17e9, 20e-6), "100 Gb/s": (11.7e9, 3e-6)}  # bytes/s, latency
MACHINES = (2, 4, 8, 16, 32)


def launcher():
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else "mpiexec"


def environment(threads):
    return os.environ | {"OMP_NUM_THREADS": str(threads)}


def tokens_per_second(text, folder, preset, processes, threads, batch, micro_batch, steps):
    out = Path(folder) / f"{time.monotonic_ns()}"
    command = [sys.executable, "-m", "cmha", "train", text, "--preset", preset, "--out", out, "--steps", 2 * steps,
               "--batch-size", batch, "--micro-batch-size", micro_batch, "--eval-interval", steps]  # fmt: skip
    if processes > 1:
        command = [launcher(), "-n", processes, *command]
    done = subprocess.run(list(map(str, command)), env=environment(threads), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"scaling.py: error: {done.stderr.strip().splitlines()[-1]}")
    _, warm = map(json.loads, (out / "log.jsonl").read_text().splitlines())  # the first steps take memory
    return warm["tokens_per_second"]


def exchange(parameters, rounds):
    """Seconds of one reduce of that many floats, printed by rank 0; runs under mpiexec."""
    import numpy as np

    from cmha import _core
    from cmha.train import parallel
    from cmha.train.accumulate import Gradients

    seconds = []
    with parallel.start() as processes:
        for _ in range(rounds + 1):
            gradients = Gradients(0.0, [_core.from_buffer(np.ones(parameters, np.float32))])
            processes.agree(None)  # together
            start = time.perf_counter()
            processes.reduce(gradients)
            seconds.append(time.perf_counter() - start)
        if processes.rank == 0:
            print(statistics.median(seconds[1:]))


def measured_exchange(parameters):
    command = [launcher(), "-n", "2", sys.executable, __file__, "--exchange", str(parameters)]
    return float(subprocess.run(command, env=environment(1), capture_output=True, text=True, check=True).stdout)


def parameters_of(preset, vocab_size):
    import cmha

    cfg = cmha.GPTConfig.preset(preset, vocab_size=vocab_size)
    D, L = cfg.n_embd, cfg.n_layer
    return cfg.vocab_size * D + cfg.block_size * D + L * (12 * D * D + 13 * D) + 2 * D


def measure(preset, text, vocab_size, folder, rounds):
    batch, steps = SIZES[preset]
    found = {name: [] for name in WAYS}
    halves = []  # of the work, to see what does not get less
    for _ in range(rounds):
        for name, (processes, threads) in WAYS.items():
            run = (preset, processes, threads, batch, batch // 2, steps)
            found[name].append(tokens_per_second(text, folder, *run))
        halves.append(tokens_per_second(text, folder, preset, 1, 2, batch // 2, batch // 2, steps))
    T = {"tiny": 32, "char": 64, "baby": 256}[preset]
    rates = {name: statistics.median(values) for name, values in found.items()}
    whole = batch * T / rates["1 process, 2 threads"]
    half = batch // 2 * T / statistics.median(halves)
    parameters = parameters_of(preset, vocab_size)
    return {"rates": rates, "step": whole, "update": max(0.0, 2 * half - whole), "tokens": batch * T,
            "parameters": parameters, "exchange": measured_exchange(parameters)}  # fmt: skip


def speedup(result, link, machines, tokens):
    """Of so many machines over one, for a step of so many tokens."""
    bandwidth, latency = LINKS[link]
    compute = (result["step"] - result["update"]) * tokens / result["tokens"]
    sent = 2 * (1 - 1 / machines) * 4 * result["parameters"] / bandwidth + 2 * math.log2(machines) * latency
    return (compute + result["update"]) / (compute / machines + result["update"] + sent)


def show(preset, result):
    print(f"\n{preset}: {result['parameters']:,} parameters, {result['tokens']:,} tokens a step")
    for name, rate in result["rates"].items():
        print(f"  {name:<22} {rate:10,.0f} tokens/s")
    one, two = result["rates"]["1 process, 2 threads"], result["rates"]["2 processes, 1 thread"]
    print(f"  two processes / two threads: {two / one:.2f}")
    print(f"  a step {1e3 * result['step']:.1f} ms, of which update {1e3 * result['update']:.1f} ms; "
          f"exchange of {4 * result['parameters'] / 1e6:.1f} MB here {1e3 * result['exchange']:.1f} ms")  # fmt: skip
    for tokens in (result["tokens"], 32 * result["tokens"]):
        print(f"  {tokens:,} tokens a step, times as fast as one machine:")
        print(f"    {'machines':<10}" + "".join(f"{p:>7}" for p in MACHINES))
        for link in LINKS:
            print(f"    {link:<10}" + "".join(f"{speedup(result, link, p, tokens):7.1f}" for p in MACHINES))


def main():
    parser = Parser("scaling.py", __doc__)
    parser.add_argument("--presets", default=",".join(SIZES), metavar="LIST")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N")
    parser.add_argument("--json", type=output, metavar="FILE", help="write everything measured to FILE")
    parser.add_argument("--exchange", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.exchange:
        return exchange(args.exchange, 10)
    unknown = [preset for preset in args.presets.split(",") if preset not in SIZES]
    if unknown:
        parser.error(f"no such preset: {', '.join(map(repr, unknown))}; there are: {', '.join(SIZES)}")
    from cmha.text.corpora import default_text

    results = {}
    with tempfile.TemporaryDirectory(prefix="cmha-bench-") as folder:
        text = Path(folder) / "text"
        cut = default_text()[:40_000]  # little to validate
        text.write_text(cut, encoding="utf-8")
        for preset in args.presets.split(","):
            results[preset] = measure(preset, text, len(set(cut)), folder, args.rounds)
            show(preset, results[preset])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

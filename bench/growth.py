"""How time and memory of cmha grow with the context, the width, the layers and the threads: python bench/growth.py

Each point is one forward and backward pass of a GPT (of attention alone, for the context) after one that is not
counted: the median time of some rounds, and the peak of the core's pool above what the model itself holds. The exponent
is the slope of a straight line through the logarithms of the last three points.
"""

import json
import statistics
import sys
import time

import machine
import numpy as np
from arguments import Parser, output, picture, positive, seconds
from tqdm import tqdm

import cmha
from cmha import GPT, GPTConfig

AXES = {
    "attention T": ("context T of causal attention, 12 heads of 64", [128, 256, 512, 1024, 2048, 4096, 8192]),
    "context T": ("context T of a GPT, 4 layers, 256 wide", [128, 256, 512, 1024, 2048]),
    "width D": ("width D of a GPT, 4 layers, T 128", [64, 128, 256, 512, 1024]),
    "layers L": ("layers L of a GPT, 256 wide, T 128", [1, 2, 4, 8, 16]),
    "threads": ("threads for a GPT, 6 layers, 384 wide, T 256", None),
}


def attention(T):
    """A call that runs one pass of attention alone."""
    random = np.random.default_rng(T)
    q, k, v, dy = (cmha.tensor(random.standard_normal((1, 12, T, 64), dtype=np.float32)) for _ in range(4))

    def run():
        for x in (q, k, v):
            x.requires_grad, x.grad = True, None
        cmha.scaled_dot_product_attention(q, k, v, is_causal=True).backward(dy)

    return run


def model(batch_size=2, **sizes):
    """A call that runs one pass of a GPT."""
    gpt = GPT(GPTConfig(**{"vocab_size": 65, "block_size": 128, "n_layer": 4, "n_head": 4, "n_embd": 256} | sizes))
    ids = np.random.default_rng(1).integers(0, 65, (batch_size, gpt.cfg.block_size))
    parameters = gpt.parameters()

    def run():
        for parameter in parameters:
            parameter.grad = None
        gpt(ids, ids)[1].backward()

    return run


def prepared(axis, value):
    if axis == "attention T":
        return attention(value)
    if axis == "threads":
        cmha.set_num_threads(value)
        return model(4, n_layer=6, n_head=6, n_embd=384, block_size=256)
    name = {"context T": "block_size", "width D": "n_embd", "layers L": "n_layer"}[axis]
    return model(**{name: value})


def measured(run, seconds):
    """(median seconds of a pass, bytes it needs at its peak beside the model)"""
    held = cmha.memory_stats()["allocated"]
    run()
    cmha.reset_peak_memory_stats()
    times = []
    while len(times) < 3 or sum(times) < seconds and len(times) < 200:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times), cmha.memory_stats()["peak"] - held


def exponent(x, y):
    """p of y ~ x^p at the far end."""
    return float(np.polyfit(np.log(x[-3:]), np.log(y[-3:]), 1)[0])


def draw(path, report):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(2, len(report["axes"]), figsize=(3.1 * len(report["axes"]), 5.6),
                                     layout="constrained", squeeze=False)  # fmt: skip
    for column, (axis, found) in zip(places.T, report["axes"].items(), strict=True):
        for place, what, unit in ((column[0], "seconds", 1.0), (column[1], "bytes", 2.0**20)):
            y = np.array(found[what]) / unit
            place.loglog(found["values"], y, "o-", markersize=4)
            place.set_xticks(found["values"], [str(v) for v in found["values"]], fontsize=7, rotation=45)
            place.minorticks_off()
            place.grid(alpha=0.3)
            if axis == "threads":  # what matters there is the share that is left
                place.set(xscale="linear", yscale="linear", ylim=(0, None))
            if found["exponents"]:
                place.set_title(f"~ {axis[-1]}$^{{{found['exponents'][what]:.2f}}}$", fontsize=9)
        column[1].set_xlabel(found["what"], fontsize=7)
    places[0, 0].set_ylabel("seconds, forward + backward")
    places[1, 0].set_ylabel("MiB at the peak")
    figure.suptitle(f"cmha on {report['head']['machine']}, {report['head']['threads']} threads", fontsize=9)
    figure.savefig(path, dpi=110)


def main(argv=None):
    parser = Parser("growth.py", __doc__)
    add = parser.add_argument
    add("--threads", type=positive, default=2, metavar="N", help="threads (default %(default)s)")
    add("--seconds", type=seconds, default=1.0, metavar="S", help="for each point (default %(default)s)")
    add("--smoke", action="store_true", help="two points of each axis: does everything run?")
    add("--json", type=output, metavar="FILE", help="write everything measured to FILE")
    add("--plot", type=picture, metavar="FILE", help="draw it into FILE (needs matplotlib: the extra `plot`)")
    args = parser.parse_args(argv)
    report = {"head": machine.describe(args.threads), "axes": {}}
    for axis, (what, values) in AXES.items():
        values = list(range(1, args.threads + 1)) if values is None else values[:2] if args.smoke else values
        found = {"what": what, "values": values, "seconds": [], "bytes": [], "exponents": {}}
        for value in tqdm(values, desc=axis, leave=False, disable=not sys.stderr.isatty()):
            cmha.set_num_threads(args.threads)
            taken, size = measured(prepared(axis, value), 0.0 if args.smoke else args.seconds)
            found["seconds"].append(taken)
            found["bytes"].append(size)
        if axis != "threads" and len(values) >= 3:
            found["exponents"] = {what: exponent(values, found[what]) for what in ("seconds", "bytes")}
        report["axes"][axis] = found
        print(f"{found['what']}")
        for value, taken, size in zip(values, found["seconds"], found["bytes"], strict=True):
            print(f"  {value:>6} {1e3 * taken:>10.2f} ms {size / 2**20:>10.2f} MiB")
        if found["exponents"]:
            print("  exponent {seconds:>6.2f}     {bytes:>13.2f}".format(**found["exponents"]))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    if args.plot:
        draw(args.plot, report)


if __name__ == "__main__":
    main()

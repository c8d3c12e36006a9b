"""The result on paper: the head, a table that fits the terminal, JSON, a plot."""

import json
import shutil
import sys
import textwrap


def quantity(value, kind):
    """Seconds or bytes with three digits and a unit."""
    if value is None:
        return ""
    units = [("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)]
    if kind in ("memory", "size"):
        units = [("GB", 1e9), ("MB", 1e6), ("kB", 1e3)]
    unit, scale = next((u for u in units if value >= u[1]), units[-1])
    return f"{value / scale:.3g} {unit}" if value / scale < 1000 else f"{value / scale:.0f} {unit}"


def ratio(value):
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


EVERY_TORCH = ("torch", "torch+malloc", "torch.compile", "transformers")  # a goal is held against the best of them
TITLES = {"jax": "JAX", "numpy": "NumPy", "ctranslate2": "CTranslate2", "torch bf16": "PyTorch bfloat16"}
DISTURBED = 0.1  # share of the CPU that others may take before a row is marked


class Table:
    """Prints rows as they come. Columns are fixed by the names of all rows and sides; where the terminal is too narrow
    the peers' own times go first, then each row becomes a small paragraph."""

    def __init__(self, names, peers, goals, write, width=None):
        self.peers, self.goals, self.write = peers, goals, write
        self.name_width = max(map(len, [*names, "row"]))
        if width is None:
            width = shutil.get_terminal_size((10**6, 0)).columns if sys.stdout.isatty() else 10**6
        self.style = next((s for s in ("full", "ratios") if len(self._line(s)) <= width), "paragraphs")

    def _line(self, style, name="", ours="", share="", peers=None, goal=""):
        texts = peers or {peer: "" for peer in self.peers}
        cells = [f"{name:<{self.name_width}}", f"{ours:>9}", f"{share:>7}"]
        cells += [f"{text:>{max(15 if style == 'full' else 6, len(peer))}}" for peer, text in texts.items()]
        return ("  " if style == "full" else " ").join(cells + ([f"{goal:>6}"] if self.goals else []))

    def head(self, lines):
        for name, text in lines.items():
            self.write(f"{name:<9} {text}")
        self.write("")
        if self.style == "paragraphs":
            return
        line = self._line(self.style, "row", "cmha", "of peak", {peer: peer for peer in self.peers}, "goal")
        self.write(line)
        self.write("-" * len(line))

    def row(self, result):
        ours = quantity(result.value, result.kind) or "failed"
        ours = f"~{ours}" if (result.disturbed or 0) > DISTURBED else ours
        share = "" if result.share is None else f"{100 * result.share:.0f}%"
        goal = "" if result.goal is None else f"{result.goal:g}" + (" !" if result.reached is False else "")
        peers = {peer: self._peer(result, peer) for peer in self.peers}
        if self.style == "paragraphs":
            shown = {"cmha": ours, "of peak": share, **peers, **({"goal": goal} if self.goals else {})}
            self.write(result.name)
            for name, text in shown.items():
                if text:
                    self.write(f"  {name} {text}")
        else:
            self.write(self._line(self.style, result.name, ours, share, peers, goal).rstrip())
        for line in notes(result):
            self.write(f"    {line}")

    def _peer(self, result, peer):
        if peer in result.differs:
            return "differs"
        if peer in result.errors:
            return "failed"
        if peer not in result.ratios:
            return ""
        text = ratio(result.ratios[peer])
        return text if self.style == "ratios" else f"{text} ({quantity(result.values[peer], result.kind)})"


def notes(result):
    """What has to be said under a row."""
    lines = [
        f"{side} differs by {d:.1e} of the result's norm, more than {b:.0e}: no ratio"
        for side, (d, b) in result.differs.items()
    ]
    return lines + [f"{side}: {error}" for side, error in result.errors.items()]


LEGEND = """\
Numbers of the peers: their time (or size) over cmha's, above 1 where cmha is better; in brackets their own. All results
were compared before anything was timed. {rounds}, sides in turn, each alone on the machine.
Of peak: the least time that the row's FLOP and bytes need at {flops:.0f} GFLOP/s and {bytes:.1f} GB/s ({how}), over
cmha's time; above 100% where caches help. Of memory: bytes counted on paper over bytes used.
~ marks rows during which other programs took more than {disturbed:.0%} of the CPU time; the load was {before}
before and {after} after."""


def _middle(report):
    rounds = " of one round" if report["rounds"] == 1 else f" of {report['rounds']} rounds"
    return ("best times" if report["best"] else "medians") + rounds


def legend(peaks, args, before, after):
    rounds = _middle(vars(args)).capitalize()
    rates = {"flops": peaks["flops"] / 1e9, "bytes": peaks["bytes"] / 1e9, "how": peaks["how"]}
    text = LEGEND.format(rounds=rounds, before=before, after=after, disturbed=DISTURBED, **rates)
    return "\n" + textwrap.fill(" ".join(text.split()), min(100, shutil.get_terminal_size().columns))


def write_json(path, report):
    with open(path, "w", encoding="utf-8") as file:
        finite = json.loads(json.dumps(report), parse_constant=lambda _: None)  # JSON has no infinity
        json.dump(finite, file, indent=1)
        file.write("\n")


def read_json(path):
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    if not isinstance(report, dict) or not {"head", "peers", "rows"} <= set(report):
        raise ValueError(f"no report of compare.py in {path!r}")
    return report


GAP = "not measured here"


def markdown(report, rows):
    """For docs/how-fast.md: what was measured where, then a line for every row that there is, measured or not."""
    others = [peer for peer in report["peers"] if peer not in EVERY_TORCH]
    found = {result["name"]: result for result in report["rows"]}
    lines = ["row", "cmha", "of peak", "PyTorch", *(TITLES.get(peer, peer) for peer in others), "goal"]
    lines = [lines, ["---"] * len(lines)]
    for row in rows:
        result = found.get(row.name, {})
        ratios = result.get("ratios") or {}
        torch = [ratios[peer] for peer in EVERY_TORCH if peer in ratios]  # the fastest way to use it
        value = quantity(result.get("value"), row.kind) or GAP
        disturbed = "~" if (result.get("disturbed") or 0) > DISTURBED else ""
        share = "" if result.get("share") is None else f"{100 * result['share']:.0f}%"
        cells = [ratio(min(torch)) if torch else "", *(ratio(ratios[p]) if p in ratios else "" for p in others)]
        lines.append([row.name, disturbed + value, share, *cells, "" if row.goal is None else f"{row.goal:g}"])
    head, load = report["head"], f"load {report['load_before']} before and {report.get('load_after')} after"
    text = f"{head['machine']}, {head['threads']} threads; {head['versions']}; {_middle(report)}; {load}."
    return "\n".join([textwrap.fill(text, 120), "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def write_plot(path, report):
    """Ratios of all rows, one mark per peer, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    results = [r for r in report["rows"] if r["ratios"]]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.24 * len(results)), layout="constrained")
    for peer, mark in zip(report["peers"], "osD^vP*X", strict=False):
        points = [(r["ratios"][peer], i) for i, r in enumerate(results) if peer in r["ratios"]]
        if points:
            axes.plot(*zip(*points, strict=True), mark, label=peer, markersize=5, alpha=0.8)
    goals = [(r["goal"], i) for i, r in enumerate(results) if r["goal"]]
    if goals:
        axes.plot(*zip(*goals, strict=True), "|", color="black", markersize=11, label="goal against torch")
    axes.axvline(1, color="gray", linewidth=1)
    axes.set(
        xscale="log", xlabel="time (or size) over cmha's; right of 1: cmha is better", ylim=(len(results) - 0.5, -0.5)
    )
    axes.xaxis.set_major_locator(LogLocator(base=2))  # 0.5, 1, 2, 4 ...
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(results)), [r["name"] for r in results], fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(f"{report['head']['machine']}, {report['head']['threads']} threads", fontsize=9)
    figure.savefig(path, dpi=120)

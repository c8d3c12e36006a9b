"""Heat maps of attention as PNG or SVG, drawn by matplotlib (extra `plot`)."""

import io

from cmha.errors import message
from cmha.files import write_atomically

LABELLED = 40  # tokens up to which every one has its label


def save_figure(maps, path, kind):
    """A grid of maps, one row per layer and one column per head, to path; kind "png" or "svg"."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        rule = "a picture needs matplotlib"
        raise ImportError(message("heads", rule, hint="Install it with: pip install 'cmha[plot]'")) from None
    layers, heads = len(maps.weights), max(map(len, maps.weights.values()))
    tokens = len(maps.labels)
    inches = min(4.0, max(1.6, 0.14 * tokens + 0.6)) if tokens <= LABELLED else 3.0
    if layers * heads > 24:
        inches = min(inches, 1.8)
    figure = Figure(figsize=(inches * heads + 0.6, (inches + 0.35) * layers + 0.7), layout="constrained")
    grid = figure.subplots(layers, heads, squeeze=False)
    every = 1 if tokens <= LABELLED else -(-tokens // LABELLED)
    ticks = list(range(0, tokens, every))
    labels = [_drawable(maps.labels[i]) for i in ticks]
    size = max(3.0, min(8.0, 45 * inches / len(ticks)))
    text = {"fontsize": size, "parse_math": False}  # `$` is a token, not mathematics
    for down, (layer, weights) in enumerate(maps.weights.items()):
        for head, weight in enumerate(weights):
            axes = grid[down, head]
            axes.imshow(weight, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
            axes.set_title(f"layer {layer}, head {head}", fontsize=8)
            axes.set_xticks(ticks, labels if down == layers - 1 else [""] * len(ticks), rotation=90, **text)
            axes.set_yticks(ticks, labels if head == 0 else [""] * len(ticks), **text)  # the same for all of a row
            axes.tick_params(length=1, pad=1)
    figure.suptitle(maps.title + (f" ({maps.note})" if maps.note else ""), fontsize=9, parse_math=False)
    picture = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "cmha"}):  # the same file each time
        figure.savefig(picture, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    write_atomically(path, lambda file: file.write(picture.getvalue()))


def _drawable(label):
    """What the font lacks is spelled out."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    return "".join(c if font.get_char_index(ord(c)) else c.encode("unicode_escape").decode("ascii") for c in label)

"""Heat maps of attention as PNG or SVG, drawn by matplotlib (extra `plot`)."""

from cmha.see.picture import picture

LABELLED = 40  # tokens up to which every one has its label


def save_figure(maps, path):
    """A grid of maps, one row per layer and one column per head, to path (.png or .svg)."""
    layers, heads = len(maps.weights), max(map(len, maps.weights.values()))
    tokens = len(maps.labels)
    inches = min(4.0, max(1.6, 0.14 * tokens + 0.6)) if tokens <= LABELLED else 3.0
    if layers * heads > 24:
        inches = min(inches, 1.8)
    ticks = list(range(0, tokens, 1 if tokens <= LABELLED else -(-tokens // LABELLED)))
    size = max(3.0, min(8.0, 45 * inches / len(ticks)))
    with picture("heads", path, figsize=(inches * heads + 0.6, (inches + 0.35) * layers + 0.7)) as figure:
        labels = [_drawable(maps.labels[i]) for i in ticks]
        grid = figure.subplots(layers, heads, squeeze=False)
        for down, (layer, weights) in enumerate(maps.weights.items()):
            for head, weight in enumerate(weights):
                axes = grid[down, head]
                axes.imshow(weight, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
                axes.set_title(f"layer {layer}, head {head}", fontsize=8)
                shown = [label if down == layers - 1 else "" for label in labels]  # the same for all of a column
                axes.set_xticks(ticks, shown, rotation=90, fontsize=size)
                axes.set_yticks(ticks, labels if head == 0 else [""] * len(labels), fontsize=size)
                axes.tick_params(length=1, pad=1)
        figure.suptitle(maps.title + (f" ({maps.note})" if maps.note else ""), fontsize=9)


def _drawable(label):
    """What the font lacks is spelled out."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    return "".join(c if font.get_char_index(ord(c)) else c.encode("unicode_escape").decode("ascii") for c in label)

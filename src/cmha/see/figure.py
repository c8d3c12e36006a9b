"""Heat maps of attention as PNG or SVG, drawn by matplotlib (extra `plot`).

All maps are painted into one image, dot for dot, under one pair of axes for what is written: 144 maps of 200 tokens are
not 144 plots.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cmha.see.picture import DOTS, check_matplotlib, picture

if TYPE_CHECKING:
    from _typeshed import StrPath
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from cmha.see.maps import Maps
    from cmha.types import FloatArray

    Colours = NDArray[np.uint8]  # (rows, columns, 4): red, green, blue, alpha

STOPS = ["#ffffff", "#6ca6cd", "#08306b"]  # of 0, 1/4 and 1, as on the page: levels go by the square root of a weight
LONGEST = 12  # characters of a label
_GAP, _ABOVE, _EDGE = 0.12, 0.24, 0.12  # inches between maps, for the name above a map, around all


def save_figure(maps: Maps, path: StrPath) -> None:
    """A grid of maps, one row per layer and one column per head, to path (.png or .svg)."""
    check_matplotlib("heads")  # what the font lacks is asked of it before there is a picture
    layers, heads, tokens = len(maps.weights), max(map(len, maps.weights.values())), len(maps.labels)
    side = _side(tokens, layers, heads)
    step = -(-tokens // max(1, int(side * 72 / 6)))  # labels of six points and more do not touch
    labels = [(i, _drawable(_shortened(maps.labels[i]))) for i in range(0, tokens, step)]
    size = max(5.0, min(8.0, 0.8 * 72 * side / len(labels)))
    margin = _EDGE + 0.05 + max(len(label) for _, label in labels) * 0.65 * size / 72  # inches
    width = max(5.0, margin + heads * (side + _GAP) + _EDGE)
    head = _head(maps, width)
    top = 0.2 + 0.16 * len(head) + 0.45
    height = top + layers * (side + _ABOVE) + margin
    with picture("heads", path, figsize=(width, height), dpi=DOTS, layout=None) as figure:
        colours = _scale(figure, width, height, top - 0.36)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        for line, text in enumerate(head):
            axes.text(_EDGE, 0.2 + 0.16 * line, text, fontsize=9, va="center")
        paper = np.full((round(height * DOTS), round(width * DOTS), 4), 255, np.uint8)
        lines = []
        for down, (layer, weights) in enumerate(maps.weights.items()):
            y = _on_dots(top + down * (side + _ABOVE) + _ABOVE)
            for number, weight in enumerate(weights):
                x = _on_dots(margin + number * (side + _GAP))
                _paint(paper, x, y, colours(np.nan_to_num(weight)), side)
                axes.text(x, y - 0.04, f"layer {layer}, head {number}", fontsize=8, va="bottom")
                lines.append([(x, y), (x + side, y), (x + side, y + side), (x, y + side), (x, y)])
                if number == 0:
                    for i, label in labels:
                        at = y + (i + 0.5) * side / tokens
                        lines.append([(x - 0.03, at), (x, at)])
                        axes.text(x - 0.05, at, label, fontsize=size, ha="right", va="center")
                if down == layers - 1:  # the labels of a column are the same for all layers
                    for i, label in labels:
                        at = x + (i + 0.5) * side / tokens
                        lines.append([(at, y + side), (at, y + side + 0.03)])
                        axes.text(at, y + side + 0.05, label, fontsize=size, ha="center", va="top", rotation=90)
        figure.figimage(paper, origin="upper", zorder=-1)  # under all that is written
        _draw(axes, lines)


def _on_dots(inches: float) -> float:
    return round(inches * DOTS) / DOTS


def _paint(paper: Colours, x: float, y: float, colours: Colours, side: float) -> None:
    """Cells of whole dots, from the inch (x, y) on."""
    dots = round(side * DOTS) // len(colours)
    cells = colours.repeat(dots, axis=0).repeat(dots, axis=1)
    top, left = round(y * DOTS), round(x * DOTS)
    paper[top : top + len(cells), left : left + len(cells)] = cells


def _side(tokens: int, layers: int, heads: int) -> float:
    """Inches of one map; every cell has the same whole number of dots."""
    wanted = max(1.3, min(0.14 * tokens, 4.0, 16 / heads, 30 / layers))
    return max(1, round(wanted * DOTS / tokens)) * tokens / DOTS


def _head(maps: Maps, width: float) -> list[str]:
    """The lines over the picture: what it shows, what was cut."""
    lines = [line for text in (maps.title, maps.note) if text for line in textwrap.wrap(text, int(width * 11))]
    return [_drawable(line) for line in lines]


def _scale(figure: Figure, width: float, height: float, y: float) -> Callable[[FloatArray], Colours]:
    """Draws the scale of colours and says what rows and columns are; returns weights -> colours."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colours = ScalarMappable(PowerNorm(0.5, 0, 1), LinearSegmentedColormap.from_list("heads", STOPS))
    place = figure.add_axes(((_EDGE + 0.05) / width, 1 - (y + 0.12) / height, 1.6 / width, 0.12 / height))
    bar = figure.colorbar(colours, cax=place, orientation="horizontal", ticks=[0, 0.01, 0.1, 0.4, 1])
    bar.ax.set_xticklabels(["0", "0.01", "0.1", "0.4", "1"], fontsize=6)
    bar.ax.tick_params(length=2, pad=1)
    bar.minorticks_off()
    text = "weight. A row is a query,\na column the key it looks at."
    figure.text((1.6 + 2 * _EDGE + 0.15) / width, 1 - (y + 0.1) / height, text, fontsize=7, va="center")
    return lambda weights: colours.to_rgba(weights, bytes=True)


def _draw(axes: Axes, lines: list[list[tuple[float, float]]]) -> None:
    from matplotlib.collections import LineCollection

    axes.add_collection(LineCollection(lines, linewidths=0.5, colors="#63676d"), autolim=False)


def _shortened(label: str) -> str:
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "\u2026"


def _drawable(label: str) -> str:
    """What the font lacks is spelled out."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    return "".join(c if font.get_char_index(ord(c)) else c.encode("unicode_escape").decode("ascii") for c in label)

"""How memory moves while heads are split and merged, as SVG, drawn from the strides of the real arrays."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from cmha.files import write_text
from cmha.see.memory import movement

if TYPE_CHECKING:
    from _typeshed import StrPath

CELL, LEFT, FALL = 18, 24, 110  # width of a cell, margin, height of the lines between two memories
STYLE = """\
:root { color-scheme: light dark; --ground: #fbfbfa; --ink: #1c1e21; --soft: #63676d; }
@media (prefers-color-scheme: dark) { :root { --ground: #15171a; --ink: #e6e7e9; --soft: #9aa0a8; } }
.ground { fill: var(--ground); } text { fill: var(--ink); font: 13px "DejaVu Sans", sans-serif; }
.soft { fill: var(--soft); } .cell text { fill: #fff; font-size: 10px; text-anchor: middle; }
line { stroke-width: 1.2; opacity: .75; }"""


def save_memory_picture(path: StrPath, B: int, T: int, H: int, hd: int) -> None:
    write_text(path, memory_picture(B, T, H, hd))


def memory_picture(B: int, T: int, H: int, hd: int) -> str:
    """Blocks of memory, each a strip of cells by address: the colour is the head, the number the token. A view leaves
    the strip as it is and is a line of text; a copy is a new strip, with a line from every old place to the new one."""
    stages = movement(B, T, H, hd)
    colours = [f"hsl({360 * h // H + 210} 55% 42%)" for h in range(H)]
    body, y, before = [], 78, stages[0].in_memory
    for stage in stages:
        text = f"{stage.what} to {stage.shape}, strides {stage.strides}: "
        if stage.storage == "new":
            what = "x" if stage.what == "x" else "y, what the heads computed,"
            body.append(_text(LEFT, y, f"{what} {stage.shape}, strides {stage.strides}, in memory:"))
            y += 12
        elif stage.storage == "view":
            body.append(_text(LEFT, y, text + "a view, nothing moves", "soft"))
            y += 22
            continue
        else:
            body.append(_text(LEFT, y, text + "a copy, every element goes to its new place"))
            places = {n: i for i, n in enumerate(stage.in_memory)}
            y += 12
            for i, n in enumerate(before):
                ends = LEFT + (i + 0.5) * CELL, LEFT + (places[n] + 0.5) * CELL
                stroke = colours[n // hd % H]
                body.append(f'<line x1="{ends[0]}" y1="{y}" x2="{ends[1]}" y2="{y + FALL}" stroke="{stroke}"/>')
            y += FALL
        body += [_cell(i, y, n, T, H, hd, colours) for i, n in enumerate(stage.in_memory)]
        before = stage.in_memory
        y += 20 + 26
    width = max(760, 2 * LEFT + CELL * B * T * H * hd, 2 * LEFT + 84 * H)
    legend = ""
    for h, colour in enumerate(colours):
        x = LEFT + 84 * h
        legend += f'<rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>{_text(x + 18, 49, f"head {h}")}'
    title = f"Splitting {H} heads of {hd} and merging them again: {B} rows of {T} tokens. The number is the token."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n"
        f'<rect class="ground" width="{width}" height="{y}"/>\n{_text(LEFT, 24, title)}\n{legend}\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{kind}>{escape(text)}</text>'


def _cell(place: int, y: int, n: int, T: int, H: int, hd: int, colours: list[str]) -> str:
    rest, d = divmod(int(n), hd)
    rest, h = divmod(rest, H)
    b, t = divmod(rest, T)
    x = LEFT + place * CELL
    return (
        f'<g class="cell"><title>row {b}, token {t}, head {h}, number {d}; address {place}</title>'
        f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="20" fill="{colours[h]}"/>'
        f'<text x="{x + CELL / 2 - 0.5}" y="{y + 14}">{t}</text></g>'
    )

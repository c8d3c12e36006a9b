"""Heat maps of attention as one HTML file: no network, no frame, no code but its own.

heads.html beside this file is the page; here its data goes in. Texts stand in JSON with every < spelled \\u003c and
reach the page as textContent, so that they stay text; a content security policy admits the page's own script and style,
by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cmha.files import write_text

if TYPE_CHECKING:
    from _typeshed import StrPath

    from cmha.see.maps import Maps


def save_page(maps: Maps, path: StrPath) -> None:
    write_text(path, page(maps))


def page(maps: Maps) -> str:
    """The HTML of the maps; a weight is kept in 1/255."""
    layers = []
    below = np.tril_indices(len(maps.labels))  # what is above is zero: no token sees its future
    for layer, weights in maps.weights.items():
        levels = np.rint(np.nan_to_num(weights) * 255).astype(np.uint8)
        heads = [base64.b64encode(level[below]).decode("ascii") for level in levels]
        layers.append({"layer": layer, "heads": heads})
    data = {"title": maps.title, "note": maps.note, "labels": maps.labels, "layers": layers}
    template = (Path(__file__).parent / "heads.html").read_text(encoding="utf-8")
    style, script = (_inside(template, f"<{tag}>", f"</{tag}>") for tag in ("style", "script"))
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    values = {"POLICY": policy, "TITLE": html.escape(maps.title), "DATA": in_script(data)}
    return re.sub("@(POLICY|TITLE|DATA)@", lambda found: values[found[1]], template)


def in_script(value: object) -> str:
    """JSON that no text can end the script element with."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _inside(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


def _hash(source: str) -> str:
    """As a content security policy names a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode('utf-8')).digest()).decode('ascii')}'"

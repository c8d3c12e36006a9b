"""Checks the built site: every link inside leads to a page and to an anchor on it, and no page loads from a network.

    python docs/check_site.py [docs/_build]
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("source", "src"), ("iframe", "src")}


class Page(HTMLParser):
    """The ids of a page, and (tag, attribute, target) of everything it refers to."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.targets = set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.targets.append((tag, name, value))


def faults(site):
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no pages"
    for path, page in pages.items():
        for tag, attribute, target in page.targets:
            url, where = urlsplit(target), f"{path.relative_to(site)}: {target}"
            if url.scheme or url.netloc:
                if (tag, attribute) in LOADS and url.scheme != "data":
                    yield f"{where} is loaded from elsewhere"
                continue
            other = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not other.is_file():
                yield f"{where} is not there"
            elif url.fragment and other in pages and unquote(url.fragment) not in pages[other].ids:
                yield f"{where} has no such anchor"
    for path in sorted(site.rglob("*.css")):
        if "url(http" in path.read_text(encoding="utf-8") or "@import" in path.read_text(encoding="utf-8"):
            yield f"{path.relative_to(site)} loads from elsewhere"


if __name__ == "__main__":
    site = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "_build").resolve()
    found = list(faults(site))
    print("\n".join(found) or f"{site}: every link inside leads somewhere, nothing is loaded from elsewhere")
    sys.exit(bool(found))

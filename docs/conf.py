"""The documentation site; from the root of the source tree:

    pip install '.[docs]' && sphinx-build -n -W --keep-going docs docs/_build && python docs/check_site.py

The reference is read off the docstrings of the installed package, the command line off its own --help; so neither can
go stale. Nothing is fetched, neither while building nor while reading: the pages work from a folder, without a server.
"""

import contextlib
import io
import os

from docutils import nodes
from docutils.parsers.rst import Directive

import cmha

project = "cmha"
release = cmha.__version__
language = "en"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"cmha {release}"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_copy_source = html_show_copyright = html_show_search_summary = False  # a summary would be fetched
myst_heading_anchors = 3

default_role = "code"  # `x` in a docstring is code
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes stand in the docstrings, types in the stubs
autodoc_default_options = {"members": True}
add_module_names = False
smartquotes = False  # "lr" and --out are meant as they stand
suppress_warnings = ["myst.header"]  # an included file brings its own first heading


class CommandLine(Directive):
    """`{command-line}`: a section for every command, with its --help."""

    def run(self):
        from cmha.cli import COMMANDS

        return [*_help("cmha"), *(node for name in COMMANDS for node in _help(f"cmha {name}", name))]


def _help(title, *command):
    """A section with what `cmha COMMAND --help` prints."""
    from cmha.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([*command, "--help"])
    section = nodes.section(ids=[nodes.make_id(title)], names=[title])
    section += [nodes.title(text=title), nodes.literal_block(text=out.getvalue().strip(), language="text")]
    return [section]


def _arrows(app, what, name, thing, options, lines):
    """`->` as one character, which a narrow screen cannot break in two."""
    lines[:] = [line.replace("->", "\u2192") for line in lines]


def setup(app):
    os.environ.update(COLUMNS="90", NO_COLOR="1")  # what argparse looks at
    app.add_directive("command-line", CommandLine)
    app.connect("autodoc-process-docstring", _arrows)
    return {"parallel_read_safe": True}

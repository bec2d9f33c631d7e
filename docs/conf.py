"""How Sphinx makes the site of docs/ (make docs)."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from attnjourney import __version__  # noqa: E402

project = "attnjourney"
author = "the authors of attnjourney"
copyright = "the authors of attnjourney; Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpick_ignore_regex = [("py:.*", ".*")]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # types stand in the texts, and overloads would stand three times
autodoc_member_order = "bysource"
autoclass_content = "class"
napoleon_google_docstring = True

highlight_language = "none"
smartquotes = False

html_theme = "furo"
html_title = "attnjourney"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


def plain_text(app, what, name, obj, options, lines):
    """Docstrings are plain English with names between backquotes, not reStructuredText: what that reads is escaped, and
    an indented block between blank lines is code."""
    text, code = [], False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not code and text and not text[-1]:
            code = not any(re.match(r"\w+:$", above) for above in text[-2:])
            text += ["::", ""] if code else []
        code = code and (indented or not line)
        text.append(line if code else escaped(line))
    lines[:] = text


def escaped(line):
    pieces = re.split(r"(`+[^`]*`+)", line.replace(":func:", ""))
    for i, piece in enumerate(pieces):
        pieces[i] = f"``{piece.strip('`')}``" if i % 2 else re.sub(r"([*|]|_(?=\W|$))", r"\\\1", piece)
    return "".join(pieces)


def setup(app):
    app.connect("autodoc-process-docstring", plain_text, priority=100)  # before napoleon

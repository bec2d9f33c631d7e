"""report.html: one file with pictures inside, readable offline and without JavaScript."""

import base64
import html
from dataclasses import dataclass
from pathlib import Path

from examples.results import Check

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1d2329; background: #f4f5f7; margin: 0; }
main { max-width: 60rem; margin: 2rem auto; padding: 1.5rem 2.5rem 3rem; background: white; border-radius: 10px; }
h1 { font-size: 1.9rem; margin-bottom: 0; } h2 { margin-top: 2.6rem; border-bottom: 1px solid #dde1e6; }
h3 { margin-bottom: .3rem; }
.lead { color: #59636e; margin-top: .3rem; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th, td { padding: .4rem .7rem; text-align: right; border-bottom: 1px solid #e6e9ed; }
th:first-child, td:first-child, .words th, .words td { text-align: left; } th { background: #f4f5f7; font-weight: 600; }
code, pre { font: .87rem/1.45 ui-monospace, monospace; } code { background: #f0f1f4; padding: .1em .3em; }
pre { background: #f6f7f9; border-left: 3px solid #c4cbd3; padding: .7rem 1rem; white-space: pre-wrap;
      overflow-wrap: anywhere; }
pre b { color: #1f6fb4; font-weight: 600; }
.checks { list-style: none; padding: 0; } .checks li { padding: .25rem 0 .25rem 1.9rem; text-indent: -1.9rem; }
.ok::before { content: "\\2713"; color: #1b7f4b; } .failed::before { content: "\\2717"; color: #b3261e; }
.ok::before, .failed::before { display: inline-block; width: 1.9rem; text-indent: 0; font-weight: 700; }
img { max-width: 100%; height: auto; } figure { margin: 1rem 0; } figcaption { color: #59636e; font-size: .92rem; }
.wide { overflow-x: auto; }
"""


@dataclass(frozen=True)
class Section:
    title: str
    body: str  # HTML


def escape(value: object) -> str:
    return html.escape(str(value))


def picture(path: Path, caption: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(caption)}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def table(header: list[str], rows: list[list[str]], kind: str = "numbers") -> str:
    """Cells are plain text: of kind "numbers" on the right but for the first column, of kind "words" on the left."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def paragraph(words: str) -> str:
    return f"<p>{escape(words)}</p>"


def check_list(checks: list[Check]) -> str:
    items = (f'<li class="{"ok" if check.passed else "failed"}">{escape(check.text)}</li>' for check in checks)
    return f'<ul class="checks">{"".join(items)}</ul>'


def write(
    path: Path, lead: str, checks: list[Check], sections: list[Section], title: str = "attnjourney: demo report"
) -> None:
    body = "".join(f"<section><h2>{escape(section.title)}</h2>{section.body}</section>" for section in sections)
    path.write_text(
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{check_list(checks)}
{body}
</main>
</body>
</html>
""",
        encoding="utf-8",
    )

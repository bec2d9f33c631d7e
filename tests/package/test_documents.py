"""README.md and docs/: the code of every page runs, every page is in the site, what they promise is said once."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "journey.md")]
CLIENTS = ("transformers", "onnxruntime", "diffusers", "timm", "kernels")  # of which a page may need one


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks():
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
            code, line = match[1], text[: match.start()].count("\n") + 2
            needed = [name for name in CLIENTS if re.search(rf"^\s*(?:import|from)\b.*\b{name}\b", code, re.M)]
            missing = [name for name in needed if importlib.util.find_spec(name) is None]
            marks = [pytest.mark.clients] if needed else []
            marks += [pytest.mark.skip(reason=f"not installed: {', '.join(missing)}")] if missing else []
            yield pytest.param(code, f"{name_of(page)}:{line}", id=f"{name_of(page)}-{line}", marks=marks)


@pytest.mark.parametrize("code, place", list(blocks()))
def test_code(code, place):
    exec(compile(code, place, "exec"), {})


def test_every_operator_has_a_page_with_an_example():
    of_others = {"block_attention", "kv_cache", "lightning_indexer", "paged_attention"}  # on others' pages
    operators = {path.stem for path in (ROOT / "attnjourney/ops").glob("[a-z]*.py")} - of_others
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/operators").glob("*.md")}
    assert operators <= set(pages), operators - set(pages)
    for name, text in pages.items():
        for part in ("```python", "emory", "imits"):
            assert part in text, f"docs/operators/{name}.md has no {part}"


def test_every_page_is_in_a_table_of_contents():
    listed = {"docs/index.md", "README.md"}
    for page in [ROOT / "docs/index.md", *PAGES]:
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.M | re.S):
            entries = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {name_of(page.parent / f"{entry}.md") for entry in entries}
    assert {name_of(page) for page in PAGES} <= listed


def test_links_lead_to_files():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{name_of(page)}: {link}"


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 130


def test_what_no_gpu_has_shown_is_said_once():
    texts = {name_of(page): page.read_text() for page in [*PAGES, ROOT / "docs/journey.md"]}
    said = [
        name
        for name, text in texts.items()
        for _ in re.findall(r"(?i)not\s+(?:yet\s+)?(?:been\s+)?measured\s+(?:yet\s+)?on\s+a\s+GPU", text)
    ]
    assert said == ["docs/cuda.md"]


def test_the_tables_are_those_of_the_results():
    from benchmarks import readme

    assert readme.main(["--check"]) == 0

"""docs/integrations: the code of every page runs, every page is in the table, every proof that it names exists."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = (ROOT / "docs/integrations.md").read_text()
PAGES = sorted((ROOT / "docs/integrations").glob("*.md"))
CLIENTS = ("transformers", "onnxruntime", "diffusers", "timm", "kernels")  # of which a page may need one


def blocks():
    for page in PAGES:
        for i, code in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)):
            needed = [name for name in CLIENTS if re.search(rf"\b{name}\b", code)]
            missing = [name for name in needed if importlib.util.find_spec(name) is None]
            marks = [pytest.mark.clients] if needed else []
            marks += [pytest.mark.skip(reason=f"not installed: {', '.join(missing)}")] if missing else []
            yield pytest.param(code, id=f"{page.stem}-{i}", marks=marks)


@pytest.mark.parametrize("code", list(blocks()))
def test_code(code):
    exec(compile(code, "<page>", "exec"), {})


def test_every_page_is_in_the_table():
    assert sorted(re.findall(r"\]\(integrations/([\w-]+)\.md\)", INDEX)) == [page.stem for page in PAGES]


def test_every_proof_exists():
    for name in re.findall(r"`(tests/[\w/.]+)`", INDEX):
        assert (ROOT / name).exists(), name

"""docs/integrations: every page is in the table, every proof exists; code runs in tests/package/test_documents.py."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
INDEX = (ROOT / "docs/integrations.md").read_text()
PAGES = sorted((ROOT / "docs/integrations").glob("*.md"))


def test_every_page_is_in_the_table():
    assert sorted(re.findall(r"\]\(integrations/([\w-]+)\.md\)", INDEX)) == [page.stem for page in PAGES]


def test_every_proof_exists():
    for name in re.findall(r"`(tests/[\w/.]+)`", INDEX):
        assert (ROOT / name).exists(), name

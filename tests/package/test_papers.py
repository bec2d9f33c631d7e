"""What README.md, CONTRIBUTING.md, csrc/README.md and docs/ name exists; papers for contributors keep their size."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAPERS = ("README.md", "CONTRIBUTING.md", "csrc/README.md")
PAGES = sorted(f"docs/{path.relative_to(ROOT / 'docs').as_posix()}" for path in (ROOT / "docs").rglob("*.md"))
NAMES = re.compile(r"`([^`\n]+)`|\]\(([^)#\s]+)\)")
ENDINGS = "cpp|h|cu|cuh|py|pyi|md|txt|json|png|toml"
MADE = ("build/", "dist/", "OUT/", "plots/", "demo-output/", ".venv", "libcuda", "page.html", "maps.png")
MADE += ("old.json", "new.json")


def text_of(paper):
    return (ROOT / paper).read_text()


def paths_named(paper):
    """Files and folders between backquotes or behind links, alone or in commands."""
    for code, link in NAMES.findall(re.sub(r"^```.*?^```", "", text_of(paper), flags=re.M | re.S)):
        for word in (link or code).split():
            word = word.rpartition("=")[2].strip("\"',;").partition("::")[0]
            if word.startswith(("http", "--", *MADE)) or not re.match(r"\w", word):
                continue
            if re.fullmatch(rf"[\w.*<>{{}},/-]*(/|\.({ENDINGS}))|(csrc|tests|docs|tools)/\S+", word):
                yield word


def places(paper, path):
    """Where a path may count from: the root, and the folders whose map the paper is."""
    folders = ("", "csrc") if paper == "csrc/README.md" else ("", *({Path(paper).parent} if paper in PAGES else {}))
    pattern = re.sub(r"<[^>]*>", "*", path)
    options = re.search(r"\{([^}]*)\}", pattern)
    for one in options[1].split(",") if options else ("",):
        chosen = pattern.replace(options[0], one) if options else pattern
        yield [place for folder in folders for place in (ROOT / folder).glob(chosen.rstrip("/"))]


@pytest.mark.parametrize("paper", [*PAPERS, *PAGES])
def test_files_and_folders_exist(paper):
    named = sorted(set(paths_named(paper)))
    assert len(named) > 5 or paper in PAGES
    missing = [path for path in named if not all(places(paper, path))]
    assert not missing, f"{paper} names {missing}"


@pytest.mark.parametrize("paper", [*PAPERS, *PAGES])
def test_targets_of_make_exist(paper):
    targets = re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"(?:`|^)make ([a-z][\w-]*)", text_of(paper), re.M)
    assert paper not in ("README.md", "CONTRIBUTING.md") or {"test", "test-quick"} <= set(named)
    assert set(named) <= set(targets), f"{paper}: make has no {set(named) - set(targets)}"


@pytest.mark.parametrize("paper", PAPERS)
def test_functions_of_the_tests_exist(paper):
    """Names with an underscore behind the file that holds them: `name` (`path`) or `path` (`name`)."""
    for file, name in re.findall(r"`([\w/]+\.\w+)` \(`(\w+)`\)", text_of(paper)):
        holders = [place for found in places(paper, file) for place in found]
        assert any(re.search(rf"\b{name}\b", place.read_text()) for place in holders), f"{paper}: {file} has no {name}"


def test_size_of_the_papers_for_contributors():
    lines = {paper: text_of(paper).splitlines() for paper in ("CONTRIBUTING.md", "csrc/README.md")}
    assert len(lines["csrc/README.md"]) <= 130
    for paper, all_lines in lines.items():
        assert not [f"{paper}:{i}" for i, line in enumerate(all_lines, 1) if len(line) > 120]


def test_six_recipes():
    recipes = re.findall(r"^### (.*)$", text_of("csrc/README.md").partition("## Recipes")[2], re.M)
    assert len(recipes) == 6, recipes


def test_workflows_call_the_makefile():
    targets = re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    commands = [
        line
        for path in (ROOT / ".github/workflows").glob("*.yml")
        for line in re.findall(r"^\s+(?:- )?run: (.*)$", path.read_text(), re.M)
    ]
    made = [line.split()[1] for line in commands if line.startswith("make ")]
    assert {"lint", "test-quick", "docs", "wheel", "test-wheel", "test"} == set(made) and set(made) <= set(targets)
    assert all(line.startswith(("make ", "apt-get ")) for line in commands)


def test_the_version_stands_in_one_place_and_in_the_changelog():
    version = re.search(r'__version__ = "(\d+\.\d+)', text_of("attnjourney/_version.py"))[1]
    assert re.search(rf"^## .*\b{re.escape(version)}\b", text_of("CHANGELOG.md"), re.M)
    assert not re.search(r"^version\s*=\s*\"", text_of("pyproject.toml"), re.M)


def test_other_systems_are_refused_in_one_sentence():
    program = "import runpy, sys; sys.platform = {!r}; runpy.run_path('setup.py')"
    for platform, name in (("win32", "Windows"), ("darwin", "macOS")):
        command = [sys.executable, "-c", program.format(platform)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert f"not supported on {name} yet: it needs" in done.stderr

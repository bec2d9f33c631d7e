"""Which files of the emulator's tests have passed with just what they are made of: `make test` leaves them out.

A file is made of its own text and those of `tests` and `attnjourney.reference` that it imports, of the emulator, and of
the programs that these texts name in quotes (`programs_of`; no other is built) with all headers they include, so of the
kernels. What else it takes of the package makes its inputs. `python -m tools.prove` runs the files that are not proved
and writes tests/emulator/proved.txt.
"""

import ast
import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[3]
EMULATOR = ROOT / "tests/emulator"
RECORD = EMULATOR / "proved.txt"  # `digest  file` a line
ALWAYS = {"test_faults.py", "test_proved.py"}  # read texts alone
FOR_ALL = {"build.py", "proved.py", "run.py"}  # of host/: they name no test's program
PROGRAMS = {path.stem: path for folder in ("programs", "conformance") for path in (EMULATOR / folder).glob("*.c*")}


def _closure(files: Iterable[Path], next_files: Callable[[Path], Iterable[Path]]) -> set[Path]:
    found, left = set(), list(files)
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += next_files(file)
    return found


def _module(name: str) -> Iterable[Path]:
    if name.split(".")[0] != "tests" and name.split(".")[:2] != ["attnjourney", "reference"]:
        return ()
    path = ROOT.joinpath(*name.split("."))
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]


@functools.cache
def _imported(file: Path) -> list[Path]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(file.relative_to(ROOT).parts[: -node.level]) if node.level else ""
            module = ".".join(part for part in (parent, node.module) if part)
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found += [path for name in names for path in _module(name)]
    return found


@functools.cache
def _included(file: Path) -> list[Path]:
    names = re.findall(r'^ *# *include "(.+)"', file.read_text(), re.MULTILINE)
    places = (file.parent, ROOT / "csrc", ROOT / "tests", EMULATOR / "machine")
    paths = [next((path for place in places if (path := place / name).exists()), None) for name in names]
    return [path.resolve() for path in paths if path]


def _programs(texts: Iterable[Path]) -> set[str]:
    named = [text for text in texts if text.is_relative_to(EMULATOR) and text.name not in FOR_ALL]
    words = {word for text in named for word in re.findall(r"[\"'](\w+)[\"']", text.read_text())}
    return words & PROGRAMS.keys()


def made_of(test: Path) -> set[Path]:
    texts = _closure([test], _imported)
    programs = _programs(texts)
    kernels = [path for name in programs if (path := EMULATOR / f"programs/kernels/{name}.h").exists()]
    machine = (EMULATOR / "machine").glob("*")
    return texts | _closure([*(PROGRAMS[name] for name in programs), *kernels, *machine], _included)


@functools.cache
def programs_of(test: Path) -> set[str]:
    """Those whose names stand in quotes in the test or in what it imports of tests/emulator."""
    return _programs(_closure([test], _imported))


def digest(test: Path) -> str:
    text = hashlib.sha256()
    for path in sorted(made_of(test)):
        text.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return text.hexdigest()[:20]


def recorded() -> dict[str, str]:
    lines = RECORD.read_text().splitlines() if RECORD.exists() else ()
    return {name: value for value, name in (line.split() for line in lines)}


def tests() -> list[Path]:
    return [path for path in sorted(EMULATOR.glob("test_*.py")) if path.name not in ALWAYS]


@functools.cache
def proved() -> frozenset[Path]:
    known = recorded()
    return frozenset(path for path in tests() if known.get(path.name) == digest(path))

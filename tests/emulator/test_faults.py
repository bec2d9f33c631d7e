"""Every planted fault finds its place in the kernels: seconds after an edit, before any of them is built and run."""

import functools
import importlib
import re

import pytest

from tests.emulator.host import build, noticed, planted

KERNELS = build.ROOT / "csrc/cuda/kernels"
HOLDERS = [f"faults.{path.stem}" for path in (build.ROOT / "tests/emulator/faults").glob("[a-z]*.py")]
HOLDERS += ["test_latent", "test_ragged", "test_rows"]  # their own lists


def faults_in(x):
    """(file, text there, text instead of it) of all tuples that name a kernel's file."""
    if isinstance(x, tuple) and any(isinstance(part, str) and part.endswith(".cuh") for part in x):
        yield next(part for part in x if isinstance(part, str) and part.endswith(".cuh")), *x[-2:]
    elif isinstance(x, (list, dict)):
        for part in x.values() if isinstance(x, dict) else x:
            yield from faults_in(part)


def all_faults():
    holders = [importlib.import_module(f"tests.emulator.{name}") for name in HOLDERS]
    return sorted({fault for holder in holders for fault in faults_in(list(vars(holder).values()))})


def test_faults_find_their_places():
    wrong = []
    for file, old, new in all_faults():
        try:
            planted.switched((KERNELS / file).read_text(), {1: (old, new)})
        except ValueError as error:
            wrong.append(f"{file}: {error}")
    assert not wrong, "\n".join(wrong)


def test_one_text_with_several_faults():
    text = "void f() {\n  if (a) {\n    b();\n  }\n  c();\n}\nstruct S {\n  int x;\n};\n"
    inner = "if (a) { if (emulator::planted(1)) {\n    \n  } else {\n    b();\n  }}"
    faulty = "{\n  if (a) {\n    b();\n  }\n  d();\n}"
    expected = f"void f() {{ if (emulator::planted(2)) {faulty} else {{\n  {inner}\n  c();\n}}}}\nstruct S"
    both = planted.switched(text, {1: ("b();", ""), 2: ("c();", "d();")})
    assert both.startswith(expected)
    with pytest.raises(ValueError, match="not inside of statements: int x;"):
        planted.switched(text, {1: ("int x;", "")})


@pytest.mark.parametrize("line, order", [("2", [2]), ("", [0, 1, 2]), ("9", [0, 1, 2]), ("3", [3, 0, 1, 2])])
def test_the_check_that_noticed_comes_first(monkeypatch, tmp_path, line, order):
    found_by, called = tmp_path / "found_by.txt", []
    found_by.write_text(f"{line} {noticed._test()}\n" if line else "")
    monkeypatch.setattr(noticed, "_found_by", lambda: noticed.read(found_by))

    def check(number):
        called.append(number)
        assert number != 2

    assert noticed.is_noticed([functools.partial(check, number) for number in range(4)], "a fault")
    assert called == order
    assert not noticed.is_noticed([lambda: None], "nothing")


def test_markers_are_used():
    """A comment `// @name` is for a fault: without one it goes."""
    used = {(file, old[1:]) for file, old, _ in all_faults() if old.startswith("@")}
    for path in KERNELS.rglob("*.cuh"):
        for marker in re.findall(r"// @(\w+)", path.read_text()):
            assert (str(path.relative_to(KERNELS)), marker) in used, f"{path}: no fault names @{marker}"


def with_fault(text, old, new):
    return planted.applied(text, planted.changes(text, old, new))


def test_markers_take_the_code_of_their_line():
    text = "  a();\n  f(b,\n    c);  // @both: words\n  d();  // @last\n"
    assert with_fault(text, "@both", "g();") == "  a();\n  g();  // @both: words\n  d();  // @last\n"
    assert with_fault(text, "@last", "if (e) {code}").endswith("c);  // @both: words\n  if (e) d();  // @last\n")

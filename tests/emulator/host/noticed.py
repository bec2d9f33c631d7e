"""Is a planted fault noticed? Of the checks that may do so, the one that did last time comes first."""

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.emulator.host.run import EmulatorError

# `number of the check  test` a line, where it is not the first one. A line that is missing or no longer right costs
# time alone. To write it anew, all checks in their order:
#   rm -f found; ATTNJOURNEY_FOUND_BY=found .venv/bin/python -m pytest -q tests/emulator -k found
#   sort found > tests/emulator/faults/found_by.txt
FOUND_BY = Path(__file__).parents[1] / "faults" / "found_by.txt"


def read(path: Path) -> dict[str, int]:
    lines = (line.split(maxsplit=1) for line in path.read_text().splitlines())
    return {test: int(number) for number, test in lines}


@functools.cache
def _found_by() -> dict[str, int]:
    return read(FOUND_BY)


def _test() -> str:
    """As "test_fp32.py::test_name[case]"."""
    return os.environ["PYTEST_CURRENT_TEST"].removeprefix("tests/emulator/").rpartition(" ")[0]


def is_noticed(checks: Iterable[Callable[[], object]], what: str) -> bool:
    """Does one of them fail?"""
    numbered, record = list(enumerate(checks)), os.environ.get("ATTNJOURNEY_FOUND_BY")
    first = 0 if record else _found_by().get(_test(), 0)
    numbered.sort(key=lambda numbered: numbered[0] != first)
    for number, check in numbered:
        try:
            check()
        except (AssertionError, EmulatorError) as found:
            print(f"{what}: {str(found)[:200]}")
            if record and number:
                with open(record, "a") as file:
                    file.write(f"{number} {_test()}\n")
            return True
    return False

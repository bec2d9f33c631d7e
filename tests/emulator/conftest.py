"""The emulator's tests are skipped where it cannot run."""

import pytest

from tests.emulator.host import build


def pytest_runtest_setup(item):
    reason = build.unsupported()
    if reason and item.path.stem != "test_faults":  # which only reads
        pytest.skip(reason)

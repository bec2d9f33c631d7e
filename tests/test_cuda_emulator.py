"""CUDA kernels, run on the CPU by tests/emulator and compared with fp64."""

import subprocess

import pytest

from emulator import build

pytestmark = pytest.mark.skipif(build.unsupported() is not None, reason=str(build.unsupported()))


def test_the_emulator_itself():
    done = subprocess.run([build.program("self_test")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

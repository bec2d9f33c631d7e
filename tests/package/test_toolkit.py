"""setup.py compares the CUDA toolkit with what the sources need, and with torch's CUDA."""

from pathlib import Path

import pytest
from setuptools.errors import PlatformError

SETUP = Path(__file__).parents[2] / "setup.py"
pytestmark = pytest.mark.skipif(not SETUP.exists(), reason="no sources to build from")


@pytest.mark.parametrize(
    "release,cuda,expected",
    [
        ("12.4", None, "needs nvcc >= 12.5, found 12.4"),
        ("12.5", "'12.8'", ""),
        ("13.0", "'13.2'", ""),
        ("13.0", "'12.8'", "nvcc 13.0 is of a later CUDA than torch's 12"),
        ("13.0", None, ""),
    ],
)
def test_toolkits(tmp_path, capsys, release, cuda, expected):
    functions = {"__name__": "setup", "__file__": str(SETUP)}
    exec(compile(SETUP.read_text().rpartition("\nsetup(")[0], str(SETUP), "exec"), functions)
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\n")
    said = ""
    try:
        functions["check_toolkit"](str(nvcc), tmp_path)
    except PlatformError as error:
        said = str(error)
    said += capsys.readouterr().out
    assert (expected in said) if expected else not said

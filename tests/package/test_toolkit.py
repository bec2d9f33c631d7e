"""setup.py compares torch and the CUDA toolkit with what the sources need, and the toolkit with torch's CUDA."""

import re
import sys
from pathlib import Path

import pytest
from setuptools.errors import PlatformError

SETUP = Path(__file__).parents[2] / "setup.py"
pytestmark = pytest.mark.skipif(not SETUP.exists(), reason="no sources to build from")


@pytest.fixture
def functions():
    """What setup.py defines."""
    names = {"__name__": "setup", "__file__": str(SETUP)}
    exec(compile(SETUP.read_text().rpartition("\nsetup(")[0], str(SETUP), "exec"), names)
    return names


def test_a_build_without_torch_or_with_an_older_one(functions, monkeypatch, tmp_path):
    for place in ("get_path", "getsitepackages", "getusersitepackages"):
        module = functions["sysconfig"] if place == "get_path" else functions["site"]
        nowhere = [] if place == "getsitepackages" else ""
        monkeypatch.setattr(module, place, lambda *_, nowhere=nowhere: nowhere)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(PlatformError, match=f"{re.escape(sys.executable)} has no torch >= 2.11: install it first"):
        functions["find_torch"]()
    header = tmp_path / "torch/include/torch/csrc/stable/library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.10.1+cpu'\n")
    with pytest.raises(PlatformError, match="needs torch >= 2.11, found 2.10.1.cpu in "):
        functions["find_torch"]()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.11.0'\n")
    assert functions["find_torch"]() == tmp_path / "torch"


def nvcc_that_says(folder, text):
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    nvcc.chmod(0o755)
    return str(nvcc)


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
def test_toolkits(functions, tmp_path, capsys, release, cuda, expected):
    nvcc = nvcc_that_says(tmp_path, f"Cuda compilation tools, release {release}, V{release}.1")
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\n")
    said = ""
    try:
        found = functions["check_toolkit"](nvcc, tmp_path)
        assert ("--compress-mode=size" in functions["nvcc_flags"](found)) == (release >= "13")
    except PlatformError as error:
        said = str(error)
    said += capsys.readouterr().out
    assert (expected in said) if expected else not said


@pytest.mark.parametrize(
    "wanted,known,expected",
    [
        (None, "sm_80\nsm_86\nsm_90\nsm_100\nsm_120", ["80", "90", "100", "120"]),
        (None, "sm_80\nsm_89\nsm_90", ["80", "90"]),
        ("120,90", "", ["90", "120"]),
        ("sm_90", "", "ATTNJOURNEY_CUDA_CODE: expected capabilities from 80 on, such as 80,90, got 'sm_90'"),
        ("75", "", "got '75'"),
    ],
)
def test_codes(functions, monkeypatch, tmp_path, wanted, known, expected):
    monkeypatch.delenv("ATTNJOURNEY_CUDA_CODE", raising=False)
    if wanted:
        monkeypatch.setenv("ATTNJOURNEY_CUDA_CODE", wanted)
    nvcc = nvcc_that_says(tmp_path, known)
    if isinstance(expected, str):
        with pytest.raises(PlatformError, match=expected):
            functions["cuda_codes"](nvcc)
    else:
        assert functions["cuda_codes"](nvcc) == expected
        lowest = expected[0]
        code = ",".join(f"sm_{x}" for x in expected)
        assert (
            functions["cuda_archs"](nvcc)["csrc/cuda/inst"] == f"arch=compute_{lowest},code=[{code},compute_{lowest}]"
        )

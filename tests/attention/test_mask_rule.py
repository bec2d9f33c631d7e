"""csrc/core/mask.h: every form in which kernels ask for the mask rule is that of the rule, in 32 and in 64 bits."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
CXX = os.environ.get("CXX") or "g++"


@pytest.mark.skipif(not CSRC.exists() or shutil.which(CXX) is None, reason="no sources or no compiler")
def test_every_form_of_the_mask_rule(tmp_path):
    source, program = Path(__file__).with_name("mask_rule.cpp"), tmp_path / "mask_rule"
    subprocess.run([CXX, "-std=c++20", "-O1", f"-I{CSRC}", source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert [int(n) for n in done.stdout.split()] == [152_880, 152_880]  # calls, of each width

"""`import attnjourney`: quick, without a warning, and with one sentence where it cannot be."""

import subprocess
import sys
from pathlib import Path

import pytest

from attnjourney import _library, _requirements

pytestmark = pytest.mark.smoke
ROOT = Path(__file__).parents[2]


def last_line(program, *options):
    done = subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, cwd=ROOT)
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def test_no_warning_and_no_compiler():
    """torch._dynamo takes longer to import than torch itself."""
    program = "import sys, torch, attnjourney; print('torch._dynamo' in sys.modules)"
    assert last_line(program, "-W", "error") == "False"


def test_without_torch():
    program = "import sys; sys.modules['torch'] = None; import attnjourney"
    assert last_line(program) == (
        "ModuleNotFoundError: attnjourney needs torch >= 2.11, and none is installed: pip install 'torch>=2.11'"
    )


def test_with_an_older_torch(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.10.1+cpu'")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import attnjourney"
    assert last_line(program) == "ImportError: attnjourney needs torch >= 2.11, and torch 2.10.1+cpu is installed"


def test_on_musl(monkeypatch, tmp_path):
    (tmp_path / "_C_cpu.so").write_bytes(b"not a library")
    with pytest.raises(ImportError, match="cannot load .*_C_cpu.so") as raised:
        _library._load(tmp_path / "_C_cpu.so")
    assert _requirements.on_musl() == ("this system has musl" in str(raised.value))
    monkeypatch.setattr(_requirements, "on_musl", lambda: True)
    with pytest.raises(ImportError, match="it is for glibc, and this system has musl"):
        _library._load(tmp_path / "_C_cpu.so")

"""attnjourney.integrations.hub: what it writes is loaded by `kernels` offline, in a process that has no other copy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnjourney.integrations import hub

ROOT = Path(__file__).parents[2]
USE = """
import sys, torch, kernels
kernel = kernels.get_kernel("attnjourney/flash-attention", version=1)
q, k, v = torch.randn(3, 2, 9, 4, 8)
out = kernel.flash_attn_func(q, k, v, causal=True)
wanted = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)
assert sys.modules["attnjourney"].__file__.startswith(sys.argv[1]), sys.modules["attnjourney"].__file__
assert "varlen_attention" in dir(torch.ops.attnjourney)
"""


def test_layout(tmp_path):
    (folder,) = [x for x in hub.write(tmp_path) if "-cpu-" in x.name]
    assert folder.parent.name == "build" and folder.name.startswith("torch-stable-abi211-cpu-")
    assert {x.name for x in folder.iterdir()} == {"__init__.py", "metadata.json", "attnjourney"}
    assert (folder / "attnjourney/_C_cpu.so").exists()
    with pytest.raises(ValueError, match="OUT: expected a folder without"):
        hub.write(tmp_path)


@pytest.mark.clients
def test_kernels_loads_it_offline(tmp_path):
    pytest.importorskip("kernels")
    subprocess.run([sys.executable, "-m", "attnjourney.integrations.hub", tmp_path], check=True, cwd=ROOT)
    environment = {**os.environ, "LOCAL_KERNELS": f"attnjourney/flash-attention={tmp_path}", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", USE, tmp_path], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr

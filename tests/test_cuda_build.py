"""The CUDA library: registers and spills of every kernel as recorded, and loading beside a torch without CUDA."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).parent / "cuda_kernels.txt"  # nvcc's version; then registers, bytes spilled, kernel
LIBRARIES = ROOT / "build/cuda/attnjourney"
KERNEL = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers",
    re.DOTALL,
)


@pytest.fixture(scope="module")
def built():
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if nvcc is None:
        pytest.skip("no nvcc on PATH or in CUDA_HOME")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "build/cuda"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "ATTNJOURNEY_CUDA": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return nvcc


def ptxas_reports():
    """{kernel: (registers, bytes spilled)}, and the warnings."""
    logs = [path.read_text() for path in sorted((ROOT / "build/release/csrc/cuda").rglob("*.o.log"))]
    found = [match.groups() for log in logs for match in KERNEL.finditer(log)]
    names = subprocess.run(
        ["c++filt"], input="\n".join(f[0] for f in found), capture_output=True, text=True, check=True
    )
    kernels = {}
    for (_, arch, stores, loads, registers), name in zip(found, names.stdout.splitlines()):
        name = re.sub(r"attnjourney::|void |\(\w+\)(?=\d)|__nv_|\([^()]*\)$", "", name)
        kernels[f"{arch} {name}"] = (int(registers), int(stores) + int(loads))
    return kernels, [line for log in logs for line in log.splitlines() if re.search(r"\bC75\d\d\b|warning", line)]


def test_registers_and_spills(built):
    release = re.search(
        r"release ([\d.]+)", subprocess.run([built, "--version"], capture_output=True, text=True).stdout
    )
    kernels, warnings = ptxas_reports()
    lines = [f"nvcc {release[1]}", *(f"{r:3} {s:3} {name}" for name, (r, s) in sorted(kernels.items()))]
    (ROOT / "build/cuda/kernels.txt").write_text("\n".join(lines) + "\n")
    recorded = RECORD.read_text().splitlines()
    if recorded[0] != lines[0]:
        pytest.skip(f"{RECORD.name} is for {recorded[0]}, this is {lines[0]}")
    assert not warnings
    before = {name: (int(r), int(s)) for r, s, name in (line.split(None, 2) for line in recorded[1:])}
    worse = {name: (before.get(name), now) for name, now in kernels.items() if name not in before or now > before[name]}
    assert not worse and kernels.keys() == before.keys(), (
        f"(recorded, now): {worse}; gone: {before.keys() - kernels.keys()}. If it is meant to be so: "
        f"cp build/cuda/kernels.txt {RECORD}"
    )


def test_loads_without_cuda(built):
    """Beside a torch without CUDA and without a driver the library loads, and the CPU operators work on."""
    program = f"""
import torch
for name in ("_C_cpu.so", "_C_cuda.so"):
    torch.ops.load_library("{LIBRARIES}/" + name)
has = torch._C._dispatch_has_kernel_for_dispatch_key
assert has("attnjourney::attention_forward", "CUDA") and has("attnjourney::attention_backward", "CUDA")
x = torch.randn(1, 2, 5, 8)
out, lse = torch.ops.attnjourney.attention_forward(x, x, x)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(x, x, x))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

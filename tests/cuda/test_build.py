"""The CUDA library: what nvcc made of every kernel as recorded, and loading beside a torch without CUDA."""

import os
import re
import subprocess
import sys

import pytest

from tools import cuda_record
from tools.cuda_record import OBJECTS, ROOT

LIBRARIES = ROOT / "build/cuda/attnjourney"


@pytest.fixture(scope="module")
def built():
    nvcc = cuda_record.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc on PATH or in CUDA_HOME")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "build/cuda"]
    environment = {"ATTNJOURNEY_CUDA_CODE": "80", **os.environ, "ATTNJOURNEY_CUDA": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return nvcc


@pytest.fixture(scope="module")
def kernels(built):
    """What there is and what is recorded of the same machine codes: {kernel: what cuda_record.COLUMNS say}."""
    version = subprocess.run([built, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ([\d.]+)", version)[1]
    now = cuda_record.present()
    recorded_release, record = cuda_record.recorded()
    codes = {name.split()[0] for name in now}
    before = {name: x for name, x in record.items() if name.split()[0] in codes}
    others = {name: x for name, x in record.items() if name not in before}
    (ROOT / "build/cuda/kernels.txt").write_text(cuda_record.written(release, others | now))
    if recorded_release != release:
        pytest.skip(f"{cuda_record.RECORD.name} is for nvcc {recorded_release}, this is {release}")
    return now, before


IF_MEANT = f"""If it is meant to be so: with ATTNJOURNEY_CUDA_CODE=80,90,100,120 in the environment once more, then
cp build/cuda/kernels.txt {cuda_record.RECORD}"""


def needs(kernel):
    """Registers as a multiprocessor hands them out, in eights for each thread, and bytes spilled: one register more or
    less within eight decides nothing, and comes and goes with edits elsewhere."""
    registers, spilled, *_ = kernel
    return -(-registers // 8) * 8, spilled


def test_registers_and_spills(kernels):
    now, before = kernels
    worse = {
        name: (before.get(name), now[name])
        for name in now
        if name not in before or any(x > y for x, y in zip(needs(now[name]), needs(before[name])))
    }
    assert not worse and now.keys() == before.keys(), (
        f"(recorded, now): {worse}; gone: {before.keys() - now.keys()}. {IF_MEANT}"
    )
    assert not cuda_record.ptxas_reports()[1], "warnings of ptxas"


def test_every_kernel_has_machine_code_of_each_gpu():
    """Without it the driver compiles at the first call, up to 10 s a file. Those of inst/sm90 are for Hopper alone."""
    of = {}
    for name in cuda_record.recorded()[1]:
        code, kernel = name.split(" ", 1)
        of.setdefault(code, set()).add(kernel)
    assert of.keys() == {"sm_80", "sm_90", "sm_90a", "sm_100", "sm_120"}
    assert of["sm_80"] == of["sm_90"] == of["sm_100"] == of["sm_120"]


def test_stack_frames(kernels):
    assert not cuda_record.stack_frames()


def test_shared_memory(kernels):
    now, before = kernels
    other = {name: (before[name][2], x[2]) for name, x in now.items() if name in before and x[2] != before[name][2]}
    assert not other, f"(recorded, now): {other}. {IF_MEANT}"


def test_instructions_of_wgmma(kernels):
    """HGMMA in SASS, prologues and the parts for borders included: wgmma that ptxas made slow would be more."""
    if cuda_record.find_cuobjdump() is None:
        pytest.skip("no cuobjdump beside nvcc, on PATH or in the package nvidia-cuda-cuobjdump")
    now, before = kernels
    assert any(x[3] for x in now.values())
    other = {name: (before[name][3], x[3]) for name, x in now.items() if name in before and x[3] != before[name][3]}
    assert not other, f"(recorded, now): {other}. {IF_MEANT}"


def test_launches_of_the_hopper_forward(built):
    """Blocks in clusters of two where they are for the call and the device runs them; else alone, with the counter."""
    program, source = ROOT / "build/cuda/launches", ROOT / "tests/cuda/launches.cu"
    command = [built, "-cudart", "none", "-std=c++20", "-Icsrc", "-arch=sm_90a", str(source), "-o", str(program)]
    done = subprocess.run(
        [*command, str(OBJECTS / "inst/sm90/forward_bf16.o")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    long, size = (8192, 8192), "128, 128, 2, 128, 2, 2"
    cases = [  # heads, heads of a key head, rows, keys, head_dim, ranges, clusters at a time; are they taken? sizes
        ((16, 1, *long, 128, 0, 66), True, size),
        ((16, 1, *long, 192, 0, 66), True, "192, 128, 2, 128, 2, 1"),
        ((16, 1, *long, 256, 0, 66), True, "256, 256, 2, 64, 2, 1"),
        ((16, 1, *long, 128, 1, 66), False, size),
        ((16, 1, 8064, 8192, 128, 0, 66), False, size),
        ((16, 2, 8064, 8192, 128, 0, 66), True, size),
        ((16, 1, *long, 128, 0, 65), False, size),
        ((16, 1, *long, 128, 0, -1), False, size),
        ((80, 1, 256, 256, 128, 0, 66), False, size),
    ]
    text = "\n".join(" ".join(map(str, case)) for case, *_ in cases)
    said = subprocess.run([str(program)], input=text, capture_output=True, text=True, check=True).stdout.split("\n")
    for (case, paired, shape), line in zip(cases, said[:-1], strict=True):
        *numbers, mangled = line.split()
        (name,) = cuda_record.names_of([mangled], ["sm_90a"])
        rows = int(shape.split(",")[3]) // (2 if paired else 1)
        assert numbers == [*(("132", "2", "0") if paired else ("132", "1", "1")), str(rows)], case
        assert ("Sm90ClusterShape" in name) == paired and f"bfloat16, {shape}, {'true' if case[5] else 'false'}" in name


def test_loads_without_cuda(built):
    """Beside a torch without CUDA and without a driver the library loads, and the CPU operators work on."""
    program = f"""
import torch
for name in ("_C_cpu.so", "_C_cuda.so"):
    torch.ops.load_library("{LIBRARIES}/" + name)
has = torch._C._dispatch_has_kernel_for_dispatch_key
assert has("attnjourney::attention_forward", "CUDA") and has("attnjourney::attention_backward", "CUDA")
x = torch.randn(1, 2, 5, 8)
out, lse, stats = torch.ops.attnjourney.attention_forward(x, x, x)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(x, x, x))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_package_imports_beside_it(built):
    """As with a torch that has CUDA, where the library is loaded before operators are listed."""
    code = f"import torch; torch.ops.load_library('{LIBRARIES}/_C_cuda.so'); import attnjourney"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

"""Builds and runs the program that calls CPU kernels without torch: for this machine, or for AArch64 in an emulator.

The kernels' objects are those of setup.py; what is compiled here is the dispatcher and the program itself.
"""

import functools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# name -> compiler, what runs its programs, the objects of kernels; this machine's own in any case
MACHINES = {
    "aarch64": ("aarch64-linux-gnu-g++", ("qemu-aarch64", "-cpu", "max"), ROOT / "build/release-aarch64"),
    platform.machine(): (os.environ.get("CXX") or "g++", (), ROOT / "build/release"),
}
DEFINES = {"x86_64": "-DATTNJOURNEY_X86=1", "aarch64": "-DATTNJOURNEY_ARM64=1"}


def missing(machine: str) -> str | None:
    """What the program of `machine` needs and this computer does not have, or None."""
    compiler, runner, objects = MACHINES[machine]
    for tool in (compiler, *runner[:1]):
        if shutil.which(tool) is None:
            return f"{tool} is not on PATH: Debian's g++-aarch64-linux-gnu and qemu-user"
    if not runner and not list(objects.glob("csrc/cpu/isa/*.o")):
        return f"the kernels' objects are not in {objects}: python setup.py build_ext --inplace makes them"
    return None


def _kernels(machine: str) -> list[str]:
    _, runner, objects = MACHINES[machine]
    if runner:
        own = {"_PYTHON_HOST_PLATFORM": f"linux-{machine}", "CXX": MACHINES[machine][0], "ATTNJOURNEY_KERNELS": "1"}
        command = [sys.executable, "setup.py", "-q", "build_ext"]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return sorted(map(str, objects.glob("csrc/cpu/isa/*.o")))


@functools.cache
def program(machine: str) -> Path:
    target = ROOT / "build/kernels" / machine
    target.parent.mkdir(parents=True, exist_ok=True)
    sources = [*(ROOT / "csrc/cpu" / name for name in ("dispatch.cpp", "tuning.cpp"))]
    sources += sorted((ROOT / "tests/kernels").glob("*.cpp"))
    command = [MACHINES[machine][0], "-std=c++20", "-O1", "-Wall", "-Wextra", "-static", DEFINES[machine]]
    command += ["-I", str(ROOT / "csrc"), *map(str, sources), *_kernels(machine), "-o", f"{target}.{os.getpid()}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    os.replace(f"{target}.{os.getpid()}", target)
    return target


def _bytes(x) -> bytes:
    if isinstance(x, torch.Tensor):
        x = x.contiguous()
        bits = {1: torch.uint8, 2: torch.int16}.get(x.dtype.itemsize, x.dtype)
        return x.view(bits).numpy().tobytes()
    return torch.tensor(float(x), dtype=torch.float64).numpy().tobytes()


def run(machine: str, isa: str, call: str, dtype: torch.dtype, inputs: dict) -> dict[str, bytes]:
    """The results of a call by name, for tensors and numbers by name; None is left out."""
    given = {name: _bytes(x) for name, x in inputs.items() if x is not None}
    data = b"".join(name.encode() + b"\0" + len(x).to_bytes(8, "little") + x for name, x in given.items())
    command = [*MACHINES[machine][1], str(program(machine)), call, str(dtype).removeprefix("torch.")]
    environment = {**os.environ, "ATTNJOURNEY_ISA": isa, "ATTNJOURNEY_TUNING": "matrix"}
    done = subprocess.run(command, input=data, capture_output=True, env=environment)
    assert done.returncode == 0, f"{' '.join(command)} on {isa}: {done.returncode} {done.stderr.decode()[-2000:]}"
    results, rest = {}, done.stdout
    while rest:
        name, rest = rest.split(b"\0", 1)
        size, rest = int.from_bytes(rest[:8], "little"), rest[8:]
        results[name.decode()], rest = rest[:size], rest[size:]
    return results


def tensor(data: bytes, dtype: torch.dtype, shape) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)

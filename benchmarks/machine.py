"""What the figures belong to: machine, versions, commit."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from attnjourney.info import cpu_info

from . import ceilings

ROOT = Path(__file__).resolve().parent.parent


def cpu_model() -> str:
    """Name from /proc/cpuinfo with family and model, which tell apart CPUs whose name says little."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    name = fields.get("model name", platform.machine())
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return name


def git(*args: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def describe(device: str, threads: int) -> dict:
    """The head of a results file."""
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain")),  # the tree differs from the commit
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "",
        "cpu": cpu_model(),
        "isa": cpu_info()["isa"],  # what our kernels use
        "ceiling_isa": list(ceilings.supported()),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),  # when the run began
        "torch": torch.__version__,
        "python": platform.python_version(),
    }

"""The commands of `make gpu` in their order, by part, each with the seconds that it may take: 13 minutes together.

conformance  every instruction wrapper of csrc/cuda/ptx against known answers; nothing else means much if one fails
warmup       what a first call costs: loading kernels, compiling FlexAttention, so that no later part pays for it
tests        the tests marked `cuda`, by family
sanitizer    compute-sanitizer's memcheck and racecheck on small calls
bench        one table, the most telling rows first: ours beside PyTorch's backends, FlexAttention and flash-attn
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("conformance", "warmup", "tests", "sanitizer", "bench")
FAMILIES = {  # name: (arguments of pytest, seconds); a file in two families is in one of them without the other's tests
    "attention": (["tests/cuda/test_attention.py", "-k", "not (options or packed)"], 27),
    "options": (["tests/cuda/test_attention.py", "-k", "options or packed"], 27),
    "blocks": (["tests/cuda/test_blocks.py"], 25),
    "fp32": (["tests/cuda/test_fp16x2.py"], 15),
    "fp8": (["tests/cuda/test_fp8.py"], 8),
    "decode": (["tests/cuda/test_decode.py", "-k", "values or split or served"], 26),
    "caches": (["tests/cuda/test_decode.py", "-k", "not (values or split or served)"], 17),
    "bytes": (["tests/cuda/test_byte_caches.py"], 10),
    "pages": (["tests/cuda/test_paged.py"], 10),
    "mla": (["tests/cuda/test_mla_decode.py"], 18),
    "linear": (["tests/cuda/test_linear.py"], 14),
    "gated": (["tests/cuda/test_gated.py"], 14),
    "jvp": (["tests/cuda/test_jvp.py"], 8),
    "backward_jvp": (["tests/cuda/test_backward_jvp.py"], 8),
    "sparse": (["tests/cuda/test_sparse.py"], 15),
    "indexer": (["tests/cuda/test_indexer.py"], 10),
    "layers": (["tests/cuda/test_layers.py"], 13),
    "seeing": (["tests/seeing/test_trace.py"], 13),
}
SDPA = "sdpa,sdpa-cudnn,sdpa-flash,sdpa-efficient"
FLASH = "fa2,fa3"
ROWS = {  # name: (cases, peers, seconds)
    "d128, 8k": ("gpu-bf16-d128-n8192", f"{SDPA},{FLASH}", 38),
    "d64 and 1k": ("gpu-bf16-d64,gpu-bf16-d128-n1024,gpu-bf16-d192-n1024", f"{SDPA},{FLASH}", 42),
    "decode": ("gpu-decode", f"{SDPA},{FLASH}", 32),
    "options": ("gpu-options", f"sdpa-cudnn,sdpa-efficient,{FLASH}", 37),
    "fp32": ("gpu-fp32", SDPA, 20),
    "fp8": ("gpu-fp8", "softmax", 8),
    "FlexAttention, blocks": ("gpu-flex,gpu-blocks", "sdpa-cudnn,sdpa-efficient,flex", 28),
    "linear": ("gpu-linear", "plain,softmax", 18),
    "192/128, 256, GQA, layers": ("gpu-bf16-d192-n8192,gpu-bf16-d256,gpu-bf16-gqa,gpu-layer", f"{SDPA},{FLASH}", 25),
}


@dataclass(frozen=True)
class Step:
    part: str
    name: str
    command: list[str]
    seconds: float  # at most
    environment: dict[str, str] = field(default_factory=dict)  # beside that of this process
    skip: str = ""  # why it is not run here
    cannot: str = ""  # words of the output by which a tool says that it cannot run here


def tool(name: str) -> str:
    """The path of a program of the CUDA toolkit, its name if there is none."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which(name) or shutil.which(name, path=os.path.join(home, "bin")) or name


def is_hopper() -> bool:
    """Whether the GPU is one, and True where nobody says."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return True
    return not said.strip() or said.startswith("9.0")


def benchmark(cases: str, peers: str, *more: str, seconds: float = 0.1) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.run", "--device", "cuda", "--no-memory", "--seconds", str(seconds)]
    return [*command, "--passes", "forward,backward", "--case", cases, "--peers", peers, *more]


def steps(out: Path, cases: str = "") -> list[Step]:
    """All of them, in their order; cases: of the benchmarks, in place of the usual."""
    conformance = str(out / "conformance")
    nvcc = [tool("nvcc"), "-std=c++20", "-O3", "-Icsrc", "-Itests/emulator", "-gencode", "arch=compute_90a,code=sm_90a"]
    nvcc += ["tests/emulator/conformance/conformance.cu", "-o", conformance]
    other = "" if is_hopper() else "for Hopper alone"
    calls = [sys.executable, "-m", "tools.gpu_calls"]
    pytest = [sys.executable, "-m", "pytest", "-v", "-m", "cuda", "--maxfail=25", "-o", "faulthandler_timeout=15"]
    sanitizer = [tool("compute-sanitizer"), "--error-exitcode", "9", "--kernel-regex", "kns=attnjourney", "--tool"]
    table = ["--append", "--json", str(out / "bench.json"), "--markdown", str(out / "bench.md")]
    sm80 = ["--json", str(out / "bench-sm80.json"), "--markdown", str(out / "bench-sm80.md")]
    everyone = f"{SDPA},{FLASH},flex,plain,softmax"
    bench_rows = {"chosen": (cases, everyone, 260)} if cases else ROWS
    return [
        Step("conformance", "nvcc", nvcc, 45, skip=other),
        Step("conformance", "run", [conformance], 15, skip=other),
        Step("warmup", "kernels", [*calls, "--rounds", "2"], 45),
        Step("warmup", "FlexAttention", benchmark("gpu-flex,gpu-blocks", "flex", seconds=0.001), 60),
        *(
            Step("tests", name, [*pytest, f"--junitxml={out / f'tests-{name}.xml'}", *arguments], seconds)
            for name, (arguments, seconds) in FAMILIES.items()
        ),
        *(
            Step("sanitizer", name, [*sanitizer, name, *calls], 45, cannot="Device not supported")
            for name in ("memcheck", "racecheck")
        ),
        *(
            Step("bench", name, benchmark(rows, peers, *table), seconds)
            for name, (rows, peers, seconds) in bench_rows.items()
        ),
        Step(
            "bench", "d128, 8k by mma.sync", benchmark(cases or "gpu-bf16-d128-n8192", "sdpa-flash", *sm80), 15,
            {"ATTNJOURNEY_CUDA_ARCH": "80"},
        ),
    ]  # fmt: skip

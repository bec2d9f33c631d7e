"""python tools/gpu.py: what `make gpu` does on a machine with a GPU, part by part, each with a time limit.

conformance  every instruction wrapper of csrc/cuda/ptx against known answers
tests        pytest -m cuda
sanitizer    compute-sanitizer's memcheck and racecheck on small calls
bench        benchmarks beside PyTorch's backends and FlexAttention

All together take --seconds at most: what finds no time left is skipped, and says so.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = """
import torch, attnjourney
for dim, dtype in ((64, torch.bfloat16), (128, torch.float16), (64, torch.float32), (20, torch.float64)):
    q, k, v = (torch.randn(1, h, 150, dim, device="cuda", dtype=dtype, requires_grad=True) for h in (2, 1, 1))
    lengths = torch.tensor([130], device="cuda")
    bias = torch.randn(150, 150, device="cuda", dtype=dtype)
    for options in (
        {}, {"is_causal": True}, {"window_size": (40, 3), "key_lengths": lengths},
        {"attn_mask": bias > 0, "dropout_p": 0.1}, {"attn_mask": bias, "softcap": 5.0},
    ):
        attnjourney.attention(q, k, v, enable_gqa=True, **options).sum().backward()
    blocks = attnjourney.BlockMask.from_function(lambda b, h, i, j: (i // 16 + j // 16) % 3 > i % 2, 1, 1, 150, 150, 16)
    attnjourney.attention(q, k, v, blocks.to("cuda"), enable_gqa=True).sum().backward()
    attnjourney.attention_weights(q, k, blocks.to("cuda"), enable_gqa=True)
    cache = attnjourney.PagedKVCache(1, 1, 200, dim, block_size=16, dtype=dtype, device="cuda")
    with torch.no_grad():
        for n in (149, 1):
            cache.step(q[:, :, :n], k[:, :, :n], v[:, :, :n])
    sizes = (1, 40, 1, 192), (1, 150, 576), (10240, 512)
    query, latent, weight = (torch.randn(size, device="cuda", dtype=dtype) for size in sizes)
    attnjourney.mla_decode(attnjourney.rope(query), latent, lengths, weight)
for dtype in (torch.bfloat16, torch.float32):
    q, k, v = (torch.randn(1, h, 600, 40, device="cuda", dtype=dtype, requires_grad=True) for h in (2, 1, 1))
    for options in ({}, {"is_causal": False, "normalize": False}):
        attnjourney.linear_attention(q, k, v, **options).sum().backward()
torch.cuda.synchronize()
"""


def tool(name: str) -> str | None:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which(name) or shutil.which(name, path=os.path.join(home, "bin"))


def steps(out: Path, cases: str) -> dict[str, list[tuple[list[str], int]]]:
    """{part: [(command, seconds it may take)]}"""
    import torch

    python, conformance = sys.executable, str(out / "conformance")
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)
    nvcc = [tool("nvcc") or "nvcc", "-std=c++20", "-O3", "-Icsrc", "-Itests/emulator"]
    nvcc += ["-gencode", "arch=compute_90a,code=sm_90a", "tests/emulator/conformance/conformance.cu", "-o", conformance]
    sanitizer = [tool("compute-sanitizer") or "compute-sanitizer", "--error-exitcode", "9"]
    sanitizer += ["--kernel-regex", "kns=attnjourney"]
    bench = [python, "-m", "benchmarks.run", "--device", "cuda", "--no-memory", "--seconds", "0.1"]
    bench += ["--passes", "forward,backward"]
    backends = "sdpa,sdpa-cudnn,sdpa-flash,sdpa-efficient"
    return {
        "conformance": [(nvcc, 60), ([conformance], 20)] if hopper else [],
        "tests": [
            ([python, "-m", "pytest", "-q", "-m", "cuda", f"--junitxml={out / 'cuda-tests.xml'}", "tests"], 90),
        ],
        "sanitizer": [
            ([*sanitizer, "--tool", "memcheck", python, "-c", SMALL], 60),
            ([*sanitizer, "--tool", "racecheck", python, "-c", SMALL], 60),
        ],
        "bench": [
            (
                [*bench, "--case", cases or "gpu-bf16,gpu-fp32,gpu-decode", "--peers", backends]
                + ["--json", str(out / "benchmarks.json")],
                120,
            ),
            (
                [*bench, "--case", cases or "gpu-options", "--peers", "sdpa-cudnn,sdpa-efficient"]
                + ["--json", str(out / "options.json")],
                40,
            ),
            (  # mma.sync alone
                ["env", "ATTNJOURNEY_CUDA_ARCH=80", *bench, "--case", cases or "gpu-bf16-d128-n8192"]
                + ["--peers", "sdpa-flash", "--json", str(out / "sm80.json")],
                30,
            ),
            (
                [*bench, "--case", cases or "gpu-flex", "--peers", "sdpa-cudnn,flex", "--json", str(out / "flex.json")],
                60,
            ),
            (
                [*bench, "--case", cases or "gpu-linear", "--peers", "plain", "--json", str(out / "linear.json")],
                30,
            ),
        ],
    }


def run(command: list[str], limit: float, log: Path) -> str:
    """ "ok", or what went wrong; the output goes to the terminal and to `log`."""
    if shutil.which(command[0]) is None:
        return f"skipped: no {command[0]} on PATH or in CUDA_HOME"
    try:
        done = subprocess.run(
            command, cwd=ROOT, timeout=limit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        text, result = done.stdout, "ok" if done.returncode == 0 else f"status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        text, result = (error.stdout or b"").decode(errors="replace"), f"no end after {limit:.0f} s"
    print(text[-6000:], flush=True)
    with log.open("a") as file:
        file.write(text)
    return result


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=ROOT / "build/gpu", help="where results go")
    p.add_argument("--part", default="", help="comma-separated; default: all")
    p.add_argument("--cases", default="", help="of the benchmarks (see benchmarks.run --case)")
    p.add_argument("--seconds", type=float, default=230, help="for everything")
    p.add_argument("--list", action="store_true", help="print the commands instead of running them")
    args = p.parse_args()
    out = args.out.resolve()
    parts = steps(out, args.cases)
    chosen = [part for part in args.part.split(",") if part] or list(parts)
    if unknown := set(chosen) - parts.keys():
        p.error(f"--part: unknown {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    if args.list:
        for part in chosen:
            for command, limit in parts[part]:
                print(f"{part} ({limit} s):", " ".join(repr(c) if " " in c or "\n" in c else c for c in command))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    summary, end = [], time.monotonic() + args.seconds
    for part in chosen:
        log = out / f"{part}.log"
        log.unlink(missing_ok=True)
        for command, limit in parts[part]:
            print(f"--- {part}: {Path(command[0]).name} {' '.join(command[1:4])} ...", flush=True)
            begin = time.monotonic()
            left = end - begin
            result = run(command, min(limit, left), log) if left > 5 else "skipped: no time left"
            summary.append(f"{part:12} {time.monotonic() - begin:6.1f} s  {result}")
    print("\n".join(summary))
    (out / "summary.txt").write_text("\n".join(summary) + "\n")
    return any(not line.endswith("ok") and "skipped" not in line for line in summary)


if __name__ == "__main__":
    sys.exit(main())

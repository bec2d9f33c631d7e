"""What the hardware can do at most, measured in the same process as everything else."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("peak.cpp")
BUILD = Path(__file__).resolve().parent.parent / "build" / "benchmarks"
KINDS = {"avx2": 0, "avx512": 1, "avx512_bf16": 2, "amx": 3}  # on Arm kind 0 is NEON
BF16 = ("amx", "avx512_bf16")  # of bfloat16 products, best first
WINDOW = 2e-3  # seconds of one measurement between two pieces
# of several threads: a contestant's idle workers spin on for some milliseconds, on the cores that are to be measured
WINDOW_THREADS = 12e-3


@cache
def library() -> ctypes.CDLL:
    """peak.cpp, compiled on first use."""
    compiler = os.environ.get("CXX", "g++")
    key = hashlib.sha256(SOURCE.read_bytes() + compiler.encode()).hexdigest()[:16]
    path = BUILD / f"peak_{key}.so"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-std=c++17", "-fPIC", "-shared", "-pthread", str(SOURCE), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"cannot compile {SOURCE.name}:\n{done.stderr}")
        partial.replace(path)  # another process may be compiling it too
    lib = ctypes.CDLL(str(path))
    lib.peak_supported.argtypes, lib.peak_supported.restype = [ctypes.c_int], ctypes.c_int
    lib.peak_flops.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double, ctypes.c_int]
    lib.read_bandwidth.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_double, ctypes.c_int]
    lib.peak_flops.restype = lib.read_bandwidth.restype = ctypes.c_double
    return lib


@cache
def _dram_data() -> torch.Tensor:
    return torch.ones(48 << 20)  # 192 MiB: beyond the caches


def flops(kind: str, threads: int, seconds: float = WINDOW) -> float:
    """FLOP/s of `threads` threads together; one thread is measured in CPU time, as the contestants are."""
    return library().peak_flops(KINDS[kind], threads, seconds, 1)


def dram(threads: int, seconds: float = WINDOW) -> float:
    """Bytes/s read from memory by `threads` threads together."""
    data = _dram_data()
    return library().read_bandwidth(data.data_ptr(), data.numel(), threads, seconds, 1)


@cache
def supported() -> tuple[str, ...]:
    return tuple(kind for kind, number in KINDS.items() if library().peak_supported(number))


@cache
def fma_kind() -> str:
    """The fp32 instruction set with the highest peak."""
    return max((kind for kind in ("avx2", "avx512") if kind in supported()), key=lambda kind: flops(kind, 1, 0.02))


def for_case(case, device: str, threads: int) -> tuple[str, dict[str, Callable[[], float]]]:
    """Name of the ceiling of the case, and the ceilings to measure beside it (FLOP/s, or bytes/s for dram)."""
    if device == "cuda":
        if case.memory_bound:
            return "dram", {"dram": _cuda_copy}
        return "matmul", {"matmul": lambda: _cuda_matmul(case.torch_dtype)}
    window = WINDOW if threads == 1 else WINDOW_THREADS
    measures = {"fma": lambda: flops(fma_kind(), threads, window)}
    if case.memory_bound:
        measures["dram"] = lambda: dram(threads, window)
        seconds = {"fma": case.flops("forward") / measures["fma"](), "dram": case.bytes("forward") / measures["dram"]()}
        return max(seconds, key=seconds.get), measures  # the nearer
    bf16 = [kind for kind in BF16 if kind in supported()]
    if case.dtype == "bf16" and bf16:
        measures["bf16"] = lambda: flops(bf16[0], threads, window)
        return "bf16", measures
    if case.dtype == "fp64":
        measures["fma"] = lambda: flops(fma_kind(), threads, window) / 2
    return "fma", measures


def survey(device: str, threads: int, seconds: float = 0.2) -> dict[str, float]:
    """All ceilings once, for one thread and for `threads`: what is printed before the first case."""
    if device == "cuda":
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return {f"matmul {name}": _cuda_matmul(dtype) for name, dtype in dtypes.items()} | {"dram": _cuda_copy()}
    counts = [1] if threads == 1 else [1, threads]
    found = {}
    for count in counts:
        suffix = "" if count == 1 else f" x{count}"
        for kind in supported():
            found[kind + suffix] = flops(kind, count, seconds)
        found["dram" + suffix] = dram(count, seconds)
    return found


@cache
def _cuda_operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    size = 4096 if dtype == torch.float32 else 8192
    return torch.randn(size, size, device="cuda", dtype=dtype), torch.randn(size, size, device="cuda", dtype=dtype)


def _cuda_seconds(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _cuda_matmul(dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product: what a kernel on this GPU reaches in practice."""
    a, b = _cuda_operands(dtype)
    return 2 * a.shape[0] ** 3 / _cuda_seconds(lambda: a @ b)


def _cuda_copy() -> float:
    """Bytes/s of a copy, reads and writes counted."""
    a = _cuda_operands(torch.float32)[0]
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / _cuda_seconds(lambda: b.copy_(a))

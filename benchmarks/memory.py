"""Peak memory of a call beyond its inputs and outputs.

On CPU every measurement is a process of its own, forked from a server that has imported everything and run nothing. The
child makes the inputs, runs the same kind of call on a short sequence (code pages, thread pools, lookup tables), gives
freed heap pages back, resets the kernel's high-water mark of resident memory, runs the call once, and reads
getrusage().ru_maxrss. The rise, less the bytes of the results, is the answer: pages of every allocator are seen,
malloc'ed scratch of C++ kernels included. Resolution: about 1 MiB (code pages touched for the first time). Where the
mark cannot be reset, memory up to the old mark is filled first. On CUDA torch's own peak counter serves.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from . import inputs
from .cases import Case
from .machine import ROOT
from .peers import OURS, PEERS, Peer, Skip

# compiled, or with threads and pools of their own: their memory is not one call's
UNMEASURED = {"flex", "jax", "onnxruntime", "zentorch"}


def keep_freed_pages() -> None:
    """Makes glibc keep what is freed, as it does in any process that has once freed a tensor of 32 MB.

    Until then it returns the pages of every result to the kernel, and a call's time is for a third that of page faults,
    for whoever happens to come before the first large block.
    """
    torch.empty(31 << 20, dtype=torch.uint8)  # of its own pages, and below the 32 MiB up to which thresholds follow


class Server:
    """Answers `extra`; the process behind it starts with the first question and ends with the with statement."""

    def __init__(self):
        self.process: subprocess.Popen | None = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        if self.process:
            self.process.stdin.close()
            self.process.wait()
            self.process = None

    def extra(self, case: Case, which: str, peer: Peer, device: str, threads: int) -> int | None:
        """Peak bytes beyond inputs and outputs; None if this peer cannot be measured or cannot do the case."""
        if peer.name in UNMEASURED:
            return None
        if device == "cuda":
            return _cuda_extra(case, which, peer)
        if self.process is None:
            # blocks of 64 KiB and more get their own pages: freed ones leave at once
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.memory"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=environment, cwd=ROOT,
            )  # fmt: skip
        question = {"case": dataclasses.asdict(case), "pass": which, "peer": peer.name, "threads": threads}
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that measures memory has ended")
        return json.loads(answer)


def _call(case: Case, which: str, peer: Peer, tensors: inputs.Inputs):
    call = peer.build(case, tensors, which)
    with peer.context(), torch.no_grad() if which == "forward" else contextlib.nullcontext():
        return call()


def _nbytes(result) -> int:
    return result.nbytes if isinstance(result, torch.Tensor) else sum(t.nbytes for t in result)


def _cuda_extra(case: Case, which: str, peer: Peer) -> int | None:
    tensors = inputs.make(case, "cuda")
    try:
        _call(case, which, peer, tensors)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = _call(case, which, peer, tensors)
    except Skip:
        return None
    return max(0, torch.cuda.max_memory_allocated() - before - _nbytes(result))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _high_water() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _level() -> mmap.mmap | None:
    """Makes resident memory and its high-water mark equal; what it returns must stay alive meanwhile."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    gap = _high_water() - _resident()
    if gap < 1 << 20:
        return None
    filler = mmap.mmap(-1, gap)
    for page in range(0, gap, mmap.PAGESIZE):
        filler[page] = 1
    return filler


def _extra(question: dict) -> int | None:
    case = Case(**question["case"] | {"passes": tuple(question["case"]["passes"])})
    peer = OURS if question["peer"] == OURS.name else PEERS[question["peer"]]
    torch.set_num_threads(question["threads"])
    short = dataclasses.replace(case, q_len=min(512, case.q_len), kv_len=min(512, case.kv_len))
    try:
        _call(short, question["pass"], peer, inputs.make(short))
        tensors = inputs.make(case)
        filler = _level()
        before = _resident()
        result = _call(case, question["pass"], peer, tensors)
        peak = _high_water()
    except (Skip, RuntimeError):
        return None
    del filler
    return max(0, peak - before - _nbytes(result))


def in_fork(work: Callable[[], int | None]) -> str:
    """What `work` returns in a forked child, as JSON; "null" if it raises there, "" if the child is killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = None
        try:
            answer = work()
        finally:
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def _serve() -> None:
    OURS.missing("cpu")  # loads the operators before the first fork
    for line in sys.stdin:
        print(in_fork(lambda line=line: _extra(json.loads(line))) or "null", flush=True)


if __name__ == "__main__":
    _serve()

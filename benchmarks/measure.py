"""One case, one pass: all contestants timed, checked against fp64, as a record for the JSON file."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from . import ceilings, inputs
from .cases import DERIVATIVES, Case
from .peers import Peer, Skip
from .timing import Clock, Contestant, take_turns
from .truth import Truth


def blank(case: Case, which: str, threads: int) -> dict:
    """A record without results. results: by contestant; skipped, failed: why a contestant has none."""
    return {
        "name": case.name, "group": case.group, "pass": which, "shape": case.shape(), "threads": threads,
        "flops": case.flops(which), "bytes": case.bytes(which), "results": {}, "skipped": {}, "failed": {},
    }  # fmt: skip


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def both(*contexts: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def measure(
    case: Case,
    which: str,
    peers: list[Peer],
    device: str,
    threads: int,
    budget: float,
    tensors: inputs.Inputs,
    truth: Callable[[], Truth],
    tick: Callable[[], None] = lambda: None,
) -> dict:
    """The record of a case: the ceilings measured beside it, and per contestant seconds, rates, error, or why not."""
    counts = [1, threads] if case.scaling and threads > 1 and device == "cpu" else [threads]
    record = blank(case, which, threads)
    grad_mode = torch.no_grad if which == "forward" else contextlib.nullcontext
    mode = deterministic if case.deterministic else contextlib.nullcontext
    contestants: dict[str, Contestant] = {}
    with grad_mode():
        for peer in peers:
            torch.set_num_threads(threads)
            try:
                if case.option and not peer.options:
                    raise Skip("options as a mask tensor are measured for sdpa alone")
                with mode():
                    call = peer.build(case, tensors, which)
                error = None
                if case.check and peer.same_function and not case.dropout and which not in DERIVATIVES:
                    with mode(), peer.context():
                        error = truth().error(peer.convert(call()))
            except Skip as reason:
                record["skipped"][peer.name] = str(reason)
                continue
            except Exception as error:  # must not lose the others' figures; run.py exits with 1 if it is ours
                record["failed"][peer.name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                continue
            record["results"][peer.name] = {"error": error}
            for count in counts:
                name = peer.name if count == threads else f"{peer.name} x{count}"
                contestants[name] = Contestant(call, count, functools.partial(both, mode, peer.context))
        if not contestants:
            return record
        clock = Clock(device, 1 if counts == [1] else threads)
        limit, measures = ceilings.for_case(case, device, threads)
        peaks = take_turns(contestants, measures, clock, budget, tick)
    torch.set_num_threads(threads)
    record |= {"clock": clock.name, "ceiling": limit, "ceilings": peaks}
    work = record["bytes"] if limit == "dram" else record["flops"]
    for name, result in record["results"].items():
        timed = contestants[name]
        result |= {
            "seconds": timed.best, "median": timed.median, "pieces": len(timed.times),
            "gflops": record["flops"] / timed.best / 1e9, "fraction": work / timed.best / peaks[limit],
        }  # fmt: skip
        if len(counts) > 1:
            result["scaling"] = contestants[f"{name} x1"].best / timed.best
    ours = record["results"].get("ours")
    if ours:
        for result in record["results"].values():
            result["ratio"] = result["seconds"] / ours["seconds"]  # above 1: slower than ours
    return record

"""Timing: contestants and ceilings take turns in short pieces, and the best piece of each counts.

Turns make a change of clock speed hit all of them alike. One thread is measured in CPU time of the process, which other
processes on the machine do not lengthen; several threads in wall time; a GPU with events.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

PIECE = 1e-3  # seconds a piece lasts at least: small calls are timed in batches
PIECES = 3  # pieces of each contestant at least, unless one alone exceeds the budget
CEILING_EVERY = 1e-2  # seconds between two looks at the ceilings, five times as many with several threads


@dataclass
class Contestant:
    """A call to be timed, and its times in seconds."""

    call: Callable[[], object]
    threads: int
    context: Callable[[], AbstractContextManager] = nullcontext  # entered around every batch of calls
    batch: int = 1  # calls in one piece
    times: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.times)

    @property
    def median(self) -> float:
        return statistics.median(self.times)


class Clock:
    """Seconds that a number of calls take."""

    def __init__(self, device: str, threads: int):
        self.name = "events" if device == "cuda" else "cpu" if threads == 1 else "wall"
        self._time = time.process_time if self.name == "cpu" else time.perf_counter

    def measure(self, call: Callable[[], object], count: int) -> float:
        if self.name == "events":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e-3
        now = self._time
        start = now()
        for _ in range(count):
            call()
        return now() - start


def take_turns(
    contestants: dict[str, Contestant],
    ceilings: dict[str, Callable[[], float]],
    clock: Clock,
    budget: float,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Times all contestants, about `budget` seconds each; returns the best value of each ceiling seen meanwhile.

    Everyone is warmed up before anyone is timed. A call that is longer than the budget is timed twice.
    """
    spent = {}
    for name, c in contestants.items():
        torch.set_num_threads(c.threads)
        with c.context():
            start = time.perf_counter()
            clock.measure(c.call, 1)
            spent[name] = estimate = time.perf_counter() - start
            if estimate > budget:  # the second, warm call counts
                c.times.append(clock.measure(c.call, 1))
            else:
                estimate = min(estimate, clock.measure(c.call, 3) / 3)
                spent[name] = 0.0
        c.batch = max(1, min(100_000, round(PIECE / max(estimate, 1e-8))))
        tick()

    peaks = {name: measure() for name, measure in ceilings.items()}
    every = CEILING_EVERY * (1 if all(c.threads == 1 for c in contestants.values()) else 5)
    looked = time.perf_counter()
    waiting = [name for name in contestants if spent[name] < budget]
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        while waiting:
            for name in waiting:
                c = contestants[name]
                torch.set_num_threads(c.threads)
                start = time.perf_counter()
                with c.context():
                    c.times.append(clock.measure(c.call, c.batch) / c.batch)
                spent[name] += time.perf_counter() - start
                if time.perf_counter() - looked > every:
                    peaks = {name: max(peaks[name], measure()) for name, measure in ceilings.items()}
                    looked = time.perf_counter()
            waiting = [name for name in waiting if spent[name] < budget or len(contestants[name].times) < PIECES]
            tick()
    finally:
        if enabled:
            gc.enable()
    return {name: max(peaks[name], measure()) for name, measure in ceilings.items()}

"""How the two warpgroups of csrc/cuda/kernels/sm90/latent.cuh take turns, event by event: clocks of a tile, which are
counted, not measured.

A multiprocessor is two servers: tensor cores, which take 64 clocks of each warpgroup's products in turn, and copies,
which go one after the other at the second-level cache's rate and land LATENCY clocks later. All wait as the kernel's
barriers say.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Generator

TENSOR, SHARED = 4096, 128  # FLOP and bytes a clock
LATENCY, BARRIER, QUANTUM = 800, 40, 64  # of a copy; from an arrival to who waits for it; see above
SOFTMAX = 600  # scores of a tile to weights
ROWS, KEYS, DIM, VALUES = 64, 64, 576, 512
BYTES = 2 * KEYS * DIM  # of a tile, from the second-level cache

PRODUCTS = 2 * ROWS * KEYS * (DIM + VALUES) / TENSOR  # clocks of a tile
# Clocks of shared memory: operands of scores, all but the rotary part of Q; of outputs, the other's weights once for
# each 128 of 256 columns; what copies and weights write.
SHARED_CLOCKS = (2 * (ROWS * VALUES + KEYS * DIM) + 2 * KEYS * VALUES + 2 * 2 * ROWS * KEYS) / SHARED
SHARED_CLOCKS += (BYTES + 2 * ROWS * KEYS) / SHARED

Steps = Generator["Event | float", None, None]


class Event:
    def __init__(self) -> None:
        self.happened, self.waiting = False, []


class Multiprocessor:
    def __init__(self, bytes_a_clock: float) -> None:
        self.rate, self.now, self.copied = bytes_a_clock, 0.0, 0.0
        self.later: list[tuple[float, int, Callable[[], None]]] = []
        self.products: tuple[deque, deque] = (deque(), deque())
        self.multiplying, self.turn, self.count = False, 0, 0

    def after(self, clocks: float, then: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.later, (self.now + clocks, self.count, then))

    def set(self, event: Event) -> None:
        event.happened = True
        for steps in event.waiting:
            self.after(BARRIER, lambda steps=steps: self.go_on(steps))

    def go_on(self, steps: Steps) -> None:
        for item in steps:
            if not isinstance(item, Event):
                return self.after(item, lambda: self.go_on(steps))
            if not item.happened:
                return item.waiting.append(steps)

    def multiply(self, warpgroup: int, clocks: float) -> Event:
        done = Event()
        self.products[warpgroup].append([clocks, done])
        self.next_product()
        return done

    def next_product(self) -> None:
        if self.multiplying or not any(self.products):
            return
        queue = self.products[self.turn ^ 1] or self.products[self.turn]
        self.turn, self.multiplying = self.products.index(queue), True
        clocks = min(QUANTUM, queue[0][0])

        def end() -> None:
            self.multiplying = False
            queue[0][0] -= clocks
            if queue[0][0] <= 0:
                self.set(queue.popleft()[1])
            self.next_product()

        self.after(clocks, end)

    def copy(self, bytes_: float) -> Event:
        landed = Event()
        self.copied = max(self.copied, self.now) + bytes_ / self.rate
        self.after(self.copied + LATENCY - self.now, lambda: self.set(landed))
        return landed

    def run(self, *all_steps: Steps) -> None:
        for steps in all_steps:
            self.go_on(steps)
        while self.later:
            self.now, _, then = heapq.heappop(self.later)
            then()


def clocks_of_a_tile(bytes_a_clock: float, tiles: int = 80) -> float:
    """In the long run; bytes_a_clock: what one multiprocessor gets of the second-level cache."""
    machine = Multiprocessor(bytes_a_clock)
    full, empty, started = {}, defaultdict(Event), defaultdict(Event)  # [tile, part]: quarters 0 .. 3, rotary columns
    weighed = defaultdict(Event)
    slow = max(1.0, SHARED_CLOCKS / PRODUCTS)  # where shared memory takes longer than the products
    quarter, rotary = slow * PRODUCTS * VALUES / (DIM + VALUES) / 4, slow * 2 * ROWS * KEYS * 64 / TENSOR
    ends: list[float] = []

    def copies(buffer: int, parts: tuple[int, ...]) -> Steps:
        for tile in range(buffer, tiles, 2):
            for part in parts:
                if tile >= 2:
                    yield empty[tile - 2, part]
                full[tile, part] = machine.copy(BYTES * (64 if part == 4 else 128) / DIM)
                machine.set(started[tile, part])

    def landed(tile: int, part: int) -> Steps:
        yield started[tile, part]
        yield full[tile, part]

    def warpgroup(own: int) -> Steps:
        for tile in range(own, tiles, 2):
            yield from landed(tile, 4)
            machine.multiply(own, rotary)
            for i in range(4):
                yield from landed(tile, i ^ 2 * own)
                scores = machine.multiply(own, quarter)
            if tile:
                yield weighed[tile - 1]
                others = [machine.multiply(own, quarter) for _ in range(2)]
            yield scores
            machine.set(empty[tile, 4])
            yield SOFTMAX * 0.4
            for half in range(2):
                if tile:
                    yield others[half]
                    machine.set(empty[tile - 1, 2 * own + half])
                yield SOFTMAX * 0.3
            machine.set(weighed[tile])
            mine = [machine.multiply(own, quarter) for _ in range(2)]
            for half in range(2):
                yield mine[half]
                machine.set(empty[tile, 2 * own + half])
            ends.append(machine.now)

    warps = copies(0, (4, 0, 1)), copies(0, (2, 3)), copies(1, (4, 2, 3)), copies(1, (0, 1))
    machine.run(*warps, warpgroup(0), warpgroup(1))
    return (ends[-5] - ends[19]) / (len(ends) - 24)

"""python -m tools.cuda_counts: what counting predicts of the kernels on an H100, beside what they are to reach.

Nothing here is measured: clocks of a tile, tiles of a call and how they share out over multiprocessors. Tensor cores,
shared memory and exponentials of a tile are counted from its sizes; what of a tile they do not hide from each other are
the constants below, one set for each kind of loop, fitted to prototypes of these loops on an H100. So a figure says
what a kernel reaches if its loop does as well as those, and what tiles, borders, launches and merges cost beside it.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.markdown import rows
from tools import latent_turns

MULTIPROCESSORS = 132
CLOCK, FREE_CLOCK = 1.5e9, 1.75e9  # with all tensor cores at work, by the limit of power; without
TENSOR = 4096  # FLOP a clock of a multiprocessor, 16-bit numbers
SHARED = 128  # bytes a clock
EXPONENTIALS = 16  # a clock
MEMORY = 3.0e12  # bytes a second that reads reach
LAUNCH = 2.5e-6  # a kernel's first and last moments, in seconds

# The forward: half of a tile's exponentials show; what a tile of rows takes besides its keys, where the next one's
# first product runs under its last, and where not; what is hidden from some rows costs in a tile of keys, and what the
# look at its values does in front of P V where the warps that multiply take it, and where others do.
SHOWN = 0.5
CHAINED, UNCHAINED, HIDING, GUARD, SCOUTED = 1000, 2500, 700, 500, 100
# Instructions a score for a floating mask, 128 a clock, of which half show as of the exponentials.
BIAS = 4.5
# The backward: an iteration's exchange of dS, its sums to dQ and its waits, and what shows of each score's arithmetic,
# in clocks; what dQ through shared memory takes more, and the time from a block's sums to the next one's.
MEETING, SCORE, ORDERED, TURN = 800, 4.3 / 128, 300, 500
# With options: instructions a clock of a warp that has its scheduler to itself; those of a warp for its part of 64 x 64
# scores with a floating mask that TMA brings, from the products to the next ones, in the code for sm_90a.
ALONE, MASKED = 0.6, 861
# Decoding over latents: bytes a second that all multiprocessors together read from the second-level cache.
SECOND_LEVEL = 5.5e12


@dataclass(frozen=True)
class Heads:
    """(batch, head) pairs of n rows and keys."""

    count: int
    n: int
    head_dim: int
    v_head_dim: int
    causal: bool = False
    window: int = 0

    def flop(self, columns: int) -> float:
        """Of products over so many columns; causal: half of all pairs count."""
        return 2 * columns * self.count * self.n**2 / (2 if self.causal else 1)


def heads(n: int, dims: tuple[int, int], **kind) -> Heads:
    """16384 tokens in all, 2048 columns of heads."""
    return Heads(max(1, 16384 // n) * 2048 // dims[1], n, *dims, **kind)


def makespan(tasks: Iterable[float]) -> float:
    """Clocks until all are done, each begun in this order where a multiprocessor is free."""
    free = [0.0] * MULTIPROCESSORS
    for clocks in tasks:
        heapq.heapreplace(free, free[0] + clocks)
    return max(free)


@dataclass(frozen=True)
class Forward:
    rows: int
    keys: int
    chained: bool = True
    guard: int = SCOUTED
    bias: int = 0  # bytes of a number of a floating mask

    def tile(self, head_dim: int, v_head_dim: int) -> float:
        tensor = 2 * self.rows * self.keys * (head_dim + v_head_dim) / TENSOR
        operands = self.rows // 64 * (64 * head_dim + self.keys * (head_dim + v_head_dim))
        scores = self.rows * self.keys  # what TMA brings is written, then read
        shared = 2 * (operands + self.keys * (head_dim + v_head_dim) + scores * self.bias) / SHARED
        return max(tensor, shared) + SHOWN * scores * (1 / EXPONENTIALS + (self.bias > 0) * BIAS / 128)

    def row_tile(self, h: Heads, row: int) -> float:
        first = max(0, row - h.window + 1) if h.window else 0
        last = min(h.n, row + self.rows) if h.causal else h.n
        tiles = -(-last // self.keys) - first // self.keys
        hiding = h.causal * -(-self.rows // self.keys) + 2 * (first > 0)
        ends = CHAINED if self.chained else UNCHAINED
        return tiles * self.tile(h.head_dim, h.v_head_dim) + hiding * (HIDING + self.guard) + ends

    def seconds(self, h: Heads) -> float:
        order = sorted(range(0, h.n, self.rows), reverse=h.causal)  # longest first
        return makespan(self.row_tile(h, row) for row in order for _ in range(h.count)) / CLOCK + LAUNCH

    def rate(self, h: Heads) -> float:
        """TFLOP/s"""
        return h.flop(h.head_dim + h.v_head_dim) / self.seconds(h) / 1e12

    def cache_rate(self, h: Heads, cluster: int) -> float:
        """TB/s that blocks read from the second-level cache where so many share their keys and values."""
        keys = h.n * (h.head_dim + h.v_head_dim) / cluster
        return 2 * h.count * -(-h.n // self.rows) * (self.rows * h.head_dim + keys) / self.seconds(h) / 1e12


def varlen_rate(lengths: tuple[int, ...], q_heads: int, longest_first: bool = True) -> float:
    """TFLOP/s of causal packed sequences, 128 columns, by the kernel with options. longest_first: sequences in that
    order, and the last rows of each first; else as they lie."""
    kernel, calls = Forward(128, 128, False, GUARD), [Heads(q_heads, n, 128, 128, causal=True) for n in lengths]
    tiles = []
    for h in sorted(calls, key=lambda h: -h.n) if longest_first else calls:
        for row in sorted(range(0, h.n, kernel.rows), reverse=longest_first):
            tiles += [kernel.row_tile(h, row)] * q_heads
    return sum(h.flop(256) for h in calls) / (makespan(tiles) / CLOCK + 2 * LAUNCH) / 1e12


@dataclass(frozen=True)
class Backward:
    rows: int
    keys: int
    shared: int = 0  # clocks of shared memory for a tile (docs/cuda.md), where these are more than the tensor cores'
    deterministic: bool = False

    def tile(self, head_dim: int, v_head_dim: int) -> float:
        tensor = 2 * self.rows * self.keys * (3 * head_dim + 2 * v_head_dim) / TENSOR
        return max(tensor, self.shared) + MEETING + ORDERED * self.deterministic + SCORE * self.rows * self.keys

    def around(self, head_dim: int, v_head_dim: int) -> float:
        """Clocks of a block before its first tile and behind its last."""
        return 2000

    def seconds(self, h: Heads) -> float:
        key_tiles, query_tiles, clocks = -(-h.n // self.keys), -(-h.n // self.rows), self.tile(h.head_dim, h.v_head_dim)
        around = self.around(h.head_dim, h.v_head_dim)
        span = max(1, min(h.count, 256 // key_tiles)) if h.causal and not self.deterministic else 1
        free, sums = [0.0] * MULTIPROCESSORS, [[0.0] * query_tiles for _ in range(h.count)]
        for first in range(0, h.count, span):
            # longest first; in a fixed order the blocks of the last keys have the first turns
            for key_tile in sorted(range(key_tiles), reverse=self.deterministic):
                begin = key_tile * self.keys // self.rows if h.causal else 0
                borders = (HIDING + GUARD) * (self.keys // self.rows) if h.causal else 0
                for turns in sums[first : first + span]:
                    at = free[0] + around + borders
                    for query_tile in range(begin, query_tiles):
                        at += clocks
                        if self.deterministic:
                            at = max(at, turns[query_tile])
                            turns[query_tile] = at + TURN
                    heapq.heapreplace(free, at)
        # delta before, and dQ from its sums behind: dO, O; float sums
        passes = h.count * h.n * (4 * h.v_head_dim + 8 * h.head_dim) / MEMORY + 2 * LAUNCH
        return max(free) / CLOCK + LAUNCH + passes

    def rate(self, h: Heads) -> float:
        return h.flop(3 * h.head_dim + 2 * h.v_head_dim) / self.seconds(h) / 1e12


@dataclass(frozen=True)
class FullBackward(Backward):
    """With options, two warpgroups of 64 keys each. weighing: instructions, as MASKED; apart: one warpgroup weighs
    while the other multiplies, else both at once, with nothing in the tensor cores."""

    weighing: int = MASKED
    apart: bool = True

    def tile(self, head_dim: int, v_head_dim: int) -> float:
        tensor = 2 * self.rows * self.keys * (3 * head_dim + 2 * v_head_dim) / TENSOR
        rest = MEETING + ORDERED * self.deterministic
        if not self.apart:
            return tensor + 2 * self.weighing + rest
        return max(tensor, tensor / 2 + self.weighing / ALONE) + SCORE * self.rows * self.keys + rest

    def around(self, head_dim: int, v_head_dim: int) -> float:
        """Apart, with scores and dP behind the last tile and dQ before the first, which count for nothing."""
        idle = 2 * self.rows * self.keys * (2 * head_dim + v_head_dim) / TENSOR
        return super().around(head_dim, v_head_dim) + idle * self.apart


@dataclass(frozen=True)
class Decode:
    """One row of each of `group` heads over the keys of `kv_heads` heads; element: bytes, its part of a scale too."""

    batch: int
    kv_heads: int
    keys: int
    group: int = 4
    head_dim: int = 128
    element: float = 2

    def splits(self) -> int:
        """As csrc/cuda/decode/decode_tiling.h, two blocks a multiprocessor."""
        units, slots = self.batch * self.kv_heads, 2 * MULTIPROCESSORS
        fill, rounds = min(slots // units, -(-self.keys // 128)), min(-(-4 * slots // units), self.keys // 1024)
        return max(1, fill, rounds)

    def merge(self, joins: bool = True) -> float:
        """Seconds: by the last block of a unit, 46 bytes a clock after a thousand for its count and the parts' weights;
        where parts are too large a launch, and reads that wait for each other."""
        parts = self.group * self.splits() * self.head_dim * 4
        return (1000 + parts / 46) / FREE_CLOCK if joins and parts <= 128 << 10 else LAUNCH + 1e-6

    def seconds(self) -> float:
        return LAUNCH + self.bytes() / MEMORY + (self.merge() if self.splits() > 1 else 0)

    def bytes(self) -> float:
        return 2 * self.batch * self.kv_heads * self.keys * self.head_dim * self.element

    def rate(self) -> float:
        """GB/s"""
        return self.bytes() / self.seconds() / 1e9


def many_rows_rate(kv_heads: int, group: int, q_len: int, keys: int, split: bool = True) -> float:
    """TFLOP/s of decode with q_len rows of 128 columns, one sequence: by attention's kernel, or split over blocks of 64
    rows, two a multiprocessor, which take a step of 16 keys in 1200 clocks (csrc/cuda/decode/decode_tiling.h)."""
    if split:
        units = kv_heads * -(-group * q_len // 64)
        seconds = units * keys / 16 * 600 / MULTIPROCESSORS / CLOCK + 2 * LAUNCH + 1e-6
    else:
        blocks = kv_heads * group * -(-q_len // 128)
        seconds = makespan([keys / 128 * Forward(128, 128).tile(128, 128) + CHAINED] * blocks) / CLOCK + LAUNCH
    return 4 * kv_heads * group * q_len * keys * 128 / seconds / 1e12


def latent_rate(batch: int, keys: int, q_heads: int) -> float:
    """TFLOP/s of mla_decode, q_len 1: blocks of 64 rows share tiles of 64 keys of all sequences, equally or by whole
    sequences, as csrc/cuda/kernels/decode/ragged_shares.cuh says; a sequence's begin counts as a tile."""
    row_tiles = q_heads // 64
    groups, tiles = MULTIPROCESSORS // row_tiles, -(-keys // 64)
    each, share = -(-batch // groups), batch * (tiles + 1) / groups
    cut = each * (tiles + 1) > -(-batch * (tiles + 1) // groups) + 5
    blocks = row_tiles * (groups if cut else -(-batch // each))
    tile = latent_turns.clocks_of_a_tile(SECOND_LEVEL / CLOCK / blocks)
    seconds = (share + 2 if cut else each * (tiles + 1)) * tile / CLOCK + 2 * LAUNCH
    if cut:  # parts, written and read
        seconds += 2 * min(2 * groups, groups + batch) * row_tiles * 64 * 512 * 4 / SECOND_LEVEL
    return 2 * batch * q_heads * keys * (576 + 512) / seconds / 1e12


FORWARD = (  # head dimensions; kernels of long calls, and of short causal ones; {(n, causal): goal}
    ((128, 128), Forward(128, 128), Forward(128, 128),
     {(8192, False): 680, (8192, True): 650, (1024, False): 620, (1024, True): 480}),
    ((64, 64), Forward(192, 128, True, GUARD), Forward(128, 128),
     {(8192, False): 560, (8192, True): 520, (1024, True): 360}),
    ((192, 128), Forward(128, 128, False), Forward(128, 128, False), {(8192, False): 700, (8192, True): 700}),
    ((256, 256), Forward(128, 64, False, GUARD), Forward(128, 64, False, GUARD),
     {(8192, False): 640, (8192, True): 600}),
)  # fmt: skip
PAIRED = ((128, 128), (192, 128), (256, 256))  # in clusters of two blocks
BACKWARD = (
    ((128, 128), Backward(64, 128),
     {(8192, False): 620, (8192, True): 590, (1024, True): 230, (2048, True): 350, (4096, True): 470}),
    ((64, 64), Backward(128, 128), {(8192, False): 560, (8192, True): 540}),
    ((192, 128), Backward(64, 128, 3776), {(8192, False): 480, (8192, True): 450}),
    ((256, 256), Backward(64, 64, 3456), {(8192, False): 500, (8192, True): 470}),
    ((128, 128), Backward(64, 128, deterministic=True), {(8192, False): 520, (8192, True): 500}),
)  # fmt: skip
DECODE = (
    ("batch 1, 32768 keys", Decode(1, 8, 32768), 2850),
    ("batch 16, 8192 keys", Decode(16, 8, 8192), 3000),
    ("batch 16, 8192 keys, float8", Decode(16, 8, 8192, element=1 + 4 / 128), 3000),
)


def lines() -> list[list[str]]:
    found = []

    def add(name: str, rate: float, goal: float, unit: str = "TFLOP/s") -> None:
        found.append([name, f"{rate:.0f} {unit}", f"{goal:.0f}"])

    def name(dims: tuple[int, int], n: int, causal: bool) -> str:
        return f"{dims[0]}{f'/{dims[1]}' * (dims[0] != dims[1])}, {n}{', causal' * causal}"

    for dims, long, short, goals in FORWARD:
        for (n, causal), goal in goals.items():
            kernel = short if causal and n <= 1024 else long
            add(f"forward {name(dims, n, causal)}", kernel.rate(heads(n, dims, causal=causal)), goal)
    for dims, kernel, *_ in FORWARD:
        if dims in PAIRED:
            alone, paired = (kernel.cache_rate(heads(8192, dims), cluster) for cluster in (1, 2))
            about = f"forward {name(dims, 8192, False)}, second-level cache, blocks alone and in pairs"
            found.append([about, f"{alone:.1f}, {paired:.1f} TB/s", ""])
    d128 = Forward(128, 128)
    share = d128.seconds(heads(4096, (128, 128), causal=True, window=512)) / d128.seconds(heads(4096, (128, 128)))
    found.append(["forward 128, 4096, window 512, of the time without", f"{share:.2f}", "0.25"])
    add("forward 128, 4096, floating mask", Forward(128, 128, False, GUARD, bias=2).rate(heads(4096, (128, 128))), 520)
    rate = varlen_rate((512,) * 24 + (4096,), 8)
    found.append(
        ["varlen_attention 128, causal, 24 sequences of 512 and one of 4096, 8 heads", f"{rate:.0f} TFLOP/s", ""]
    )
    for dims, kernel, goals in BACKWARD:
        for (n, causal), goal in goals.items():
            about = "backward, fixed order," if kernel.deterministic else "backward"
            add(f"{about} {name(dims, n, causal)}", kernel.rate(heads(n, dims, causal=causal)), goal)
    add("backward 128, 4096, floating mask", FullBackward(64, 128).rate(heads(4096, (128, 128))), 450)
    for about, case, goal in DECODE:
        add(f"decode, {about}", case.rate(), goal, "GB/s")
    found.append(["decode, 8 heads, 128 rows, 32768 keys", f"{many_rows_rate(8, 1, 128, 32768):.0f} TFLOP/s", ""])
    add("mla_decode, batch 64, 4096 keys, 128 heads", latent_rate(64, 4096, 128), 660)
    return found


def table() -> str:
    return "\n".join(rows(["call", "counted", "goal"], lines()))


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(table())


if __name__ == "__main__":
    main()

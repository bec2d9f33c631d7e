"""The order in which the blocks of a deterministic CUDA backward add to a tile of queries
(csrc/cuda/kernels/common/backward_task.cuh), and how long they wait for each other."""

import heapq
from collections import defaultdict
from functools import partial

import pytest
import torch

from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed

ROWS, KEYS = 64, 128  # of the program's tiles
LENGTHS = ([0, 1, 64, 300], [700, 13, 0, 128])
CASES = [  # (batch, query heads, key heads), rows, keys, ranges
    ((2, 4, 2), 300, 700, {}),
    ((1, 2, 2), 700, 700, {"right": 0}),
    ((2, 2, 1), 300, 700, {"right": 0, "bottom_right": 1}),
    ((1, 1, 1), 700, 300, {"right": 0, "offset": -200}),
    ((1, 1, 1), 65, 700, {"right": 0, "offset": 60}),
    ((1, 2, 1), 900, 650, {"left": 30}),
    ((1, 1, 1), 900, 650, {"left": 150, "right": 10, "offset": 5}),
    ((1, 1, 1), 900, 650, {"left": 3, "right": 0, "prefix": 50}),
    ((1, 1, 1), 1200, 650, {"left": 70, "right": 0, "prefix": 300, "offset": -90}),
    ((4, 2, 2), 300, 700, {"left": 140, "right": 3, "prefix": 40, "lengths": LENGTHS}),
    ((4, 2, 1), 300, 700, {"right": 0, "bottom_right": 1, "lengths": LENGTHS}),
    ((1, 2, 1), 800, 900, {"right": 0, "bottom_right": 1, "packed": ([0, 0, 70, 500, 800], [0, 200, 200, 700, 900])}),
    ((1, 2, 2), 800, 900, {"left": 90, "right": 30, "prefix": 20, "packed": ([0, 64, 65, 800], [0, 128, 256, 900])}),
]


@pytest.fixture(scope="module")
def programs():
    build.build_all([("turns",), *(("turns", (), build.Fault(*fault[1:])) for fault in faults.TURNS)])


def order_of(program, sizes, rows, keys, ranges):
    """[(tile, turn), ...] of each block."""
    batch, heads, key_heads = sizes
    query, key = torch.empty(batch, heads, rows, 1), torch.empty(batch, key_heads, keys, 1)
    arguments, lengths = run._arguments(query, key, key, ranges, "forward")
    items, packed = arguments["batch"], arguments["packed"]
    tiles = rows // ROWS + items if packed else -(-rows // ROWS)
    key_tiles = keys // KEYS + items if packed else -(-keys // KEYS)
    width = tiles * heads // key_heads
    outputs = [((key_tiles * key_heads * (1 if packed else batch), 1 + width), torch.int32)]
    found = run.run(program, lengths, outputs, arguments)[0][0].tolist()
    return [[(x >> 10, x & 1023) for x in block[1 : 1 + block[0]]] for block in found]


def check(program, case):
    """The nth block that comes to a tile has turn n, so that none waits for a block of a higher number."""
    turns = defaultdict(list)
    for block in order_of(program, *case):
        for tile, turn in block:
            turns[tile].append(turn)
    assert turns
    for tile, found in turns.items():
        assert found == list(range(len(found))), f"tile {tile}: {found}"


@pytest.mark.parametrize("case", CASES, ids=[str(i) for i in range(len(CASES))])
def test_turns_are_those_of_the_blocks_in_order(programs, case):
    check(build.program("turns"), case)


def busy_share(blocks, processors):
    """Of the time of `processors` that run one block each, in order, one tile a step, where a block has to wait until
    all with lower turns have left the tile."""
    free, left = [0] * processors, defaultdict(int)
    for block in blocks:
        now = heapq.heappop(free)
        for tile, _ in block:
            now = left[tile] = max(now, left[tile]) + 1
        heapq.heappush(free, now)
    return sum(map(len, blocks)) / (processors * max(free))


def test_blocks_of_long_sequences_wait_little(programs):
    """132 multiprocessors, 32 heads of 8,192 tokens."""
    program, sizes = build.program("turns"), (2, 16, 16)
    assert busy_share(order_of(program, sizes, 8192, 8192, {"right": 0}), 132) >= 0.9
    assert busy_share(order_of(program, sizes, 8192, 8192, {}), 132) >= 0.9
    assert busy_share(order_of(program, sizes, 8192, 8192, {"left": 1023, "right": 0}), 132) >= 0.9


@pytest.mark.parametrize("what,file,old,new", faults.TURNS, ids=[f[0] for f in faults.TURNS])
def test_faulty_turns_are_found(programs, what, file, old, new):
    program = build.program("turns", (), build.Fault(file, old, new))
    assert is_noticed([partial(check, program, case) for case in CASES], what)

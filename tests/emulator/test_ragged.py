"""How blocks share out sequences of any lengths (csrc/cuda/kernels/decode/ragged_shares.cuh), on the CPU by
tests/emulator: that every tile of keys is somebody's, once, and that no block has much more to do than others."""

from functools import partial

import pytest
import torch

from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed

KEYS = 64  # of a tile
SHARES = "decode/ragged_shares.cuh"
PROGRAM = ("ragged",)


def lengths_of(batch, low=128, high=8192, seed=0):
    return torch.randint(low, high + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()


CASES = [  # lengths, groups
    ([4096], 66),
    ([0], 7),
    ([0] * 9, 4),
    ([1, 0, 64, 65, 128, 129, 8192, 0], 5),
    ([0, 0, 500, 0, 0], 3),
    ([64] * 500, 12),
    ([127] * 31, 64),
    (lengths_of(7), 132),
    (lengths_of(64, seed=1), 66),
    (lengths_of(900, 0, 700, seed=2), 44),
    ([100] * 800 + [100000] + [100] * 20, 132),
    (lengths_of(30, seed=3), 1),
]


def tiles_of(lengths):
    return [-(-n // KEYS) for n in lengths]


def shares(program, lengths, groups, order="forward"):
    """[(begin, end)] of each group, both (sequence, tile)."""
    arguments = {"batch": len(lengths), "groups": groups, "capacity": max(lengths)} | run.order_arguments(order)
    (cuts,), _ = run.run(program, [torch.tensor(lengths)], [((groups, 2, 2), torch.int32)], arguments)
    return [tuple(map(tuple, both)) for both in cuts.tolist()]


def parts_of(share, tiles):
    """[(sequence, first, last)] of a share."""
    (batch, tile), (end, end_tile) = share
    found = []
    for b in range(batch, len(tiles)):
        first, last = tile if b == batch else 0, end_tile if b == end else tiles[b]
        if b > end or (b == end and first >= last):
            break
        found.append((b, first, last))
    return found


def check(program, case, order):
    lengths, groups = case
    tiles = tiles_of(lengths)
    found = shares(program, lengths, groups, order)
    assert found[0][0] == (0, 0) and found[-1][1] == (len(lengths), 0)
    assert all(before[1] == after[0] for before, after in zip(found, found[1:]))
    parts = [part for share in found for part in parts_of(share, tiles)]
    assert [b for b, first, _ in parts if first == 0] == list(range(len(lengths)))
    at = 0
    for i, (b, first, last) in enumerate(parts):
        assert first == at and first < max(last, 1) and last <= tiles[b]
        at = 0 if last == tiles[b] else last
        assert at == 0 or parts[i + 1][0] == b
    assert at == 0


def clocks(share, tiles):
    """Of a block, in the time of a tile: tiles, and one more for each sequence."""
    return sum(last - first + 1 for _, first, last in parts_of(share, tiles))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_tile_is_somebodys(case):
    for order in ("forward", "random", "starve"):
        check(build.program(*PROGRAM), CASES[case], order)


@pytest.mark.parametrize("batch, row_tiles", [(16, 2), (64, 2), (40, 1), (200, 2), (64, 3), (512, 1)])
def test_multiprocessors_are_busy(batch, row_tiles):
    """Of 132, with lengths between 128 and 8192: the share of their time, begins of sequences counting as none."""
    groups = 132 // row_tiles
    for seed in range(5):
        lengths = lengths_of(batch, seed=seed)
        tiles = tiles_of(lengths)
        found = shares(build.program(*PROGRAM), lengths, groups)
        busy = row_tiles * sum(tiles) / (132 * max(clocks(share, tiles) for share in found))
        assert busy > 0.9
        # as before, a sequence of one block each, and of several where these are more than sequences
        splits = max(1, groups // batch)
        blocks = [t / splits + 1 for t in tiles for _ in range(row_tiles * splits)]
        free = [0.0] * 132
        for time in blocks:
            free[free.index(min(free))] += time
        assert busy > 1.15 * row_tiles * sum(tiles) / (132 * max(free)) or batch > 400


def test_whole_sequences_where_these_are_as_good():
    """Equal lengths that nearly fill the groups: none is cut, nothing is joined."""
    for batch, groups, each in ((64, 66, 1), (130, 66, 2), (132, 132, 1), (5, 66, 0)):
        tiles = tiles_of([4096] * batch)
        found = shares(build.program(*PROGRAM), [4096] * batch, groups)
        if each:
            assert found == [((min(g * each, batch), 0), (min((g + 1) * each, batch), 0)) for g in range(groups)]
        else:
            assert max(clocks(share, tiles) for share in found) <= -(-batch * 65 // groups) + 1


FAULTS = [
    ("sums before they are there", SHARES, "@sums_there", ""),
    ("cuts before they are there", SHARES, "@cuts_there", ""),
    ("the sum of a thread counted for itself", SHARES, "  before -= own;\n", ""),
    ("warps before left out", SHARES, "if (w < warp) before += room[w];", ""),
    ("one sequence for each thread", SHARES, "(task.batch + kRaggedThreads - 1) / kRaggedThreads;", "1;"),
    ("nobody's cut", SHARES, "at < 0 || at >= own", "at <= 0 || at >= own"),
    ("cuts before the begin's end", SHARES, "max(at - kRaggedBegin, 0)", "at - kRaggedBegin"),
    ("no whole sequences", SHARES, "if (plan.each)", "if (false)"),
    ("whole sequences at any price", SHARES, "if (most > (all + groups - 1) / groups + kRaggedCut) each = 0;", ""),
]


def check_all(program, case, order):
    check(program, case, order)
    lengths, groups = case
    tiles = tiles_of(lengths)
    least = (sum(tiles) + len(tiles)) / groups
    assert max(clocks(share, tiles) for share in shares(program, lengths, groups, order)) <= least + 8
    whole = shares(program, [4096] * 64, 66)
    assert whole == [((min(g, 64), 0), (min(g + 1, 64), 0)) for g in range(66)]


@pytest.fixture(scope="module")
def programs():
    build.build_all([(*PROGRAM, (), build.Fault(*fault)) for _, *fault in FAULTS])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_faults_are_found(programs, fault):
    executable = build.program(*PROGRAM, (), build.Fault(*fault[1:]))
    calls = [(case, order) for order in ("random", "reverse", "starve") for case in CASES[2:]]
    assert is_noticed([partial(check_all, executable, *call) for call in calls], fault[0])

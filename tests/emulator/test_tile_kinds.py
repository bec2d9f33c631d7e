"""What masks do to tiles of rows and keys (csrc/cuda/kernels/common/tile_kinds.cuh), on the CPU by tests/emulator."""

from functools import partial

import pytest
import torch

from attnjourney import BlockMask
from tests.emulator.faults import tile_kinds as faults_tile_kinds
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.support.block_patterns import PATTERNS, dense


def stripes(shape, period):
    """Hidden, whole and partial tiles in turns, with a few pairs that are otherwise than their neighbours."""
    generator = torch.Generator().manual_seed(period)
    batch, heads, rows, keys = shape
    kind = torch.randint(3, (batch, heads, -(-rows // period), -(-keys // period)), generator=generator)
    kind = kind.repeat_interleave(period, 2).repeat_interleave(period, 3)[:, :, :rows, :keys]
    odd = torch.rand(shape, generator=generator) < 0.001
    return (kind > 0) ^ (odd & (kind == 2))


CASES = [  # the mask, (batch, heads, rows, keys) of the call, tile; a mask of blocks: (pattern, block size, heads)
    (stripes((1, 1, 130, 300), 64), (2, 2, 130, 300), (64, 128)),
    (stripes((2, 2, 70, 257), 32), (2, 2, 70, 257), (64, 64)),
    (stripes((2, 1, 1, 4500), 100), (2, 3, 90, 4500), (64, 128)),
    (stripes((1, 3, 90, 1), 64), (1, 3, 90, 200), (128, 64)),
    (("ragged", 16, (2, 3)), (2, 3, 150, 170), (64, 128)),
    (("causal_blocks", 64, (1, 1)), (1, 2, 200, 180), (64, 128)),
    (("document", 48, (1, 1)), (2, 2, 130, 2300), (64, 64)),
]


def check(program, case, order):
    mask, (batch, heads, rows, keys), (tile_rows, tile_keys) = case
    query, key = torch.zeros(batch, heads, rows, 8), torch.zeros(batch, heads, keys, 8)
    given, pairs = mask, mask
    if isinstance(mask, tuple):
        pattern, size, of = mask
        seen = PATTERNS[pattern](size, rows, keys)
        given = BlockMask.from_function(seen, *of, rows, keys, size)
        pairs = dense(seen, *of, rows, keys)
    arguments, _ = run._arguments(query, key, key, {}, order)
    options, tensors = run._options(query, {"attn_mask": given}, batch)
    arguments |= {**options, "tile_rows": tile_rows, "tile_keys": tile_keys}
    entries = pairs.shape[0] * pairs.shape[1]
    row_tiles = 1 if pairs.shape[2] == 1 else -(-rows // tile_rows)
    words = -(-keys // (32 * tile_keys))
    outputs = [((entries, row_tiles, words, 2), torch.int32), ((batch, heads), torch.int64)]
    bits, found = run.run(program, tensors, outputs, arguments)[0]

    pairs = pairs.expand(-1, -1, pairs.shape[2], keys).flatten(0, 1)
    for i in range(row_tiles):
        for j in range(-(-keys // tile_keys)):
            tile = pairs[:, i * tile_rows : (i + 1) * tile_rows, j * tile_keys : (j + 1) * tile_keys].flatten(1)
            got = bits[:, i, j // 32] >> (j % 32) & 1
            assert torch.equal(got[:, 0].bool(), tile.any(1)), f"some pair of tile {i}, {j}"
            assert torch.equal(got[:, 1].bool(), tile.all(1)), f"all pairs of tile {i}, {j}"
    expected = torch.arange(entries).view(mask.shape[:2] if isinstance(mask, torch.Tensor) else of)
    assert torch.equal(found, expected.expand(batch, heads))


@pytest.fixture(scope="module")
def programs():
    edits = [edit for _, *edit in faults_tile_kinds.FAULTS]
    build.build_all([("tile_kinds",), *(("tile_kinds", (), build.Fault(*edit)) for edit in edits)])


def test_kinds_are_those_of_the_pairs(programs):
    for i, case in enumerate(CASES):
        check(build.program("tile_kinds"), case, run.ORDER_NAMES[i % len(run.ORDER_NAMES)])


@pytest.mark.parametrize("what,file,old,new", faults_tile_kinds.FAULTS, ids=[f[0] for f in faults_tile_kinds.FAULTS])
def test_faulty_kinds_are_found(programs, what, file, old, new):
    program = build.program("tile_kinds", (), build.Fault(file, old, new))
    assert is_noticed([partial(check, program, case, "random") for case in CASES], what)

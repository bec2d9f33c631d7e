"""Shards, parts and routes without any process: every visible pair of row and key is in one part, and nothing else."""

import re
from pathlib import Path

import pytest
import torch

import attnjourney
from attnjourney.distributed._parts import Layout, Visibility, parts
from attnjourney.distributed._route import route_of
from attnjourney.distributed.sharding import positions, shares
from tests.support.testing import pairs, row_id

MASKS = [(False, (-1, -1), 0), (True, (-1, -1), 0), (True, (3, -1), 5), (False, (0, 0), 3), (False, (6, 2), 0)]
CASES = pairs(
    masks=MASKS, order=("contiguous", "zigzag"), size=(1, 2, 3, 4), rows=(9, 16, 5, 0), keys=(16, 3, 21), block=(1, 2)
)


def layout_of(order, size, rows, keys, block, **_):
    """Lengths that do not divide, but where parts begin at multiples of 2; of contiguous shards, others too."""
    lengths = [shares(order, -(-n // (2 * block * size)) * 2 * block * size, size) for n in (rows, keys)]
    if block == 1:
        lengths = [shares(order, n, size) for n in (rows, keys)]
        if order == "contiguous":
            lengths[1] = (0, *lengths[1][:0:-1], lengths[1][0])[-size:]
    return Layout(order, *lengths, block=block)


@pytest.mark.parametrize("case", CASES, ids=row_id)
def test_parts_are_what_is_visible(case):
    seen = Visibility.of(*case["masks"])
    layout = layout_of(**case)
    for rank in range(layout.size):
        for source in range(layout.size):
            rows = positions(layout.order, layout.q_lens, rank)[:, None]
            keys = positions(layout.order, layout.kv_lens, source)
            visible = (keys < seen.prefix) | ((keys >= rows - seen.left) & (keys <= rows + seen.right))
            count = torch.zeros(visible.shape, dtype=torch.int)
            for part in parts(layout, rank, source, seen):
                at = slice(part.row, part.row_end), slice(part.key, part.key_end)
                i, j = (torch.arange(n.stop - n.start) for n in at)
                assert torch.equal(part.first_row + i, rows[at[0], 0])
                assert torch.equal(part.first_key + j, keys[at[1]])
                assert part.first_row % layout.block == part.first_key % layout.block == 0
                left, right = (end if end >= 0 else 1 << 40 for end in part.window)
                away = part.first_key + j - part.first_row - i[:, None]
                count[at] += ((away >= -left) & (away <= right) | (j < part.prefix)).int()
            assert torch.equal(count, visible.int())


@pytest.mark.parametrize("case", CASES, ids=row_id)
def test_shards_reach_all_that_see_them(case):
    seen = Visibility.of(*case["masks"])
    layout = layout_of(**case)
    route = route_of(layout, seen)
    for shard in range(layout.size):
        reached = {(shard + d) % layout.size for d in range(-route.down[shard], route.up[shard] + 1)}
        assert {rank for rank in range(layout.size) if parts(layout, rank, shard, seen)} <= reached
        assert route.up[shard] + route.down[shard] < layout.size


def test_windows_talk_to_the_neighbours_they_need():
    def route(order, *masks):
        return route_of(Layout.even(order, 4, 8, 8), Visibility.of(*masks))

    assert route("contiguous", True, (8, -1), 0).up == (1, 1, 1, 0)
    assert route("contiguous", True, (9, -1), 0).up == (2, 2, 1, 0)
    both = route("contiguous", False, (3, 2), 0)
    assert (both.up, both.down) == ((1, 1, 1, 0), (0, 1, 1, 1))
    assert route("contiguous", True, None, 0).up == (3, 2, 1, 0)
    assert route("zigzag", True, None, 0).up == (3, 3, 3, 3)


def test_torch_distributed_is_imported_on_request_alone():
    root = Path(attnjourney.__file__).parent
    for path in root.rglob("*.py"):
        if path.parent.name != "distributed":
            found = re.search(r"^\s*(?:from|import)\b.*\bdistributed", path.read_text(), re.M)
            assert found is None, f"{path}: {found}"

"""PagedKVCache: which blocks are held, given back and shared, at every border of a block."""

import pytest
import torch

from attnjourney import PagedKVCache
from tests.support.testing import random_tensor

BLOCK = 4


def filled(batch, n, capacity=16, **options):
    cache = PagedKVCache(batch, 1, capacity, 8, block_size=BLOCK, **options)
    cache.append(*(random_tensor((batch, 1, n, 8), seed=s) for s in (1, 2)))
    return cache


def check_blocks(cache):
    """Every sequence holds the blocks that its length needs, and no other; every block knows its holders."""
    held = [[b for b in row if b >= 0] for row in cache.block_table.tolist()]
    assert [len(row) for row in held] == [-(-n // BLOCK) for n in cache.lengths.tolist()]
    flat = [b for row in held for b in row]
    assert cache.block_refs.tolist() == [flat.count(b) for b in range(len(cache.block_refs))]


@pytest.mark.parametrize("kept", range(10))
def test_a_rollback_gives_back_what_it_does_not_need(kept):
    cache = filled(1, 9)
    check_blocks(cache)
    cache.truncate(kept)
    check_blocks(cache)
    cache.append(*(random_tensor((1, 1, 16 - kept, 8), seed=s) for s in (3, 4)))  # as many as there is room for
    check_blocks(cache)


@pytest.mark.parametrize("kept", range(5, 10))
def test_shared_blocks_are_given_back_once_by_each_holder(kept):
    """Three sequences on the same three blocks; one rolls back, one goes on, all end."""
    cache = filled(3, 9)
    cache.reorder(torch.tensor([1, 1, 1]))
    check_blocks(cache)
    cache.truncate(torch.tensor([kept, 9, 9]))
    check_blocks(cache)
    cache.append(*(random_tensor((3, 1, 1, 8), seed=s) for s in (3, 4)), lengths=torch.tensor([0, 1, 0]))
    check_blocks(cache)
    cache.truncate(0)
    check_blocks(cache)
    assert (cache.block_refs == 0).all()


@pytest.mark.parametrize("verb", ["append", "truncate", "reorder", "attend"])
@pytest.mark.parametrize(
    "fault, message",
    [
        (lambda cache: cache.block_table.__setitem__((0, 0), 99), "block_table: expected blocks from 0 to 7, got 99"),
        (lambda cache: cache.block_table.__setitem__((1, 2), -5), "block_table: expected blocks from 0 to 7, got -5"),
        (lambda cache: cache.block_refs.zero_(), "block_refs: expected at least 1 for block"),
    ],
)
def test_a_table_that_is_wrong_is_refused_and_nothing_written(fault, message, verb):
    cache, new = filled(2, 9), random_tensor((2, 1, 1, 8), seed=3)
    fault(cache)
    call = {
        "append": lambda: cache.append(new, new),
        "truncate": lambda: cache.truncate(0),
        "reorder": lambda: cache.reorder(torch.tensor([1, 0])),
        "attend": lambda: cache.attend(new),
    }[verb]
    before = [x.clone() for x in (cache.key, cache.value, cache.lengths, cache.block_table, cache.block_refs)]
    if verb == "attend" and message.startswith("block_refs"):
        call()  # reads no counts
    elif verb == "reorder" and "-5" in message:
        call()  # below 0: no block there
    else:
        with pytest.raises(ValueError, match=message):
            call()
        after = (cache.key, cache.value, cache.lengths, cache.block_table, cache.block_refs)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, before))

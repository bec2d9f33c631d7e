"""Cache.check: what an append on CUDA leaves behind where tokens had no room, made by hand."""

import pytest
import torch

from attnjourney import KVCache, LatentCache, PagedKVCache, WindowCache


def full(cache):
    shapes = [(2, x.shape[1], 4, x.shape[3]) for x in (cache.key, cache.value)]
    cache.append(*map(torch.zeros, shapes))
    return cache


def test_lengths_past_the_capacity():
    latents = LatentCache(2, 4, 6, 2)
    latents.append(torch.zeros(2, 4, 8))
    for cache in (full(KVCache(2, 1, 4, 8)), latents, full(PagedKVCache(2, 1, 4, 8, block_size=2))):
        cache.check()
        cache.lengths[1] += 3
        with pytest.raises(
            ValueError, match=r"^key: the cache overflowed: expected at most 4 tokens.*, got 7 for batch row 1$"
        ):
            cache.check()
        cache.lengths[1] = 4
        cache.truncate(2)
        cache.check()


def test_a_sequence_that_found_no_block():
    cache = full(PagedKVCache(2, 1, 8, 8, block_size=2))
    cache.block_table[0, 1] = -1
    with pytest.raises(ValueError, match="as many as there are blocks for, got 4 for batch row 0$"):
        cache.check()
    cache.lengths[0] = 2
    cache.check()


def test_a_ring_has_room():
    cache = WindowCache(2, 1, 3, 8, max_append=4)
    for _ in range(5):
        full(cache)
    cache.check()

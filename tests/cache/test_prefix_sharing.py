"""Blocks that sequences share: fork, publish, adopt, free and evict against plain lists of tokens; who holds what."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnjourney
from attnjourney import OutOfBlocks, PagedKVCache, PagedLatentCache, prefix_keys
from tests.support.testing import random_tensor

BLOCK, BATCH, CAPACITY, POOL = 4, 4, 24, 13
KINDS = {
    "float64": lambda **sizes: PagedKVCache(num_kv_heads=2, head_dim=3, v_head_dim=2, dtype=torch.float64, **sizes),
    "bfloat16": lambda **sizes: PagedKVCache(num_kv_heads=1, head_dim=8, dtype=torch.bfloat16, **sizes),
    "float16": lambda **sizes: PagedKVCache(num_kv_heads=1, head_dim=7, dtype=torch.float16, **sizes),
    "int8": lambda **sizes: PagedKVCache(num_kv_heads=2, head_dim=3, v_head_dim=2, dtype=torch.int8, **sizes),
    "e4m3": lambda **sizes: PagedKVCache(num_kv_heads=1, head_dim=5, dtype=torch.float8_e4m3fn, **sizes),
    "latents": lambda **sizes: PagedLatentCache(kv_lora_rank=4, qk_rope_head_dim=2, dtype=torch.float32, **sizes),
    "latents in bytes": lambda **sizes: PagedLatentCache(kv_lora_rank=4, qk_rope_head_dim=0, dtype=torch.int8, **sizes),
}


def make(kind, batch=BATCH, capacity=CAPACITY, num_blocks=POOL):
    return KINDS[kind](batch=batch, capacity=capacity, block_size=BLOCK, num_blocks=num_blocks)


def append(cache, tokens):
    """tokens[b]: numbers; a token's key and value are rows of its number."""
    longest = max(map(len, tokens))
    rows = torch.tensor([[0] * (longest - len(t)) + list(t) for t in tokens], dtype=torch.float64)
    counts = torch.tensor([len(t) for t in tokens])
    dtype = cache.key.dtype if cache.key.dtype.is_floating_point and cache.key_scale is None else torch.float32
    rows = rows.to(dtype)[:, None, :, None]  # (batch, 1, N, 1)
    if isinstance(cache, PagedLatentCache):
        return cache.append(rows[:, 0].expand(-1, -1, cache.key.shape[3]), counts)
    pools = (cache.key, cache.value)
    return cache.append(*(rows.expand(-1, x.shape[1], -1, x.shape[3]) for x in pools), counts)


def check_held(pool, scale, blocks, tokens):
    """The numbers of the tokens that some blocks begin with, in all heads and dimensions."""
    rows = pool[blocks].double() if scale is None else pool[blocks].float().double() * scale[blocks].double()[..., None]
    numbers = rows.transpose(1, 2).flatten(0, 1).flatten(1)[: len(tokens)]  # (tokens, heads * dim)
    assert ((numbers - torch.tensor(tokens)[:, None]).abs() < 1e-3).all()


class Model:
    """Plain lists: tokens of each sequence, and what has been published."""

    def __init__(self, cache):
        self.cache, self.sequences, self.published, self.next = cache, [[] for _ in cache.lengths], {}, 1

    def check(self):
        cache = self.cache
        assert cache.lengths.tolist() == list(map(len, self.sequences))
        refs = [0] * len(cache.block_refs)
        pools = [(cache.key, cache.key_scale), (cache.value, cache.value_scale)]
        for row, tokens in zip(cache.block_table.tolist(), self.sequences):
            blocks = [b for b in row if b >= 0]
            assert len(blocks) == -(-len(tokens) // BLOCK)
            self.check_tokens(pools, blocks, tokens)
            for block in blocks:
                refs[block] += 1
        assert dict(cache.prefixes.oldest()).keys() == self.published.keys()
        for key, block in cache.prefixes.oldest():
            self.check_tokens(pools, [block], self.published[key])
            refs[block] += 1
        assert cache.block_refs.tolist() == refs
        assert cache.free_blocks == refs.count(0)

    def check_tokens(self, pools, blocks, tokens):
        for pool, scale in pools:
            if pool is not None and blocks:
                check_held(pool, scale, blocks, tokens)

    def append(self, counts):
        new = []
        for n in counts:
            new.append([number % 251 + 1 for number in range(self.next, self.next + n)])  # exact in any dtype
            self.next += n
        wanted = [len(s) + n for s, n in zip(self.sequences, counts)]
        if max(wanted) > self.cache.capacity:
            return
        free = self.cache.free_blocks
        try:
            append(self.cache, new)
        except OutOfBlocks as error:
            assert (error.free, error.blocks) == (free, len(self.cache.block_refs)) and error.asked > free
            return
        self.sequences = [s + n for s, n in zip(self.sequences, new)]

    def fork(self, source, to, length):
        length = None if length is None else min(length, len(self.sequences[source]))
        self.cache.fork(source, to, length)
        copied = list(self.sequences[source])
        for b in to:
            if b != source:
                self.sequences[b] = copied[:length]

    def truncate(self, row, length):
        lengths = list(map(len, self.sequences))
        lengths[row] = min(lengths[row], length)
        self.cache.truncate(torch.tensor(lengths))
        self.sequences = [s[:n] for s, n in zip(self.sequences, lengths)]

    def free(self, rows):
        self.cache.free(rows)
        for b in rows:
            self.sequences[b] = []

    def publish(self, row):
        keys = prefix_keys(self.sequences[row], BLOCK)
        self.cache.publish(row, keys)
        for j, key in enumerate(keys):
            self.published.setdefault(key, self.sequences[row][j * BLOCK : (j + 1) * BLOCK])

    def adopt(self, row, other):
        """Begins as the sequence `other` would."""
        self.free([row])
        tokens = self.sequences[other] if other != row else []
        keys = prefix_keys(tokens, BLOCK)
        there = 0
        while there < len(keys) and keys[there] in self.published:
            there += 1
        assert self.cache.adopt(row, keys) == there * BLOCK
        self.sequences[row] = tokens[: there * BLOCK]

    def reorder(self, index):
        self.cache.reorder(torch.tensor(index))
        self.sequences = [list(self.sequences[b]) for b in index]

    def evict(self, blocks):
        free = self.cache.free_blocks
        freed = self.cache.evict(blocks)
        assert self.cache.free_blocks == free + freed
        there = {key for key, _ in self.cache.prefixes.oldest()}
        if blocks is None:
            assert not there
        else:
            assert freed <= blocks
            alone = [block for _, block in self.cache.prefixes.oldest() if self.cache.block_refs[block] == 1]
            assert freed == blocks or not alone
        self.published = {key: tokens for key, tokens in self.published.items() if key in there}


row = st.integers(0, BATCH - 1)
VERBS = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(0, 7), min_size=BATCH, max_size=BATCH)),
    st.tuples(st.just("append"), st.lists(st.integers(0, 2), min_size=BATCH, max_size=BATCH)),
    st.tuples(st.just("fork"), row, st.lists(row, min_size=1, max_size=3), st.none() | st.integers(0, CAPACITY)),
    st.tuples(st.just("truncate"), row, st.integers(0, CAPACITY)),
    st.tuples(st.just("free"), st.lists(row, max_size=2)),
    st.tuples(st.just("publish"), row),
    st.tuples(st.just("adopt"), row, row),
    st.tuples(st.just("reorder"), st.lists(row, min_size=BATCH, max_size=BATCH)),
    st.tuples(st.just("evict"), st.none() | st.integers(0, 3)),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(verbs=st.lists(VERBS, min_size=4, max_size=25))
def test_any_sequence_of_verbs(kind, verbs):
    """No token of any sequence, and of no published prefix, is ever written over; every block knows its holders."""
    model = Model(make(kind))
    for verb, *arguments in verbs:
        getattr(model, verb)(*arguments)
        model.check()
    model.free(range(BATCH))
    model.evict(None)
    assert model.cache.free_blocks == POOL


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_block_is_copied_and_only_that(kind):
    """Five sequences on three blocks, the last one begun: pages are counted."""
    cache = make(kind, 5, 24, 9)
    append(cache, [[7] * 10, [], [], [], []])
    cache.fork(0, [1, 2, 3])
    cache.fork(0, 4, 6)
    assert cache.free_blocks == 6 and cache.block_refs.tolist()[:3] == [5, 5, 4]
    before = [x[:2].clone() for x in (cache.key, cache.value) if x is not None]
    append(cache, [[1], [], [2], [], [3]])  # three copies: of block 2 twice, of block 1 once
    assert cache.free_blocks == 3 and cache.block_refs.tolist() == [5, 4, 2, 1, 1, 1, 0, 0, 0]
    for x, was in zip((cache.key, cache.value), before):
        assert torch.equal(x[:2].view(torch.uint8), was.view(torch.uint8))
    assert cache.held_nbytes == cache.nbytes // 9 * 6
    append(cache, [[], [4], [], [5], []])  # the last holder of block 2 writes into it
    assert cache.free_blocks == 2 and cache.block_refs.tolist() == [5, 4, 1, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_when_none_is_left(kind):
    cache = make(kind, 2, 24, 4)
    append(cache, [[1] * 8, [2] * 4])
    before = [x.clone() for x in (cache.lengths, cache.block_table, cache.block_refs)]
    with pytest.raises(OutOfBlocks, match="at most 1 new blocks, as many as are free of its 4, got 3") as caught:
        append(cache, [[3] * 4, [4] * 5])
    assert (caught.value.free, caught.value.asked, caught.value.blocks) == (1, 3, 4)
    assert isinstance(caught.value, ValueError)
    after = (cache.lengths, cache.block_table, cache.block_refs)
    assert all(map(torch.equal, before, after))
    cache.free(0)
    append(cache, [[], [4] * 5])
    assert cache.lengths.tolist() == [0, 9] and cache.free_blocks == 1


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning():
    cache = make("float64", 2, 24, 8)
    first, second = list(range(1, 9)), list(range(11, 19))
    append(cache, [first, second])
    cache.publish(0, prefix_keys(first, BLOCK))
    cache.publish(1, prefix_keys(second, BLOCK))
    cache.free([0, 1])
    assert cache.free_blocks == 4
    assert cache.adopt(0, prefix_keys(first, BLOCK)) == 8  # used again
    cache.free(0)
    assert cache.evict(1) == 1 and cache.free_blocks == 5
    assert cache.adopt(1, prefix_keys(second, BLOCK)) == 4  # its first block is still there
    assert cache.adopt(0, prefix_keys(first, BLOCK)) == 8
    assert cache.evict(8) == 0  # sequences hold them all
    cache.reset()
    assert cache.free_blocks == 8 and cache.adopt(0, prefix_keys(first, BLOCK)) == 0


def test_keys_name_all_tokens_before():
    keys = prefix_keys(torch.arange(11), 4)
    assert len(keys) == 2 and keys == prefix_keys(list(range(8)), 4)
    assert prefix_keys([0, 1, 2, 3, 0, 5, 6, 7], 4)[0] == keys[0] != keys[1]
    assert prefix_keys([9, 1, 2, 3, 4, 5, 6, 7], 4)[1] != keys[1]
    assert prefix_keys([1, 12], 2) != prefix_keys([11, 2], 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_packed_tokens_and_rows(dtype):
    """append_packed and attend_packed are append and attend of what is packed."""
    ours, theirs = (PagedKVCache(4, 2, 64, 16, block_size=8, dtype=dtype) for _ in range(2))
    for cache in (ours, theirs):
        cache.key.zero_()
    for step, counts in enumerate(([20, 0, 7, 1], [1, 3, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0])):
        total, longest = sum(counts), max(counts)
        q, k, v = (random_tensor((total, h, 16), torch.float32, 3 * step + i) for i, h in enumerate((4, 2, 2)))
        cu_seqlens = torch.tensor([0, *counts]).cumsum(0)
        dense = [torch.zeros(4, x.shape[1], longest, 16) for x in (q, k, v)]
        for b, n in enumerate(counts):
            for to, x in zip(dense, (q, k, v)):
                to[b, :, longest - n :] = x[cu_seqlens[b] : cu_seqlens[b + 1]].transpose(0, 1)
        ours.append_packed(k, v, cu_seqlens)
        theirs.append(*dense[1:], torch.tensor(counts))
        for a, b in ((ours.key, theirs.key), (ours.block_table, theirs.block_table), (ours.lengths, theirs.lengths)):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        out, lse = ours.attend_packed(q, cu_seqlens, return_lse=True, softcap=3.0)
        expected, lse_expected = theirs.attend(dense[0], return_lse=True, softcap=3.0)
        for b, n in enumerate(counts):
            at = slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
            torch.testing.assert_close(out[at], expected[b, :, longest - n :].transpose(0, 1))
            torch.testing.assert_close(lse[:, at], lse_expected[b, :, longest - n :])


BAD = {
    "rows: expected numbers of sequences, from 0 to 3, got 4": lambda c: c.free(4),
    "to: expected numbers of sequences, from 0 to 3, got -1": lambda c: c.fork(0, [1, -1]),
    "source: expected numbers": lambda c: c.fork(7, 1),
    "length: expected a number from 0 to 9, got 10": lambda c: c.fork(0, 1, 10),
    "length: expected a number from 0 to 9, got -1": lambda c: c.fork(0, 1, -1),
    "keys: expected at most 2, one for each whole block of sequence 0, got 3": lambda c: c.publish(0, "abc"),
    "row: expected an empty sequence, got 0 with 9 tokens": lambda c: c.adopt(0, "ab"),
    "row: expected numbers": lambda c: c.adopt(9, "ab"),
    "cu_seqlens: expected shape \\(5,\\), got \\(3,\\)": lambda c: c.append_packed(
        torch.zeros(2, 2, 3), torch.zeros(2, 2, 2), torch.tensor([0, 1, 2])
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    cache = make("float64")
    append(cache, [[1] * 9, [], [], []])
    before = [x.clone() for x in (cache.lengths, cache.block_table, cache.block_refs)]
    with pytest.raises(ValueError, match=message):
        BAD[message](cache)
    assert all(map(torch.equal, before, (cache.lengths, cache.block_table, cache.block_refs)))


def test_sizes_of_latents():
    with pytest.raises(ValueError, match="qk_rope_head_dim: expected an int of at least 0, got -1"):
        PagedLatentCache(1, 8, 4, -1)
    cache = PagedLatentCache(2, 9, 4, 2, block_size=4, dtype=torch.int8)
    assert cache.latent.shape == (6, 4, 6) and cache.latent_scale.shape == (6, 4) and cache.capacity == 12
    assert cache.nbytes == 6 * 4 * (6 + 4)
    assert attnjourney.PagedLatentCache is PagedLatentCache

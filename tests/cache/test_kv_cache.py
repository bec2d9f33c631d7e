"""The caches: prefill then decode equals one full causal pass, and every verb against plain lists of tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnjourney
from attnjourney import KVCache, LatentCache, PagedKVCache, WindowCache, reference
from tests.support.decode_checks import assert_decoded
from tests.support.testing import DTYPES, poison_memory, random_tensor

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 16, 12
WINDOW = 9
KINDS = ("dense", "paged", "window")


def make(kind, batch=2, capacity=64, dtype=torch.float32, junk=math.nan, **options):
    sizes = dict(batch=batch, num_kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=V_DIM, dtype=dtype)
    if kind == "dense":
        cache = KVCache(capacity=capacity, **sizes)
    elif kind == "paged":
        cache = PagedKVCache(capacity=capacity, **{"block_size": 4, **sizes, **options})
    else:
        cache = WindowCache(window=WINDOW, **{"max_append": 8, **sizes, **options})
    cache.key.fill_(junk)
    cache.value.fill_(junk)
    return cache


def tokens(batch, n, seed, dtype=torch.float32):
    sizes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM))
    return [random_tensor((batch, heads, n, dim), dtype, seed + i) for i, (heads, dim) in enumerate(sizes)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_then_decode_equals_one_full_causal_pass(kind, dtype):
    length, window = 67, ((WINDOW, -1) if kind == "window" else (-1, -1))
    query, key, value = tokens(2, length, 0, dtype)
    for chunk in (1, 7, 64):
        cache, outs = make(kind, capacity=length, dtype=dtype, **({"max_append": 64} if kind == "window" else {})), []
        for first in range(0, length, chunk):
            q, k, v = (x[:, :, first : first + chunk] for x in (query, key, value))
            cache.append(k, v)
            outs.append(cache.attend(q))
        assert cache.lengths.tolist() == [length] * 2
        assert_decoded(torch.cat(outs, 2), None, query, key, value, window_size=window, label=f"[chunks of {chunk}]")


@pytest.mark.parametrize("chunk", (1, 7, 128, 500))
def test_a_prompt_in_chunks_equals_one_shot(chunk):
    """Tiles that cross the diagonal behind a cache."""
    length = 1030 if chunk > 1 else 300
    query, key, value = tokens(1, length, 0, torch.float64)
    cache, outs = make("dense", 1, length, torch.float64), []
    for first in range(0, length, chunk):
        q, k, v = (x[:, :, first : first + chunk] for x in (query, key, value))
        cache.append(k, v)
        outs.append(cache.attend(q))
    whole = attnjourney.attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-12, atol=1e-12)


def test_a_prompt_longer_than_the_ring():
    """Its rows see their windows whole; steps go on from the ring; then another long piece, ragged."""
    cache, model = make("window", 2), Model(2)
    for seed, (n, counts) in enumerate(((100, [100, 100]), (1, [1, 1]), (30, [30, 2]), (8, [8, 8]), (30, [0, 30]))):
        query, key, value = tokens(2, n, seed)
        for b, count in enumerate(counts):
            key[b, :, : n - count] = math.nan
        cache.append(key, value, torch.tensor(counts))
        model.append(key, value, counts)
        check_rows(cache, query, model, counts)
    assert cache.key.shape[2] == WINDOW + 8
    query, key, value = tokens(2, 30, 9)
    before = state(cache)
    for options in ({"window_size": (10, -1)}, {"attn_mask": torch.zeros(1, 5)}, {"softcap": -1.0}):
        with pytest.raises(ValueError):
            cache.step(query, key, value, **options)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(state(cache), before))
    cache.append(key, value)
    cache.truncate(cache.lengths - 3)
    with pytest.raises(ValueError, match="window_size: expected left . query rows of at most the ring's 17 keys"):
        cache.attend(query)


@pytest.mark.parametrize("kind", KINDS)
def test_left_padding(kind):
    """Prompts of 6, 2 and 0 tokens padded on the left, then steps of one token."""
    cache, counts = make(kind, 3), torch.tensor([6, 2, 0])
    query, key, value = tokens(3, 6, 0)
    for b, n in enumerate(counts):  # the padding must not be read
        key[b, :, : 6 - n] = math.nan
        value[b, :, : 6 - n] = math.nan
    cache.append(key, value, lengths=counts)
    out = cache.attend(query)
    keys = [key[b, :, 6 - n :] for b, n in enumerate(counts)]
    values = [value[b, :, 6 - n :] for b, n in enumerate(counts)]
    assert_decoded(out, None, query, keys, values)
    for step in range(3):
        query, key, value = tokens(3, 1, 10 * step + 10)
        cache.append(key, value)
        keys, values = ([torch.cat(p, 1) for p in zip(old, new)] for old, new in ((keys, key), (values, value)))
        assert_decoded(cache.attend(query), None, query, keys, values)
    assert cache.lengths.tolist() == [9, 5, 3]


def test_steps_on_separate_buffers_under_poisoned_memory():
    """Past lengths 2, 5, 0: equal to the sequences one by one, a hundred times."""
    _, key, value = tokens(3, 5, 0)
    past = torch.tensor([2, 5, 0])
    query, new_key, new_value = tokens(3, 1, 9)
    for _ in range(100):
        poison_memory(1)
        cache = KVCache(3, KV_HEADS, 8, DIM, V_DIM)
        cache.append(key, value, lengths=past)
        cache.append(new_key, new_value)
        out = cache.attend(query)
        for b in range(3):
            k = torch.cat([key[b, :, 5 - past[b] :], new_key[b]], 1)
            v = torch.cat([value[b, :, 5 - past[b] :], new_value[b]], 1)
            single = attnjourney.attention(query[b], k, v, enable_gqa=True)
            torch.testing.assert_close(out[b], single, rtol=1e-5, atol=1e-5)


class Model:
    """What a cache must do: one list of tokens for each sequence."""

    def __init__(self, batch):
        self.keys = [torch.empty(KV_HEADS, 0, DIM) for _ in range(batch)]
        self.values = [torch.empty(KV_HEADS, 0, V_DIM) for _ in range(batch)]

    @property
    def lengths(self):
        return [k.shape[1] for k in self.keys]

    def append(self, key, value, counts):
        n = key.shape[2]
        self.keys = [torch.cat([k, key[b, :, n - c :]], 1) for b, (k, c) in enumerate(zip(self.keys, counts))]
        self.values = [torch.cat([v, value[b, :, n - c :]], 1) for b, (v, c) in enumerate(zip(self.values, counts))]

    def truncate(self, lengths):
        self.keys = [k[:, :n] for k, n in zip(self.keys, lengths)]
        self.values = [v[:, :n] for v, n in zip(self.values, lengths)]

    def reorder(self, index):
        self.keys, self.values = [self.keys[i] for i in index], [self.values[i] for i in index]


def check_rows(cache, query, model, counts):
    """attend; of more rows than a ring keeps, those of new tokens: the padding stands where keys are gone."""
    ring = isinstance(cache, WindowCache)
    window, out, n = (WINDOW, -1) if ring else (-1, -1), cache.attend(query), query.shape[2]
    for b, (key, value, count) in enumerate(zip(model.keys, model.values, counts)):
        rows = slice(n - count if ring and n > cache.max_append else 0, n)
        assert_decoded(out[b : b + 1, :, rows], None, query[b : b + 1, :, rows], [key], [value], window_size=window)


@settings(derandomize=True, deadline=None, database=None, max_examples=30)
@given(st.data())
def test_any_sequence_of_verbs(data):
    """Appends (ragged), rollbacks and reorders in any order; after each, attention over what there should be."""
    kind, batch = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(1, 3))
    cache, model, longest = make(kind, batch, 160), Model(batch), [0] * batch
    row = st.integers(0, batch - 1)
    for step in range(data.draw(st.integers(1, 8))):
        verb = data.draw(st.sampled_from(("append", "append", "append", "truncate", "reorder", "reset")))
        if verb == "append":
            n = data.draw(st.integers(1, 20))  # more than a ring of 17 holds
            counts = data.draw(st.lists(st.integers(0, n), min_size=batch, max_size=batch))
            query, key, value = tokens(batch, n, 3 * step)
            cache.append(key, value, lengths=torch.tensor(counts))
            model.append(key, value, counts)
            longest = [max(a, b) for a, b in zip(longest, model.lengths)]
            check_rows(cache, query, model, counts)
        elif verb == "truncate":
            low = [max(0, n - 8) if kind == "window" and n > cache.capacity else 0 for n in longest]
            lengths = [data.draw(st.integers(min(a, b), b)) for a, b in zip(low, model.lengths)]
            cache.truncate(torch.tensor(lengths))
            model.truncate(lengths)
        elif verb == "reorder":
            index = data.draw(st.lists(row, min_size=batch, max_size=batch))
            cache.reorder(torch.tensor(index))
            model.reorder(index)
            longest = [longest[i] for i in index]
        else:
            cache.reset()
            model.truncate([0] * batch)
            longest = [0] * batch
        assert cache.lengths.tolist() == model.lengths
        if kind == "paged":
            held = [b for b in cache.block_table.flatten().tolist() if b >= 0]
            assert len(held) == sum(-(-n // 4) for n in model.lengths)
            assert cache.block_refs.tolist() == [held.count(b) for b in range(len(cache.block_refs))]


def test_a_shared_block_is_copied_by_who_writes_first():
    cache, model = make("paged", 3, 16, num_blocks=6), Model(3)
    for verb in range(2):
        query, key, value = tokens(3, 3, verb)
        cache.append(key, value)
        model.append(key, value, [3] * 3)
        assert_decoded(cache.attend(query), None, query, model.keys, model.values)
        cache.reorder(torch.tensor([1, 1, 1]))
        model.reorder([1, 1, 1])
        assert cache.block_refs.max() == 3 and (cache.block_refs > 0).sum() == verb + 1


def test_latent_cache():
    """Chunks of a prompt, steps, rollback and reorder, against the expanded form."""
    cache = LatentCache(2, 40, 32, 8, dtype=torch.float64)
    assert LatentCache(1, 1, 512, 64).latent.shape[-1] == 576
    weight = random_tensor((3 * (16 + 12), 32), torch.float64, 5)
    latents = random_tensor((2, 0, 40), torch.float64)
    for step, n in enumerate((20, 1, 3, -4, 1)):
        if n < 0:
            cache.truncate(20)
            cache.reorder(torch.tensor([1, 0]))
            latents = latents[[1, 0], :20]
            continue
        new, query = random_tensor((2, n, 40), torch.float64, step), random_tensor((2, 3, n, 24), torch.float64, step)
        cache.append(new)
        latents = torch.cat([latents, new], 1)
        expected = reference.mla_decode(query, latents, cache.lengths, weight)
        torch.testing.assert_close(cache.attend(query, weight), expected, rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match="latent: expected shape"):
        cache.append(torch.zeros(2, 1, 39, dtype=torch.float64))
    with pytest.raises(ValueError, match="kv_b_weight: expected 32 columns"):
        cache.attend(query, weight[:, :-1])


def state(cache):
    names = ("key", "value", "lengths", "block_table", "block_refs", "longest")
    return [getattr(cache, name).clone() for name in names if getattr(cache, name, None) is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_leaves_the_cache_as_it_was(kind):
    cache = make(kind, capacity=12, junk=0.0)
    query, key, value = tokens(2, 5, 0)
    cache.append(key, value)
    before = state(cache)
    long = torch.cat([key, key], 2), torch.cat([value, value], 2)
    bad = {
        "key: the cache overflows": lambda: cache.append(*long),
        "key: expected shape": lambda: cache.append(key[:, :1], value),
        "value: expected shape": lambda: cache.append(key, value[..., :-1]),
        "value: expected shape .2, 2, 5, 12.": lambda: cache.append(key, value[:, :, :4]),
        "key: expected 4": lambda: cache.append(key[0], value),
        "key: expected the dtype": lambda: cache.append(key.double(), value),
        "counts: expected numbers from 0 to the tokens given, 5, got 6": lambda: cache.append(
            key, value, torch.tensor([1, 6])
        ),
        "counts: expected shape": lambda: cache.append(key, value, torch.tensor([1])),
        "counts: expected dtype": lambda: cache.append(key, value, torch.tensor([1, 1], dtype=torch.int16)),
        "key: expected a tensor that does not require grad": lambda: cache.append(key.clone().requires_grad_(), value),
        "query: expected a tensor that does not": lambda: cache.attend(query.clone().requires_grad_()),
        "new_lengths: expected numbers from 0 to the present length, 5, got 6": lambda: cache.truncate(6),
        "new_lengths: expected shape": lambda: cache.truncate(torch.tensor([1])),
        "batch_index: expected numbers from 0 to the last batch row, 1, got 2": lambda: cache.reorder(
            torch.tensor([0, 2])
        ),
    }
    if kind == "window":  # takes any number of tokens
        bad.pop("key: the cache overflows")
    for message, call in bad.items():
        with pytest.raises(RuntimeError if "dtype" in message or "does not" in message else ValueError, match=message):
            call()
        assert all(torch.equal(a, b) for a, b in zip(state(cache), before)), message


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_on_two_devices(kind):
    """Beside "meta" torch calls the operator that has no data: without a check nothing would be written, or said."""
    cache = make(kind, junk=0.0)
    query, key, value = tokens(2, 2, 0)
    cache.append(key, value)
    before, numbers = state(cache), torch.zeros(2, dtype=torch.int64, device="meta")
    for name, call in {
        "key": lambda: cache.append(key.to("meta"), value),
        "value": lambda: cache.append(key, value.to("meta")),
        "counts": lambda: cache.append(key, value, numbers),
        "new_lengths": lambda: cache.truncate(numbers),
        "batch_index": lambda: cache.reorder(numbers),
        "(key|value|lengths)": lambda: cache.attend(query.to("meta")),
        "attn_mask": lambda: cache.attend(query, attn_mask=torch.zeros(1, 1, device="meta")),
        "sinks": lambda: cache.step(query, key, value, sinks=torch.zeros(query.shape[1], device="meta")),
    }.items():
        with pytest.raises(RuntimeError, match=f"{name}: expected to be on the device of"):
            call()
        assert all(torch.equal(a, b) for a, b in zip(state(cache)[2:], before[2:])), name
    latents = LatentCache(2, 8, 6, 4)
    with pytest.raises(RuntimeError, match="key: expected to be on the device of key_cache, cpu, got meta"):
        latents.append(torch.zeros(2, 1, 10, device="meta"))
    with pytest.raises(RuntimeError, match="kv_b_weight: expected to be on the device of query, cpu, got meta"):
        latents.attend(torch.zeros(2, 2, 1, 8), torch.zeros(18, 6, device="meta"))


def test_overflow_of_one_row_and_of_the_pool():
    for cache in (
        make("dense", 2, 8, junk=0.0),
        make("paged", 2, 8, junk=0.0),
        make("paged", 2, 8, num_blocks=3, junk=0.0),
    ):
        _, key, value = tokens(2, 4, 0)
        cache.append(key, value)
        before = state(cache)
        with pytest.raises(ValueError, match="key: the cache overflows"):
            cache.append(*(torch.cat([x, x], 2) for x in (key, value)), lengths=torch.tensor([1, 5]))
        assert all(torch.equal(a, b) for a, b in zip(state(cache), before))
    with pytest.raises(ValueError, match="expected at most 1 new blocks, as many as are free of its 3, got 2"):
        cache.append(key, value)
    cache.append(key, value, lengths=torch.tensor([4, 0]))


def test_window_cache_limits():
    cache = make("window", 1, junk=0.0)
    for step in range(6):
        cache.append(*tokens(1, 8, step)[1:])
    with pytest.raises(ValueError, match="window_size: expected a left part from 0 to the cache's window, 9, got 10"):
        cache.attend(tokens(1, 1, 0)[0], window_size=(10, -1))
    with pytest.raises(ValueError, match="new_lengths: expected at least 40 .* overwritten, got 39"):
        cache.truncate(39)
    cache.truncate(40)
    assert cache.attend(tokens(1, 1, 0)[0], window_size=(3, -1)).isfinite().all()


def test_constructors_refuse():
    for message, call in {
        "batch: expected a positive int, got 0": lambda: KVCache(0, 1, 8, 8),
        "capacity: expected a positive int": lambda: KVCache(1, 1, -1, 8),
        "head_dim: expected a positive int, got 8.0": lambda: KVCache(1, 1, 8, 8.0),
        "block_size: expected": lambda: PagedKVCache(1, 1, 8, 8, block_size=0),
        "num_blocks: expected": lambda: PagedKVCache(1, 1, 8, 8, num_blocks=0),
        "window: expected": lambda: WindowCache(1, 1, -1, 8),
        "max_append: expected": lambda: WindowCache(1, 1, 4, 8, max_append=0),
        "qk_rope_head_dim: expected": lambda: LatentCache(1, 8, 8, -1),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_sizes_and_text():
    assert KVCache(2, 3, 10, 8, dtype=torch.bfloat16).nbytes == 2 * 2 * 3 * 10 * 8 * 2
    assert LatentCache(1, 10, 512, 64).nbytes == 10 * 576 * 4
    assert "WindowCache(key=(1, 2, 17, 16)" in repr(make("window", 1))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps(kind):
    cache, plain = make(kind), make(kind)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(query, key, value):
        cache.append(key * 2, value)
        return cache.attend(query) + 1

    for i in range(3):
        query, key, value = tokens(2, 1, 5 * i)
        plain.append(key * 2, value)
        assert torch.equal(step(query, key, value), plain.attend(query) + 1)
    assert all(torch.equal(a, b) for a, b in zip(state(cache)[2:], state(plain)[2:]))


def test_opcheck():
    ops, lengths = torch.ops.attnjourney, torch.tensor([3, 5])
    _, key, value = tokens(2, 2, 0)
    caches = torch.zeros(2, KV_HEADS, 9, DIM), torch.zeros(2, KV_HEADS, 9, V_DIM)
    counts = dict(counts=torch.tensor([1, 2]))
    torch.library.opcheck(ops.kv_cache_append.default, (*caches, lengths.clone(), key, value), counts)
    torch.library.opcheck(ops.kv_cache_append.default, (caches[0], None, lengths.clone(), key, None), dict(ring=True))
    torch.library.opcheck(ops.kv_cache_truncate.default, (lengths.clone(), torch.tensor([1, 5])))
    torch.library.opcheck(ops.kv_cache_reorder.default, (*caches, lengths.clone(), torch.tensor([1, 0])))
    cache = make("paged", junk=0.0)
    cache.append(key, value)
    paged = cache.lengths, cache.block_table, cache.block_refs
    new = torch.tensor([1, 2])
    torch.library.opcheck(ops.paged_cache_append.default, (cache.key, cache.value, *paged, key, value), counts)
    torch.library.opcheck(ops.paged_cache_truncate.default, (*paged, new), dict(block_size=4))
    torch.library.opcheck(ops.paged_cache_reorder.default, (*paged, torch.tensor([1, 1])))


def test_a_cache_write_is_seen_by_autograd():
    """A graph that saved the cache before it was written must refuse to go back over it."""
    cache = make("dense", junk=0.0)
    weight = torch.ones(DIM, requires_grad=True)
    loss = (cache.key * weight).sum()
    cache.append(*tokens(2, 1, 0)[1:])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

"""Decoding that reads shared blocks once: values by the rule, how many keys are read, which blocks count as shared."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnjourney import KVCache, PagedKVCache, PagedLatentCache, reference, tree_mask
from attnjourney.ops import _shared_prefix
from attnjourney.ops._shared_prefix import Segment, find_shared_prefixes
from tests.cache.test_decode_options import OPTIONS, check, noise, wide
from tests.cache.test_mla_decode import absorbed
from tests.support.testing import (
    DTYPES,
    assert_close_to_reference,
    pairs,
    random_tensor,
    row_id,
    threads,
)

BLOCK = 8
BYTES = (torch.int8, torch.float8_e4m3fn)
TREE = {"0 1 2": (24, 5), "3 4": (16, 9), "5": (0, 13), "6": (0, 0)}  # sequences: what they share, what is their own
LENGTHS = [n + own + b % 3 for b, (n, own) in enumerate(TREE[k] for k in TREE for _ in k.split())]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Short prefixes count."""
    monkeypatch.setattr(_shared_prefix, "LEAST", BLOCK)


def grown(cache, tokens):
    """Sequences as TREE has them: the first of a line is appended to, forked and goes on. tokens(n) -> append's."""
    b = 0
    for line, (shared, own) in TREE.items():
        members = list(range(b, b := b + len(line.split())))
        counts = torch.zeros(7, dtype=torch.int64)
        counts[members[0]] = shared
        cache.append(*tokens(shared), counts)
        cache.fork(members[0], members[1:]) if members[1:] else None
        counts[members] = own + torch.tensor(members) % 3
        cache.append(*tokens(own + 2), counts)
    assert cache.lengths.tolist() == LENGTHS
    return cache


def made(kind, dtype, dim=24, v_dim=17):
    """A cache of bytes takes tokens in `dtype`."""
    seeds = iter(range(100))
    sizes = dict(block_size=BLOCK, dtype=kind)
    if kind == "latents":
        cache = PagedLatentCache(7, 48, 16, 8, block_size=BLOCK, dtype=dtype)
        return grown(cache, lambda n: (noise(7, n, 24, dtype=dtype, seed=next(seeds)),))
    cache = PagedKVCache(7, 2, 48, dim, v_dim, **sizes)
    return grown(cache, lambda n: [random_tensor((7, 2, n, d), dtype, next(seeds)) / 3 for d in (dim, v_dim)])


class Reads(TorchDispatchMode):
    """Counts the keys that calls of decode and mla_decode read, and the calls."""

    def __init__(self):
        super().__init__()
        self.keys, self.calls = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("attnjourney::decode", "attnjourney::mla_decode"):
            lengths = args[3] if func.name() == "attnjourney::decode" else args[2]
            self.keys, self.calls = self.keys + int(lengths.sum()), self.calls + 1
        return func(*args, **(kwargs or {}))


def reads(call):
    with Reads() as seen:
        call()
    return seen.keys, seen.calls


SHARED = ("none", "softcap", "sinks", "sinks_per_item", "mask", "mask_float32", "row_mask", "column_mask", "bool_mask")


@pytest.mark.parametrize(
    "row", pairs(name=SHARED, dtype=DTYPES, kind=("numbers", *BYTES), q_len=(1, 3, 9), causal=(True, False)), ids=row_id
)
def test_values(row):
    """By the rule for attention at once, and against the same cache read sequence by sequence."""
    dtype, kind, q_len = row["dtype"], row["kind"], row["q_len"]
    if kind != "numbers" and dtype == torch.float64:
        dtype = torch.float32
    cache = made(dtype if kind == "numbers" else kind, dtype)
    query = noise(7, 4, q_len, 24, dtype=dtype, seed=1)
    options = {} if row["name"] == "none" else OPTIONS[row["name"]](query, max(LENGTHS))
    if row["name"] == "row_mask":
        options["attn_mask"] = options["attn_mask"].to(dtype)
    options["is_causal"] = row["causal"]
    outs = []
    keys, calls = reads(lambda: outs.append(cache.attend(query, shared_prefix=True, return_lse=True, **options)))
    whole = [n // BLOCK * BLOCK for n in ((24, 16) if not row["causal"] or q_len <= 5 else (24 - 8, 16))]
    assert keys == sum(LENGTHS) - 2 * whole[0] - whole[1] and calls == 3
    place = cache._scales() | {"block_table": cache.block_table}
    check(outs[0], query, cache.key, cache.value, cache.lengths, options | place, str(row))


@pytest.mark.parametrize("name", ("none", "sinks", "bool_mask"))
@pytest.mark.parametrize("q_len", (1, 6))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latents(dtype, q_len, name):
    cache = made("latents", dtype)
    query, weight = noise(7, 3, q_len, 20, dtype=dtype), noise(3 * (12 + 10), 16, dtype=dtype, seed=5) / 4
    options = {} if name == "none" else OPTIONS[name](query, max(LENGTHS))
    outs = []
    keys, calls = reads(lambda: outs.append(cache.attend(query, weight, shared_prefix=True, **options)))
    expected = sum(LENGTHS) - 2 * 24 - 16 if q_len == 1 else sum(LENGTHS) - 2 * 16 - 8 - 16  # of 5 rows, three blocks
    assert (keys, calls) == (expected, 3 if q_len == 1 else 4)
    latent = cache.latent[cache.block_table.clamp(min=0).long()].flatten(1, 2).nan_to_num()
    wider = {n: wide(x) for n, x in options.items()}
    exact = reference.mla_decode(query.double(), latent.double(), cache.lengths, weight.double(), **wider)
    plain = absorbed(query, latent, cache.lengths, weight, **options)
    assert_close_to_reference(outs[0], plain, exact)


def test_many_rows_of_a_group():
    """Where heads of a group become rows; sequences of 20 rows."""
    cache = made(torch.float32, torch.float32)
    cache.truncate(cache.lengths.clamp(max=24))
    for causal in (True, False):
        query = noise(7, 4, 20, 24, dtype=torch.float32)
        outs = cache.attend(query, shared_prefix=True, return_lse=True, is_causal=causal)
        options = dict(is_causal=causal, block_table=cache.block_table)
        check(outs, query, cache.key, cache.value, cache.lengths, options, str(causal))


def test_a_tree_of_drafted_tokens_behind_a_shared_prompt():
    cache = PagedKVCache(3, 2, 64, 16, block_size=BLOCK)
    prompt = random_tensor((3, 2, 33, 16), torch.float32, 1)
    cache.append(prompt, prompt, torch.tensor([33, 0, 0]))
    cache.fork(0, [1, 2])
    parents = torch.tensor([-1, 0, 0, 1, 2])
    q, k, v = (random_tensor((3, h, 5, 16), torch.float32, h) for h in (4, 2, 2))
    cache.append(k, v)
    mask = tree_mask(parents, cache.lengths)
    one = KVCache(3, 2, 64, 16)
    one.append(prompt[:1].expand(3, -1, -1, -1), prompt[:1].expand(3, -1, -1, -1))
    one.append(k, v)
    outs = []
    found = lambda: outs.append(cache.attend(q, shared_prefix=True, is_causal=False, attn_mask=mask))  # noqa: E731
    assert reads(found) == (3 * 38 - 2 * 32, 2)
    torch.testing.assert_close(outs[0], one.attend(q, is_causal=False, attn_mask=mask))


def test_packed_rows_of_some_sequences():
    cache = made(torch.float32, torch.float32)
    counts = [1, 0, 1, 1, 1, 5, 0]
    cu_seqlens, query = torch.tensor([0, *counts]).cumsum(0), noise(sum(counts), 4, 24, dtype=torch.float32)
    sinks = noise(7, 4, dtype=torch.float32)
    outs = []
    keys, calls = reads(
        lambda: outs.append(cache.attend_packed(query, cu_seqlens, shared_prefix=True, return_lse=True, sinks=sinks))
    )
    assert calls == 4 and keys == sum(n for n, c in zip(LENGTHS, counts) if c) - 24 - 16
    expected = cache.attend_packed(query, cu_seqlens, return_lse=True, sinks=sinks)
    torch.testing.assert_close(outs[0], expected)


@pytest.mark.parametrize("shared", (False, True))
def test_packed_rows_over_latents(shared):
    caches = [made("latents", torch.float32) for _ in range(2)]
    counts = [1, 0, 1, 1, 1, 5, 0]
    cu_seqlens = torch.tensor([0, *counts]).cumsum(0)
    query, new = noise(9, 3, 20, dtype=torch.float32), noise(9, 24, dtype=torch.float32)
    weight = noise(3 * (12 + 10), 16, dtype=torch.float32, seed=5) / 4
    dense_query, dense_new = torch.zeros(7, 3, 5, 20), torch.zeros(7, 5, 24)
    for b, n in enumerate(counts):
        at = slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        dense_query[b, :, 5 - n :], dense_new[b, 5 - n :] = query[at].transpose(0, 1), new[at]
    caches[0].append_packed(new, cu_seqlens)
    caches[1].append(dense_new, torch.tensor(counts))
    outs = []
    call = lambda: outs.append(caches[0].attend_packed(query, weight, cu_seqlens, shared_prefix=shared))  # noqa: E731
    assert reads(call)[1] == (4 if shared else 2)
    expected = caches[1].attend(dense_query, weight)
    for b, n in enumerate(counts):
        at = slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
        torch.testing.assert_close(outs[0][at], expected[b, :, 5 - n :].transpose(0, 1))


def test_what_has_been_found_serves_every_layer():
    caches = [made(torch.float32, torch.float32) for _ in range(2)]
    found, query = caches[0].shared_prefixes(), noise(7, 4, 1, 24, dtype=torch.float32)
    for cache in caches:
        ours = cache.attend(query, shared_prefix=found)
        assert torch.equal(ours, cache.attend(query, shared_prefix=True))
    cu_seqlens = torch.tensor([0, 1, 1, 2, 3, 4, 9, 9])
    found, query = caches[0].shared_prefixes(cu_seqlens=cu_seqlens), noise(9, 4, 24, dtype=torch.float32)
    assert [s.members for s in found.segments] == [[0, 1], [2, 3]]
    outs = [c.attend_packed(query, cu_seqlens, shared_prefix=x) for c, x in zip(caches, (found, True))]
    assert torch.equal(*outs)


def test_nothing_shared_is_one_call_with_the_same_bits():
    cache = made(torch.float32, torch.float32)
    cache.free([1, 2, 4])
    query = noise(7, 4, 1, 24, dtype=torch.float32)
    outs = []
    assert reads(lambda: outs.append(cache.attend(query, shared_prefix=True)))[1] == 1
    assert torch.equal(outs[0], cache.attend(query))


def test_bits_do_not_depend_on_threads():
    cache, query = made(torch.bfloat16, torch.bfloat16), noise(7, 4, 3, 24, dtype=torch.bfloat16)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(cache.attend(query, shared_prefix=True, return_lse=True))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_a_nan_or_inf_shows_in_the_sequences_that_share_it_and_in_no_other():
    for number in (float("nan"), float("inf")):
        cache, query = made(torch.float32, torch.float32), noise(7, 4, 1, 24, dtype=torch.float32)
        before = cache.attend(query, shared_prefix=True)
        cache.value[cache.block_table[0, 1], 1, 3, 5] = number
        after = cache.attend(query, shared_prefix=True)
        assert not after[:3, 2:, :, 5].isfinite().any()
        after[:3, 2:, :, 5] = before[:3, 2:, :, 5]
        assert torch.equal(after, before)


TABLE = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5, 6], [7, 8, -1, -1], [7, 8, 9, -1], [0, 1, 2, -1]]
FOUND = {  # lengths, rows, causal -> segments and where each goes on alone
    "levels": ([14, 16, 15, 8, 9, 12], 1, True, [([0, 1, 2, 5], 0, 2), ([0, 1], 2, 3), ([3, 4], 0, 1)],
               [3, 3, 2, 1, 1, 2]),
    "not causal": ([14, 16, 15, 8, 9, 12], 1, False, [([0, 1, 2, 5], 0, 2), ([0, 1, 5], 2, 3), ([3, 4], 0, 2)],
                   [3, 3, 2, 2, 2, 3]),
    "rows see no more": ([14, 16, 15, 8, 9, 12], 8, True, [([0, 1, 2, 5], 0, 1)], [1, 1, 1, 0, 0, 1]),
    "more rows than tokens": ([3, 2, 0, 0, 0, 1], 4, True, [], [0] * 6),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_what_counts_as_shared(case, monkeypatch):
    monkeypatch.setattr(_shared_prefix, "LEAST", 4)
    lengths, rows, causal, segments, own = FOUND[case]
    found = find_shared_prefixes(torch.tensor(TABLE, dtype=torch.int32), torch.tensor(lengths), 4, rows, causal)
    assert found.own == own
    assert found.segments == [Segment(*segment) for segment in segments]


def test_a_short_run_of_all_belongs_to_the_longer_ones_behind_it(monkeypatch):
    monkeypatch.setattr(_shared_prefix, "LEAST", 12)
    table = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [0, 5, 6, 7]], dtype=torch.int32)
    found = find_shared_prefixes(table, torch.tensor([16, 16, 16]), 4, 1, True)
    assert found.segments == [Segment([0, 1], 0, 3)] and found.own == [3, 3, 0]


@pytest.mark.parametrize(
    "name, value", [("window_size", (5, -1)), ("alibi_slopes", torch.ones(4)), ("prefix_length", 3)]
)
def test_what_depends_on_positions_is_refused(name, value):
    cache, query = made(torch.float32, torch.float32), noise(7, 4, 1, 24, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"shared_prefix: expected False beside {name}"):
        cache.attend(query, shared_prefix=True, **{name: value})
    with pytest.raises(ValueError, match="query: expected 4 dimensions"):
        cache.attend(query[0], shared_prefix=True)

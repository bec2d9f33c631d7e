"""What the tests of decoding share: the tolerance rule for attention over a cache, one sequence at a time."""

import math

import torch

import attnjourney
from tests.support.testing import (
    OUTPUT_FACTOR,
    assert_close_to_reference,
    plain_run,
    random_tensor,
    reference_attention,
)


def visible(q_len, length, is_causal=True, window_size=(-1, -1)):
    """Bool (q_len, length): key j is seen by the row at p = length - q_len + i for p - left <= j <= p + right."""
    mask = torch.zeros(q_len, length, dtype=torch.bool)
    for i in range(q_len):
        p = length - q_len + i
        first = max(0, p - window_size[0]) if window_size[0] >= 0 else 0
        last = p if is_causal else p + window_size[1] if window_size[1] >= 0 else length - 1
        mask[i, first : max(first, last + 1)] = True
    return mask


def assert_decoded(out, lse, query, keys, values, *, is_causal=True, window_size=(-1, -1), scale=None, label=""):
    """The rule for out and lse (or None), given each sequence's own keys: keys[b] (heads, length, dim)."""
    __tracebackhide__ = True
    assert out.dtype == query.dtype
    for b, (k, v) in enumerate(zip(keys, values)):
        mask = visible(query.shape[2], k.shape[1], is_causal, window_size)
        options = dict(scale=scale, enable_gqa=True)
        wide = reference_attention(query[b].double(), k.double(), v.double(), mask, **options)
        plain, rounding = plain_run((query[b], k, v, mask), torch.zeros_like(out[b]), **options)
        for i, (name, actual) in enumerate((("out", out), ("lse", lse))):
            if actual is not None:
                name = f"{name} of sequence {b} {label}"
                assert_close_to_reference(actual[b], plain[i], wide[i], OUTPUT_FACTOR, name, rounding[i])


def dense_cache(lengths, heads, capacity, dim, v_dim, dtype, seed=0, junk=math.nan):
    """(key, value) caches, junk beyond each length."""
    key = random_tensor((len(lengths), heads, capacity, dim), dtype, seed)
    value = random_tensor((len(lengths), heads, capacity, v_dim), dtype, seed + 1)
    for b, length in enumerate(lengths):
        key[b, :, length:] = junk
        value[b, :, length:] = junk
    return key, value


def check_decode(
    q_len, lengths, *, heads=4, kv_heads=2, dim=32, v_dim=None, capacity=None, dtype=torch.float32, **options
):
    """attnjourney.decode over a dense cache with NaN beyond the lengths, by the rule. Returns (out, lse)."""
    __tracebackhide__ = True
    capacity = max([*lengths, 1]) if capacity is None else capacity
    key, value = dense_cache(lengths, kv_heads, capacity, dim, v_dim or dim, dtype)
    query = random_tensor((len(lengths), heads, q_len, dim), dtype, 7)
    out, lse = attnjourney.decode(query, key, value, torch.tensor(lengths), return_lse=True, **options)
    keys, values = ([x[b, :, :n] for b, n in enumerate(lengths)] for x in (key, value))
    label = f"[{q_len} rows, lengths {lengths}, heads {heads}/{kv_heads}, dim {dim}.{v_dim} {dtype} {options}]"
    assert_decoded(out, lse, query, keys, values, label=label, **options)
    return out, lse


def paged(key, value, lengths, block_size, num_blocks=None, seed=0):
    """The same caches in shuffled blocks, the rest of the pool NaN: (key, value, block_table)."""
    batch, heads, capacity, _ = key.shape
    width = -(-capacity // block_size)
    num_blocks = num_blocks or batch * width + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((batch, width), -7, dtype=torch.int32)
    pools = [x.new_full((num_blocks, heads, block_size, x.shape[3]), math.nan) for x in (key, value)]
    for b, length in enumerate(lengths):
        for j in range(0, length, block_size):
            block, n = order.pop(), min(block_size, length - j)
            table[b, j // block_size] = block
            for pool, x in zip(pools, (key, value)):
                pool[block, :, :n] = x[b, :, j : j + n]
    return *pools, table

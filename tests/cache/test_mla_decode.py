"""torch.ops.attnjourney.mla_decode: the absorbed form equals the expanded one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnjourney
from attnjourney import reference
from tests.support.testing import DTYPES, assert_close_to_reference, random_tensor, threads

MLA_DECODE = torch.ops.attnjourney.mla_decode


def inputs(lengths, heads=3, q_len=2, nope=16, rope=8, kv_lora=32, v=12, dtype=torch.float64, extra=4):
    """query, latents with NaN beyond the lengths, lengths, weight."""
    query = random_tensor((len(lengths), heads, q_len, nope + rope), dtype, outliers=False)
    latent = random_tensor((len(lengths), max(lengths) + extra, kv_lora + rope), dtype, 1, outliers=False)
    for b, length in enumerate(lengths):
        latent[b, length:] = math.nan
    weight = (random_tensor((heads * (nope + v), kv_lora), torch.float64, 2, outliers=False) / kv_lora**0.5).to(dtype)
    return query, latent, torch.tensor(lengths), weight


@pytest.mark.parametrize("q_len", (1, 2, 5, 16, 17, 40))
@pytest.mark.parametrize("options", ({}, {"is_causal": False, "scale": 0.2}, {"window_size": (9, -1)}), ids=str)
def test_equals_the_expanded_form(q_len, options):
    query, latent, lengths, weight = inputs([50, 3, 0], q_len=q_len)
    ours = attnjourney.mla_decode(query, latent, lengths, weight, return_lse=True, **options)
    clean = latent.nan_to_num()
    for a, b in zip(ours, reference.mla_decode(query, clean, lengths, weight, return_lse=True, **options)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_sizes_of_deepseek_v3():
    """128 heads, latents of 512 + 64 numbers: two chunks of keys, four blocks of rows."""
    query, latent, lengths, weight = inputs([300], heads=128, q_len=1, nope=128, rope=64, kv_lora=512, v=128)
    assert latent.shape[-1] == 576
    out = attnjourney.mla_decode(query, latent, lengths, weight, scale=0.13523378)
    expanded = reference.mla_decode(query, latent.nan_to_num(), lengths, weight, scale=0.13523378)
    torch.testing.assert_close(out, expanded, rtol=1e-12, atol=1e-12)


def absorbed(query, latent, lengths, weight, **options):
    """The same formula in plain PyTorch in the dtype of the inputs."""
    kv_lora, heads = weight.shape[1], query.shape[1]
    rope = latent.shape[-1] - kv_lora
    nope = query.shape[-1] - rope
    w_uk, w_uv = weight.unflatten(0, (heads, -1)).split([nope, weight.shape[0] // heads - nope], 1)
    q = torch.cat([query[..., :nope] @ w_uk, query[..., nope:]], -1)
    key = latent.unsqueeze(1)
    scale = query.shape[-1] ** -0.5
    return reference.decode(q, key, key[..., :kv_lora], lengths, scale=scale, **options) @ w_uv.transpose(-1, -2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", (1, 3, 20))
@pytest.mark.parametrize("rope", (0, 8))
def test_dtypes(dtype, q_len, rope):
    query, latent, lengths, weight = inputs([90, 17], q_len=q_len, rope=rope, dtype=dtype)
    clean = latent.nan_to_num()
    wide = reference.mla_decode(query.double(), clean.double(), lengths, weight.double())
    out = MLA_DECODE(query, latent, lengths, weight)[0]
    assert_close_to_reference(out, absorbed(query, clean, lengths, weight), wide)


@settings(derandomize=True, deadline=None, database=None, max_examples=40)
@given(st.data())
def test_any_sizes(data):
    size = st.integers(1, 20)
    sizes = {name: data.draw(size, label=name) for name in ("heads", "q_len", "nope", "kv_lora", "v")}
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    query, latent, lengths, weight = inputs(lengths, rope=data.draw(st.integers(0, 9)), extra=1, **sizes)
    expanded = reference.mla_decode(query, latent.nan_to_num(), lengths, weight)
    torch.testing.assert_close(MLA_DECODE(query, latent, lengths, weight)[0], expanded, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch, q_len", ((1, 1), (2, 1), (1, 3), (3, 3), (17, 1)))
def test_rows_of_the_products_with_a_head(batch, q_len, dtype):
    """Every number of rows that go together, widths beside those of vectors, weights of several blocks; the same bits
    for any number of threads."""
    query, latent, lengths, weight = inputs([5] * batch, 2, q_len, nope=70, kv_lora=133, v=41, rope=3, dtype=dtype)
    clean = latent.nan_to_num()
    wide = reference.mla_decode(query.double(), clean.double(), lengths, weight.double())
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(MLA_DECODE(query, latent, lengths, weight))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert_close_to_reference(results[0][0], absorbed(query, clean, lengths, weight), wide)


def test_strided_inputs():
    query, latent, lengths, weight = inputs([30, 12], extra=1)
    expected = MLA_DECODE(query, latent, lengths, weight)[0]
    wide = torch.full((2, 31, 3, 24), math.nan, dtype=query.dtype)[:, :2].copy_(query.transpose(1, 2)).transpose(1, 2)
    columns = weight.t().contiguous().t()
    beside = torch.cat([latent, latent], -1)[..., : latent.shape[-1]]
    torch.testing.assert_close(MLA_DECODE(wide, beside, lengths, columns)[0], expected, rtol=1e-13, atol=1e-13)


def test_bad_input():
    query, latent, lengths, weight = inputs([30, 12])
    for message, change in {
        "query: expected 4": dict(query=query[0]),
        "latent: expected 3": dict(latent=latent[0]),
        "latent: expected the batch size": dict(latent=latent[:1]),
        "latent: expected the dtype": dict(latent=latent.float()),
        "latent: expected a last dimension": dict(latent=latent[..., :20]),
        "query: expected a last dimension": dict(query=query[..., :8]),
        "kv_b_weight: expected query's heads": dict(kv_b_weight=weight[:-1]),
        "kv_b_weight: expected 2": dict(kv_b_weight=weight[0]),
        "lengths: expected numbers": dict(lengths=lengths + 5),
        "scale: expected a finite": dict(scale=math.inf),
    }.items():
        arguments = dict(query=query, latent=latent, lengths=lengths, kv_b_weight=weight) | change
        with pytest.raises(RuntimeError if "dtype" in message else ValueError, match=message):
            MLA_DECODE(**arguments)
    with pytest.raises(RuntimeError, match="kv_b_weight: expected a tensor that does not require grad"):
        MLA_DECODE(query, latent, lengths, weight.clone().requires_grad_())


def test_opcheck_and_compile():
    query, latent, lengths, weight = inputs([30, 12], dtype=torch.float32)
    torch.library.opcheck(MLA_DECODE.default, (query, latent.nan_to_num(), lengths, weight))
    compiled = torch.compile(attnjourney.mla_decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query, latent, lengths, weight), attnjourney.mla_decode(query, latent, lengths, weight))


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    query, latent, lengths, weight = inputs([30, 12])
    with FlopCounterMode(display=False) as counter:
        MLA_DECODE(query, latent, lengths, weight)
    # q_nope W_UK and u W_UV^T; scores over 40 numbers and values of 32 for 34 keys
    assert counter.get_total_flops() == 2 * 2 * 3 * 2 * (32 * 16 + 32 * 12 + 34 * (40 + 32))


def paged_latents(latent, lengths, block_size):
    """The same latents in shuffled blocks, the rest of the pool NaN, and the block table."""
    batch, capacity, dim = latent.shape
    width = -(-capacity // block_size)
    order = torch.randperm(batch * width + 2, generator=torch.Generator().manual_seed(0)).tolist()
    pool, table = latent.new_full((len(order), block_size, dim), math.nan), torch.full((batch, width), -7).int()
    for b, length in enumerate(lengths.tolist()):
        for j in range(0, length, block_size):
            table[b, j // block_size] = block = order.pop()
            pool[block, : min(block_size, capacity - j)] = latent[b, j : j + block_size]
    return pool, table


@pytest.mark.parametrize("q_len", (1, 3, 40))
@pytest.mark.parametrize("options", ({}, {"window_size": (9, -1), "softcap": 2.0}), ids=str)
def test_paged(q_len, options):
    query, latent, lengths, weight = inputs([50, 3, 0], q_len=q_len)
    pool, table = paged_latents(latent, lengths, 8)
    ours = attnjourney.mla_decode(query, pool, lengths, weight, block_table=table, return_lse=True, **options)
    expected = reference.mla_decode(query, latent.nan_to_num(), lengths, weight, return_lse=True, **options)
    again = reference.mla_decode(query, pool, lengths, weight, block_table=table, return_lse=True, **options)
    for a, b, c in zip(ours, expected, again):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(c, b, rtol=1e-12, atol=1e-12)


def test_paged_transforms():
    query, latent, lengths, weight = inputs([20, 9], q_len=2)
    pool, table = paged_latents(latent, lengths, 8)
    torch.library.opcheck(MLA_DECODE, (query, pool, lengths, weight), {"block_table": table})
    queries = torch.stack([query, query.flip(1)])
    mapped = torch.func.vmap(lambda q: attnjourney.mla_decode(q, pool, lengths, weight, block_table=table))(queries)
    for out, q in zip(mapped, queries):
        torch.testing.assert_close(out, attnjourney.mla_decode(q, pool, lengths, weight, block_table=table))
    wrong = table.clone()
    wrong[0, 0] = 99
    with pytest.raises(ValueError, match="^block_table: expected blocks from 0 to"):
        attnjourney.mla_decode(query, pool, lengths, weight, block_table=wrong)

"""mla_decode over the latents that indices name, numbers and bytes: equal to the same with a mask; blocks; what it
refuses."""

import pytest
import torch

import attnjourney
from attnjourney import reference
from tests.cache.test_mla_decode import absorbed
from tests.sparse.test_sparse_attention import make_indices
from tests.support.testing import (
    FLOOR_ULPS,
    OUTPUT_FACTOR,
    assert_close_to_reference,
    pairs,
    random_tensor,
    row_id,
    threads,
)

B, H, ROWS, CAPACITY, RANK, ROPE, NOPE, V = 2, 4, 3, 64, 24, 8, 16, 12


def inputs(dtype=torch.float64):
    query = random_tensor((B, H, ROWS, NOPE + ROPE), dtype, 1, outliers=False)
    latent = random_tensor((B, CAPACITY, RANK + ROPE), dtype, 2, outliers=False)
    weight = random_tensor((H * (NOPE + V), RANK), dtype, 3, outliers=False) / RANK**0.5
    return query, latent, torch.tensor([60, 33]), weight, make_indices((B, ROWS, 20), CAPACITY)


@pytest.mark.parametrize("options", [{}, dict(is_causal=False, softcap=1.5, scale=0.3)], ids=str)
def test_equals_a_mask(options):
    query, latent, lengths, weight, indices = inputs()
    seen = torch.zeros(B, ROWS, CAPACITY + 1, dtype=torch.bool)
    seen = seen.scatter_(2, indices.masked_fill(indices < 0, CAPACITY), True)[..., :CAPACITY]
    out, lse = attnjourney.mla_decode(query, latent, lengths, weight, indices=indices, return_lse=True, **options)
    expected = attnjourney.mla_decode(
        query, latent, lengths, weight, attn_mask=seen[:, None], return_lse=True, **options
    )
    torch.testing.assert_close((out, lse), expected, rtol=1e-10, atol=1e-12)

    table = torch.randperm(8, generator=torch.Generator().manual_seed(0)).view(B, 4)
    pool = torch.empty(8, 16, RANK + ROPE, dtype=latent.dtype)
    pool[table] = latent.view(B, 4, 16, -1)
    paged = attnjourney.mla_decode(
        query, pool, lengths, weight, indices=indices, block_table=table.int(), return_lse=True, **options
    )
    torch.testing.assert_close(paged, expected, rtol=1e-10, atol=1e-12)


def as_mask(indices, capacity):
    """(B, 1, rows, capacity): the logarithm of how often each row names a token."""
    times = torch.zeros(*indices.shape[:2], capacity + 1, dtype=torch.float64)
    unnamed = (indices < 0) | (indices >= capacity)
    times.scatter_add_(2, indices.long().masked_fill(unnamed, capacity), torch.ones_like(indices, dtype=torch.float64))
    return times[:, None, :, :capacity].log()


def in_blocks(size, *tensors):
    """Tensors (B, capacity, ...) in shuffled blocks, and the table."""
    batch, count = tensors[0].shape[0], tensors[0].shape[1] // size
    table = torch.randperm(batch * count, generator=torch.Generator().manual_seed(0)).view(batch, count)
    pools = []
    for x in tensors:
        pools.append(x.new_empty(batch * count, size, *x.shape[2:]))
        to, values = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (pools[-1], x))
        to[table] = values.unflatten(1, (count, size))
    return *pools, table.int()


def check_bytes(kind, dtype, options, device="cpu"):
    """Beside float64 of the numbers that the bytes stand for; what no row may see is NaN; dense and in blocks of 16 and
    of one, the same bits for any number of threads."""
    query, latent, lengths, weight, indices = inputs(dtype)
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = random_tensor((B, H)[2 - options["sinks"] :], torch.float32, 4, outliers=False)
    for b, length in enumerate(lengths.tolist()):
        latent[b, length:] = torch.nan
    latent[1, 5] = torch.nan
    indices = indices.masked_fill(indices == 5, -1)
    indices[0, 0], indices[1, 2, 0] = -7, CAPACITY  # a row that names nothing; past the capacity
    indices[0, 2, 1:3] = 7  # twice
    stored, factor = reference.quantize(latent, kind)
    exact = reference.dequantize(stored, factor, torch.float64).nan_to_num()
    mask = as_mask(indices, CAPACITY)
    seen = dict(return_lse=True, **options)
    wide = reference.mla_decode(query.double(), exact, lengths, weight.double(), attn_mask=mask, **seen)
    plain = absorbed(query, exact.to(dtype), lengths, weight, attn_mask=mask.to(dtype), **seen)
    move = lambda x: x.to(device) if isinstance(x, torch.Tensor) else x  # noqa: E731

    def call(stored, scale, table=None):
        given = map(move, (query, stored, lengths, weight))
        more = dict(indices=indices, latent_scale=scale, block_table=table, return_lse=True, **options)
        return [x.cpu() for x in attnjourney.mla_decode(*given, **{name: move(x) for name, x in more.items()})]

    found = call(stored, factor)
    for name, ours, p, w in zip(("out", "lse"), found, plain, wide):
        floor = torch.full_like(w, 2 * FLOOR_ULPS * torch.finfo(ours.dtype).eps * float(w[w.isfinite()].abs().max()))
        assert_close_to_reference(ours, p, w, OUTPUT_FACTOR, name, floor)
    assert found[0][0, :, 0].count_nonzero() == 0
    with threads(2):
        assert all(map(torch.equal, call(stored, factor), found))
    for size in (16, 1):
        assert all(map(torch.equal, call(*in_blocks(size, stored, factor)), found)), size


BYTES = pairs(
    kind=(torch.int8, torch.float8_e4m3fn),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
    options=({}, dict(is_causal=False, softcap=1.5), dict(scale=0.3, sinks=1), dict(sinks=2)),
)


@pytest.mark.parametrize("row", BYTES, ids=row_id)
def test_bytes(row):
    check_bytes(**row)


def test_gradients_reach_query_latents_and_weights():
    query, latent, lengths, weight, indices = inputs()
    leaves = [x[:, :, :2] if x is query else x for x in (query, latent, weight)]
    leaves = [x.clone().requires_grad_() for x in leaves]

    def call(query, latent, weight):
        return attnjourney.mla_decode(query, latent, lengths, weight, indices=indices[:, :2, :4])

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_bad_input():
    query, latent, lengths, weight, indices = inputs(torch.float32)
    refused = dict(
        window_size=(3, 0),
        prefix_length=2,
        attn_mask=torch.ones(CAPACITY, dtype=torch.bool),
        alibi_slopes=torch.ones(H),
    )
    for name, value in refused.items():
        with pytest.raises(ValueError, match=f"{name}: expected none beside indices"):
            attnjourney.mla_decode(query, latent, lengths, weight, indices=indices, **{name: value})
    with pytest.raises(ValueError, match="kv_b_weight: expected shape"):
        attnjourney.mla_decode(query, latent, lengths, weight[:-1], indices=indices)
    with pytest.raises(ValueError, match="indices: expected shape"):
        attnjourney.mla_decode(query, latent, lengths, weight, indices=indices[:, :1])
    with pytest.raises(ValueError, match="indices: .* got 64"):
        attnjourney.mla_decode(query, latent, lengths, weight, indices=indices.fill_(64))
    stored, scale = reference.quantize(latent, torch.int8)
    bytes_ = dict(query=query, latent=stored, lengths=lengths, kv_b_weight=weight, indices=indices, latent_scale=scale)
    for message, change in {
        "latent_scale: expected a tensor beside latent of torch.int8": dict(latent_scale=None),
        "latent_scale: expected the shape of latent": dict(latent_scale=scale[:, :-1]),
        "latent: expected the batch size of query": dict(latent=stored[:1], latent_scale=scale[:1]),
        "lengths: expected shape": dict(lengths=lengths[:1]),
        "indices: expected shape": dict(indices=indices[:, :1]),
        "kv_b_weight: expected shape": dict(kv_b_weight=weight[:-1]),
        "sinks: expected shape": dict(sinks=torch.ones(H + 1)),
        "attn_mask: expected none beside indices": dict(attn_mask=torch.ones(CAPACITY, dtype=torch.bool)),
    }.items():
        with pytest.raises(ValueError, match=message):
            attnjourney.mla_decode(**bytes_ | change)
    with pytest.raises(RuntimeError, match="latent: expected dtype torch.int8 or torch.float8_e4m3fn"):
        attnjourney.mla_decode(**bytes_ | dict(latent=latent))
    with pytest.raises(RuntimeError, match="query: expected a tensor that does not require grad"):
        attnjourney.mla_decode(**bytes_ | dict(query=query.clone().requires_grad_()))

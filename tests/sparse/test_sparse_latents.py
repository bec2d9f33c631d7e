"""mla_decode over the latents that indices name: equal to the same with a mask; blocks; what it refuses."""

import pytest
import torch

import attnjourney
from tests.sparse.test_sparse_attention import make_indices
from tests.support.testing import random_tensor

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

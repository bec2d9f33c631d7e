"""attnjourney.integrations.flash_operators: what torch's registry puts in place of its CUDA kernels, registered for the
CPU here, where torch has none, beside flash-attn's reference formula."""

import pytest
import torch

import attnjourney
from attnjourney.integrations import flash_operators as ours
from tests.support.flash_reference import reference
from tests.support.testing import random_tensor

CLOSE = dict(rtol=1e-10, atol=1e-11)
ENDS_Q, ENDS_K = [0, 5, 5, 12], [0, 8, 8, 19]
CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in (ENDS_Q, ENDS_K))
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def on_the_cpu():
    attnjourney.activity(reset=True)
    library = torch.library.Library("aten", "IMPL")
    ours.register(library, "CPU")
    yield
    library._destroy()


def calls():
    return attnjourney.activity()["flash_operators"]


def packed(dtype=torch.float64, kv_heads=2):
    shapes = [(12, 4, 8), (19, kv_heads, 8), (19, kv_heads, 8)]
    return [random_tensor(shape, dtype, i, outliers=False).requires_grad_() for i, shape in enumerate(shapes)]


def dense(dtype=torch.float64, keys=9, heads=2):
    """(B, H, L, E), as projections give them: (B, L, H, E) in memory."""
    shapes = [(2, 9, 4, 8), (2, keys, heads, 8), (2, keys, heads, 8)]
    inputs = [random_tensor(shape, dtype, i, outliers=False) for i, shape in enumerate(shapes)]
    return [x.transpose(1, 2).requires_grad_() for x in inputs]


def of_sequences(q, k, v, used=None, **options):
    parts = []
    for i, (a, b) in enumerate(zip(ENDS_Q, ENDS_Q[1:])):
        c, d = ENDS_K[i], ENDS_K[i + 1] if used is None else ENDS_K[i] + used[i]
        parts.append(reference(q[a:b], k[c:d], v[c:d], **options))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], -1)


def of_batch(q, k, v, **options):
    parts = [reference(*(x[b].transpose(0, 1) for x in (q, k, v)), **options) for b in range(2)]
    return torch.stack([p[0].transpose(0, 1) for p in parts]), torch.stack([p[1] for p in parts])


def gradients(out, inputs):
    weighing = random_tensor(out.shape, torch.float64, 7, outliers=False).to(out.dtype)
    return torch.autograd.grad(out, inputs, weighing)


def assert_equal(actual, expected, inputs):
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)
    torch.testing.assert_close(gradients(actual[0], inputs), gradients(expected[0], inputs), **CLOSE)


@pytest.mark.parametrize("causal, scale", [(False, None), (True, 0.2)])
def test_sdpa(causal, scale):
    inputs = dense()
    out, lse, *rest = aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, scale=scale)
    assert out.stride() == inputs[0].stride()  # torch.compile counts on it
    assert rest[2:4] == [9, 9] and rest[4].shape == (2,) and rest[4].dtype == torch.uint64
    assert_equal((out, lse), of_batch(*inputs, causal=causal, scale=scale), inputs)
    assert calls() == 2


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_packed_sequences(window):
    inputs, (left, right) = packed(), window
    causal, options = right == 0, dict(window_size_left=left, window_size_right=None if right < 0 else right)
    out, lse, *_ = aten._flash_attention_forward(*inputs, CU_Q, CU_K, 7, 11, 0.0, causal, False, **options)
    assert_equal((out, lse), of_sequences(*inputs, window=window), inputs)
    into = torch.full_like(out, torch.nan)
    lse_again = aten._flash_attention_forward_no_dropout_inplace(
        into, *(x.detach() for x in inputs), CU_Q, CU_K, 7, 11, 0.0, causal, False, **options
    )
    assert torch.equal(into, out) and torch.equal(lse_again, lse) and calls() == 3


def test_dense_queries_aligned_to_the_last_keys():
    inputs = [x.detach().transpose(1, 2).requires_grad_() for x in dense(keys=13)]
    out, lse, *_ = aten._flash_attention_forward(*inputs, None, None, 9, 13, 0.0, True, False, window_size_left=4)
    wanted, wanted_lse = of_batch(*(x.transpose(1, 2) for x in inputs), window=(4, 0))
    assert out.is_contiguous()
    assert_equal((out, lse), (wanted.transpose(1, 2), wanted_lse), inputs)


def test_keys_in_use_blocks_and_alibi():
    (q, k, v), used = (x.detach() for x in packed()), [6, 0, 11]
    seqused, slopes = torch.tensor(used, dtype=torch.int32), torch.tensor([0.1, 0.2, 0.3, 0.4])
    wanted = of_sequences(q, k, v, used, causal=True, slopes=slopes)[0]
    options = dict(seqused_k=seqused, alibi_slopes=slopes)
    out = aten._flash_attention_forward(q, k, v, CU_Q, CU_K, 7, 11, 0.0, True, False, **options)[0]
    torch.testing.assert_close(out, wanted, **CLOSE)
    pools = [x.new_full((6, 4, 2, 8), torch.nan) for x in (k, v)]
    table = torch.tensor([[5, 0, -1], [-1, -1, -1], [3, 2, 1]], dtype=torch.int32)
    for b, (c, d) in enumerate(zip(ENDS_K, ENDS_K[1:])):
        for j in range(c, d):
            for pool, x in zip(pools, (k, v)):
                pool[table[b, (j - c) // 4], (j - c) % 4] = x[j]
    options["block_table"] = table
    out = aten._flash_attention_forward(q, *pools, CU_Q, None, 7, 11, 0.0, True, False, **options)[0]
    torch.testing.assert_close(out, wanted, **CLOSE)
    assert calls() == 2


def test_bfloat16():
    """The backward has the rounding of lse, in float32, and no more."""
    inputs = dense(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = of_batch(*exact, causal=True)[0]
    plain = of_batch(*inputs, causal=True)[0]
    out = aten._scaled_dot_product_flash_attention(*inputs, 0.0, True)[0]
    for got, rounded, right in zip(gradients(out, inputs), gradients(plain, inputs), gradients(wanted, exact)):
        assert (got - right).norm() <= 3 * (rounded - right).norm()
    assert calls() == 2


def test_what_is_not_served_is_named():
    q, k, v = (x.detach() for x in dense())
    with pytest.raises(RuntimeError, match="dropout_p: expected 0"):
        aten._scaled_dot_product_flash_attention(q, k, v, 0.5)
    with pytest.raises(RuntimeError, match="return_debug_mask: expected False"):
        aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, True)
    with pytest.raises(RuntimeError, match="block_table: expected None beside dense"):
        aten._flash_attention_forward(q, k, v, None, None, 9, 9, 0.0, False, False, block_table=torch.zeros(1, 1))
    assert calls() <= 1

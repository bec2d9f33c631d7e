"""Dropout: exactly the weights that the Philox counter says, in forward and backward, on any threads and layouts."""

import math

import numpy
import pytest
import torch

import attnjourney
from attnjourney import reference
from tests.support.testing import (
    DTYPES,
    attention_and_gradients,
    check_attention,
    expanded,
    pairs,
    random_tensor,
    reference_attention,
    row_id,
    threads,
)

ops = torch.ops.attnjourney
SEEDS = (0, 1, 0x123456789ABCDEF, (1 << 62) - 1, -1, -(1 << 63))


def philox_keep_mask(seed, heads, q_len, kv_len, dropout_p):
    """(heads, q_len, kv_len) bool, from the definition: Philox4x32-7 of the counter (row, key // 8, head, 0), head
    counting through batch and heads; 16 bits for each of 8 keys; dropped where they are below round(p * 2^16)."""
    words = numpy.zeros((4, heads, q_len, (kv_len + 7) // 8), dtype=numpy.uint64)
    words[0] = numpy.arange(q_len)[None, :, None]
    words[1] = numpy.arange(words.shape[-1])
    words[2] = numpy.arange(heads)[:, None, None]
    low, shift = numpy.uint64(0xFFFFFFFF), numpy.uint64(32)
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(7):
        a, b = words[0] * numpy.uint64(0xD2511F53), words[2] * numpy.uint64(0xCD9E8D57)
        k0, k1 = (numpy.uint64(k) for k in key)
        words = numpy.stack([(b >> shift) ^ words[1] ^ k0, b & low, (a >> shift) ^ words[3] ^ k1, a & low])
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    halves = numpy.stack([words & numpy.uint64(0xFFFF), words >> numpy.uint64(16)], 1)  # (4, 2, heads, q_len, octets)
    bits = halves.reshape(8, heads, q_len, -1).transpose(1, 2, 3, 0).reshape(heads, q_len, -1)[..., :kv_len]
    return torch.from_numpy(bits >= int(dropout_p * 65536 + 0.5))


def inputs(dtype=torch.float32, q_len=9, kv_len=21, heads=4, kv_heads=4, batch=2, dim=8):
    return (
        random_tensor((batch, heads, q_len, dim), dtype, 1),
        random_tensor((batch, kv_heads, kv_len, dim), dtype, 2),
        random_tensor((batch, kv_heads, kv_len, dim), dtype, 3),
    )


def kept(q_len, kv_len, heads, dropout_p, seed, dtype=torch.float32):
    """(heads, q_len, kv_len) bool: the keys whose weight was kept, read from one-hot values."""
    q, k = torch.zeros(heads, q_len, 1, dtype=dtype), torch.zeros(heads, kv_len, 1, dtype=dtype)
    v = torch.eye(kv_len, dtype=dtype).expand(heads, -1, -1)
    return ops.attention_forward(q, k, v, None, dropout_p, dropout_seed=torch.tensor(seed))[0] > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keeps_what_the_counter_says(seed, dtype):
    for q_len, kv_len, p in (
        (1, 1, 0.5),
        (9, 21, 0.1),
        (33, 70, 0.5),
        (5, 130, 0.9),
        (70, 8, 1 / 65536),
        (129, 64, 0.25),
    ):
        got = kept(q_len, kv_len, 3, p, seed, dtype)
        assert torch.equal(got, philox_keep_mask(seed, 3, q_len, kv_len, p)), (q_len, kv_len, p)


def test_the_shipped_reference_draws_the_same():
    for seed in SEEDS[:4]:
        got = reference.dropout_keep_mask(seed, 2, 3, 33, 70, 0.3)
        assert torch.equal(got.reshape(6, 33, 70), philox_keep_mask(seed, 6, 33, 70, 0.3))


@pytest.mark.parametrize(
    "row",
    pairs(
        dtype=DTYPES,
        lengths=[(1, 1), (9, 21), (40, 33), (70, 130), (129, 64)],
        p=(0.1, 0.5, 0.9),
        mask=("none", "bool", "float"),
        is_causal=(False, True),
        kv_heads=(4, 2, 1),
        rank=(4, 3, 2, 5),
        scale=(None, -0.2),
    ),
    ids=row_id,
)
def test_values_and_gradients(row):
    (q_len, kv_len), dtype, rank = row["lengths"], row["dtype"], row["rank"]
    q, k, v = inputs(dtype, q_len, kv_len, 4, row["kv_heads"])
    q, k, v = (t[None] if rank == 5 else t[(0,) * (4 - rank)] for t in (q, k, v))
    mask = None if row["mask"] == "none" else random_tensor((q_len, kv_len), dtype, 5)
    if row["mask"] == "bool":
        mask = mask > -0.5
    lead = q.shape[:-2]
    keep = philox_keep_mask(77, math.prod(lead), q_len, kv_len, row["p"]).view(*lead, q_len, kv_len)
    check_attention(
        q,
        k,
        v,
        mask,
        keep=keep,
        dropout_seed=77,
        dropout_p=row["p"],
        is_causal=row["is_causal"],
        scale=row["scale"],
        enable_gqa=rank >= 3,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probability_1_gives_zeros_and_zero_gradients(dtype):
    q, k, v = inputs(dtype)
    mask = random_tensor((9, 21), dtype, 5)
    result = attention_and_gradients(q, k, v, mask, dropout_p=1.0, dropout_seed=1)
    for name in ("out", "grad_query", "grad_key", "grad_value", "grad_attn_mask"):
        assert (getattr(result, name) == 0).all(), name
    assert torch.equal(result.lse, attention_and_gradients(q, k, v, mask).lse)  # lse is before dropout


def test_probability_0_changes_no_bit_and_draws_nothing():
    q, k, v = inputs()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    out = ops.attention(q, k, v, None, 0.0)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(out, ops.attention_forward(q, k, v, None, 0.0, dropout_seed=torch.tensor(3))[0])


def test_a_probability_too_small_to_drop_anything_keeps_everything():
    q, k, v = inputs()
    out, _, _ = ops.attention_forward(q, k, v, None, 1e-6, dropout_seed=torch.tensor(3))
    torch.testing.assert_close(out, ops.attention_forward(q, k, v)[0])


@pytest.mark.parametrize("requires_grad", (False, True))
def test_follows_the_manual_seed(requires_grad):
    q, k, v = inputs()
    q.requires_grad_(requires_grad)

    def run(seed):
        torch.manual_seed(seed)
        return [ops.attention(q, k, v, None, 0.5) for _ in range(2)]

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])
    torch.manual_seed(1)
    torch.testing.assert_close(first[0], reference.attention(q, k, v, None, 0.5))


def test_backward_of_the_operator_uses_the_bits_of_its_forward():
    q, k, v = (t.double().requires_grad_() for t in inputs())
    grad_out = random_tensor(q.shape, torch.float64, 4)
    torch.manual_seed(3)
    out = ops.attention(q, k, v, None, 0.5)
    torch.rand(100)  # other draws in between change nothing
    got = torch.autograd.grad(out, (q, k, v), grad_out)
    torch.manual_seed(3)
    expected = torch.autograd.grad(reference.attention(q, k, v, None, 0.5), (q, k, v), grad_out)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit(dtype):
    q, k, v = inputs(dtype, 70, 90)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(attention_and_gradients(q, k, v, is_causal=True, dropout_p=0.5, dropout_seed=9))
    for other in results[1:]:
        for name in ("out", "lse", "grad_query", "grad_key", "grad_value"):
            assert torch.equal(getattr(other, name), getattr(results[0], name)), name


def test_same_bits_where_inputs_broadcast():
    # the counter follows the call's batch and heads, not the storage
    q, k, v = inputs(kv_heads=1)
    small = ops.attention_forward(q, k, v, None, 0.5, dropout_seed=torch.tensor(4))[0]
    wide = ops.attention_forward(
        q, *(t.expand(2, 4, 21, 8).contiguous() for t in (k, v)), None, 0.5, dropout_seed=torch.tensor(4)
    )[0]
    assert torch.equal(small, wide)
    q = expanded(q, 0)
    out = ops.attention_forward(q, expanded(k, 0), expanded(v, 0), None, 0.5, dropout_seed=torch.tensor(4))[0]
    assert not torch.equal(out[0], out[1])  # equal items get bits of their own


def test_heads_rows_and_seeds_get_different_bits():
    masks = kept(40, 64, 3, 0.5, 1)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[0, 0], masks[0, 1])
    assert not torch.equal(masks, kept(40, 64, 3, 0.5, 2))
    assert not torch.equal(masks, kept(40, 64, 3, 0.5, 1 + (1 << 32)))


@pytest.mark.parametrize("p", (0.01, 0.1, 0.5, 0.9))
def test_share_and_mean(p):
    n = 12 * 256 * 256
    share = 1 - kept(256, 256, 12, p, 12).double().mean().item()
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / n) + 1 / 131072  # five sigma, and p in steps of 2^-16
    # neighbours in key, row and head are independent
    dropped = (~kept(256, 256, 12, p, 12)).double() - p
    for a, b in (
        (dropped[..., 1:], dropped[..., :-1]),
        (dropped[:, 1:], dropped[:, :-1]),
        (dropped[1:], dropped[:-1]),
        (dropped[..., 8:], dropped[..., :-8]),
    ):
        assert (a * b).mean().abs() < 5 * p * (1 - p) / math.sqrt(a.numel()) + 1e-4


def test_first_causal_row_is_its_value_or_zero_and_the_mean_is_right():
    # row 0 has one key, which is often dropped: 0 then, never NaN
    q, k, v = (random_tensor((200, 16, 4), seed=s, outliers=False)[:1].expand(200, 16, 4) for s in range(3))
    p, total, rounds = 0.9, torch.zeros(16, 4), 10
    square = torch.zeros(16, 4)
    for seed in range(rounds):
        out = ops.attention_forward(q, k, v, None, p, True, dropout_seed=torch.tensor(seed))[0]
        assert out.isfinite().all()
        kept_rows = (out[:, 0] != 0).any(-1)
        torch.testing.assert_close(out[kept_rows, 0], (v[kept_rows, 0] / (1 - p)))
        assert 0 < kept_rows.sum() < 60
        total, square = total + out.sum(0), square + out.square().sum(0)
    n = 200 * rounds
    mean = total / n
    sigma = (square / n - mean.square()).sqrt() / math.sqrt(n)
    expected, _ = reference_attention(q[0], k[0], v[0], is_causal=True)
    assert ((mean - expected).abs() <= 5 * sigma + 1e-6).all()


def test_always_applied_whatever_the_module_says():
    q, k, v = inputs()
    module = torch.nn.Identity().eval()
    torch.manual_seed(0)
    assert not torch.equal(attnjourney.attention(module(q), k, v, None, 0.5), attnjourney.attention(q, k, v))

"""What the options mean: known inputs and their right results, from public reports and papers."""

import math

import pytest
import torch

import attnjourney
from attnjourney import reference
from tests.support.testing import DTYPES, check_attention, poison_memory, random_tensor

attention = attnjourney.attention


def seen(q_len, kv_len, dtype=torch.float64, **options):
    """(q_len, kv_len) bool: the keys with a weight, read from one-hot values."""
    q, k = torch.zeros(q_len, 4, dtype=dtype), torch.zeros(kv_len, 4, dtype=dtype)
    return attention(q, k, torch.eye(kv_len, dtype=dtype), **options) > 0


def formula(q_len, kv_len, visible):
    return torch.tensor([[visible(i, j) for j in range(kv_len)] for i in range(q_len)], dtype=torch.bool)


# ---------------------------------------------------------------------------------------------------- alignment


def test_one_causal_query_of_eight_keys():
    q, k, v = (random_tensor((1, 1, n, 4), torch.float64, s) for s, n in enumerate((1, 8, 8)))
    torch.testing.assert_close(attention(q, k, v, is_causal=True), v[..., :1, :])
    bottom = attention(q, k, v, is_causal=True, causal_alignment="bottom_right")
    torch.testing.assert_close(bottom, attention(q, k, v))


def test_last_row_alone_is_the_last_row_of_the_whole():
    q, k, v = (random_tensor((2, 9, 4), torch.float64, s) for s in range(3))
    whole = attention(q, k, v, is_causal=True)
    last = attention(q[:, -1:], k, v, is_causal=True, causal_alignment="bottom_right")
    torch.testing.assert_close(last, whole[:, -1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bottom_right_for_every_pair_of_lengths(dtype):
    for q_len in range(1, 10):
        for kv_len in range(1, 21):
            got = seen(q_len, kv_len, dtype, is_causal=True, causal_alignment="bottom_right")
            assert torch.equal(got, torch.ones(q_len, kv_len).tril(kv_len - q_len) > 0), (q_len, kv_len)


def test_rows_before_the_first_key_are_empty():  # 10 rows, 4 keys
    q, k, v = (random_tensor((2, n, 8), torch.float64, s).requires_grad_() for s, n in enumerate((10, 4, 4)))
    out, lse = attention(q, k, v, is_causal=True, causal_alignment="bottom_right", return_lse=True)
    assert not out[:, :6].any() and (lse[:, :6] == -math.inf).all() and out[:, 6:].all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not grads[0][:, :6].any() and all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("fill", (1e4, math.nan))
def test_a_buffer_longer_than_its_valid_part(fill):
    q, k, v = (random_tensor((1, 2, n, 8), torch.float32, s, outliers=False) for s, n in enumerate((3, 32, 32)))
    k[..., 7:, :], v[..., 7:, :] = fill, fill
    mask = torch.zeros(3, 32)
    mask[:, 7:] = math.nan  # not read either
    options = dict(is_causal=True, causal_alignment="bottom_right")
    leaves = [x.requires_grad_() for x in (q, k, v, mask)]
    out = attention(*leaves, key_lengths=torch.tensor([7]), **options)
    torch.testing.assert_close(out, attention(q, k[..., :7, :], v[..., :7, :], **options))
    grads = torch.autograd.grad(out.sum(), leaves[:3])
    assert all(g.isfinite().all() for g in grads)
    assert not grads[1][..., 7:, :].any() and not grads[2][..., 7:, :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_beyond_the_lengths_is_never_read(dtype):
    q, k, v = (random_tensor((3, 2, n, 16), dtype, s, outliers=False) for s, n in enumerate((40, 200, 200)))
    q_lengths, k_lengths = torch.tensor([40, 0, 17]), torch.tensor([150, 33, 0], dtype=torch.int32)
    for b in range(3):
        q[b, :, q_lengths[b] :], k[b, :, k_lengths[b] :], v[b, :, k_lengths[b] :] = math.nan, math.nan, math.nan
    poison_memory()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, query_lengths=q_lengths, key_lengths=k_lengths, return_lse=True)
    grads = torch.autograd.grad(out.float().square().sum(), leaves)
    assert all(x.isfinite().all() for x in (out, *grads))
    for b in range(3):
        assert not out[b, :, q_lengths[b] :].any() and (lse[b, :, q_lengths[b] :] == -math.inf).all()
        assert not grads[0][b, :, q_lengths[b] :].any() and not grads[1][b, :, k_lengths[b] :].any()
    one = attention(q[:1], k[:1, :, :150], v[:1, :, :150])
    torch.testing.assert_close(out[:1], one)


# ---------------------------------------------------------------------------------------------------- windows


def test_counts_of_a_causal_window_of_four_keys():
    assert seen(10, 10, is_causal=True, window_size=(3, 0)).sum(-1).tolist() == [1, 2, 3] + 7 * [4]


def test_an_infinite_right_edge_is_no_edge():  # 9 rows, 4 keys, bottom-right
    assert seen(9, 4, window_size=(-1, 1 << 50), causal_alignment="bottom_right").all()


def test_equivalent_windows():
    causal = seen(12, 12, is_causal=True)
    for window in ((-1, 0), (12, 0), (11, 0)):
        assert torch.equal(seen(12, 12, window_size=window), causal), window
    assert torch.equal(seen(12, 12, window_size=(50, 50), is_causal=True), causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", ((64, 64), (5, 0), (0, 0), (-1, 7), (7, -1)))
def test_a_window_equals_its_band(window, dtype):
    left, right = (300 if w < 0 else w for w in window)
    expected = formula(300, 300, lambda i, j: i - left <= j <= i + right)
    assert torch.equal(seen(300, 300, dtype, window_size=window), expected)


@pytest.mark.parametrize("q_len, kv_len", ((300, 300), (300, 40), (40, 300)))
@pytest.mark.parametrize("alignment", ("top_left", "bottom_right"))
def test_prefix_beside_a_window(q_len, kv_len, alignment):
    shift = kv_len - q_len if alignment == "bottom_right" else 0
    got = seen(q_len, kv_len, is_causal=True, window_size=(5, -1), prefix_length=4, causal_alignment=alignment)
    assert torch.equal(got, formula(q_len, kv_len, lambda i, j: j < 4 or i + shift - 5 <= j <= i + shift))


# ---------------------------------------------------------------------------------------------------- softcap


@pytest.mark.parametrize("cap", (1.0, 5.0))
@pytest.mark.parametrize("causal", (True, False))
def test_a_hidden_key_does_not_leak_through_softcap(cap, causal):
    q, k, v = (random_tensor((12, 8), torch.float64, s).requires_grad_() for s in range(3))
    with torch.no_grad():
        v[6:] = 1e4
    options = dict(is_causal=True) if causal else dict(attn_mask=(torch.arange(12) < 6).expand(6, 12))
    out = attention(q[:6], k, v, softcap=cap, **options)
    assert out.abs().max() < 100
    grads = torch.autograd.grad(out.sum(), (k, v))
    assert not grads[0][6:].any() and not grads[1][6:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("largest", (0.3, 0.9, 1.1, 5.0))
def test_softcap_of_scores_small_and_large_beside_the_cap(largest, dtype):
    """tanh of numbers up to `largest`: it has polynomials for those below 0.4 and 1. lse shows its error."""
    cap = 4.0
    q, k, v = (random_tensor((n, 16), dtype, s) for s, n in enumerate((50, 100, 100)))
    scores = q.double() @ k.double().T / 4
    q = (q.double() * (largest * cap / scores.abs().max())).to(dtype)
    exact = reference.attention(q.double(), k.double(), v.double(), softcap=cap)
    lse = (cap * torch.tanh(q.double() @ k.double().T / 4 / cap)).logsumexp(-1)
    out, ours = attention(q, k, v, softcap=cap, return_lse=True)
    assert (out.double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * v.abs().max()
    assert (ours.double() - lse).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_len", (63, 64, 65, 127, 129))
def test_softcap_and_a_partial_tile(kv_len, dtype):
    q, k, v = (random_tensor((n, 16), dtype, s) for s, n in enumerate((20, kv_len, kv_len)))
    exact = reference.attention(q.double(), k.double(), v.double(), softcap=1.0)
    error = (attention(q, k, v, softcap=1.0).double() - exact).abs().max()
    assert error <= 8 * torch.finfo(dtype).eps * v.abs().max()


# ---------------------------------------------------------------------------------------------------- sinks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lse_of_a_sink(dtype):
    q, k, v = (random_tensor((1, 4, n, 8), dtype, s, outliers=False) for s, n in enumerate((5, 9, 9)))
    sinks = torch.tensor([100.0, 0.5, -math.inf, -200.0])
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    plain, plain_lse = attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse[0, 0], torch.full((5,), 100.0, dtype=lse.dtype))
    assert torch.equal(out[0, 2], plain[0, 2]) and torch.equal(lse[0, 2], plain_lse[0, 2])
    torch.testing.assert_close(out[0, 3], plain[0, 3])
    nothing, alone = attention(q, k, v, sinks=sinks, key_lengths=torch.tensor([0]), return_lse=True)
    assert not nothing.any() and torch.equal(alone[0, :, 0], sinks.to(alone.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_near_the_largest_number_takes_all_weight(dtype):
    largest = torch.finfo(dtype if dtype != torch.float16 else torch.float32).max
    q, k, v = (random_tensor((1, 2, 7, 8), dtype, s, outliers=False).requires_grad_() for s in range(3))
    sinks = torch.full((2,), largest * 0.9, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    out, lse = attention(q, k, v, sinks=sinks.requires_grad_(), return_lse=True)
    assert torch.equal(lse, sinks.detach()[None, :, None].expand(1, 2, 7).to(lse.dtype))
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, sinks))
    assert max(x.abs().max().item() for x in (out, *grads[:3])) < 1e-30
    torch.testing.assert_close(grads[3], torch.full_like(sinks, 7.0))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("value", (0.0, 2.0, 20.0))
def test_a_sink_trains(value, dtype):
    q, k, v = (random_tensor((1, 2, n, 16), dtype, s, outliers=False) for s, n in enumerate((4, 1024, 1024)))
    results = []
    for function, cast in ((attention, lambda x: x), (reference.attention, lambda x: x.double())):
        sinks = torch.full((2,), value, dtype=cast(q).dtype if cast(q).dtype == torch.float64 else torch.float32)
        sinks.requires_grad_()
        out = function(*(cast(x) for x in (q, k, v)), sinks=sinks)
        results.append(torch.autograd.grad(out.sum(), sinks)[0].double())
    assert results[0].all()
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance * results[1].abs().max().item())


# ---------------------------------------------------------------------------------------------------- ALiBi


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("per_item", (True, False))
def test_alibi_of_unequal_lengths(causal, per_item):  # 3 rows, 7 keys, bottom-right
    q, k, v = (random_tensor((2, 2, n, 4), torch.float64, s) for s, n in enumerate((3, 7, 7)))
    slopes = torch.tensor([[0.5, 0.25], [0.125, 1.0]] if per_item else [0.5, 0.25], dtype=torch.float64)
    bias = -(torch.arange(3)[:, None] + 4 - torch.arange(7)).abs() * slopes[..., None, None]
    options = dict(is_causal=causal, causal_alignment="bottom_right")
    got = attention(q, k, v, alibi_slopes=slopes, **options)
    torch.testing.assert_close(got, attention(q, k, v, bias, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alibi_of_rows_that_see_distant_keys_alone(dtype):
    """Row 400 sees keys 0 to 19: its scores lie at -550; others of the same tile see keys beside them."""
    q, k, v = (random_tensor((1, 2, 400, 8), dtype, s, outliers=False) for s in range(3))
    slopes = torch.tensor([1.0, 0.01], dtype=dtype)
    check_attention(q, k, v, alibi_slopes=slopes, key_lengths=torch.tensor([20]), is_causal=True)
    check_attention(q, k, v, alibi_slopes=slopes, window_size=(5, 5), prefix_length=1)
    check_attention(q, k, v, alibi_slopes=slopes, is_causal=True)


def test_alibi_weights_fall_with_distance():
    x = torch.zeros(1, 8, 5, 4)
    weights = attnjourney.attention_weights(x, x, alibi_slopes=attnjourney.alibi_slopes(8), is_causal=True)
    assert (weights[0, :, 4].diff() > 0).all()
    torch.testing.assert_close(weights[0, 0, 1, 0] / weights[0, 0, 1, 1], torch.tensor(math.exp(-0.5)))


# ------------------------------------------------------------------------------------------- the mask's gradient


def test_a_table_of_relative_positions():
    n = 8
    index = torch.arange(n)[:, None] - torch.arange(n) + n
    q, k, v = (random_tensor((2, 3, n, 4), torch.float64, s) for s in range(3))
    table = random_tensor((2 * n,), torch.float64, 4).requires_grad_()
    torch.autograd.gradcheck(lambda t: attention(q, k, v, t[index]), table)


@pytest.mark.parametrize("shape", ((130, 130), (3, 1, 130), (2, 1, 1, 130), (1, 3, 130, 1), (1, 1)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_gradient_of_a_broadcast_mask_takes_no_full_buffer(shape, dtype):
    q, k, v = (random_tensor((2, 3, 130, 8), dtype, s, outliers=False) for s in range(3))
    mask = random_tensor(shape, torch.float32, 4, outliers=False).requires_grad_()
    out = attention(q, k, v, mask)
    with torch.profiler.profile(profile_memory=True) as profile:
        grad = torch.autograd.grad(out.sum(), mask)[0]
    largest = max(e.cpu_memory_usage for e in profile.events())
    assert grad.shape == mask.shape and largest < 4 * 2 * 3 * 130 * 130


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "options, error, pattern",
    [
        (dict(causal_alignment="middle"), ValueError, "causal_alignment.*bottom_right.*middle"),
        (dict(window_size=(-2, 0)), ValueError, "window_size.*-2"),
        (dict(prefix_length=-1), ValueError, "prefix_length.*-1"),
        (dict(softcap=-1.0), ValueError, "softcap.*-1"),
        (dict(softcap=math.nan), ValueError, "softcap.*nan"),
        (dict(key_lengths=torch.tensor([1])), ValueError, r"key_lengths.*\(2,\).*\(1,\)"),
        (dict(key_lengths=torch.tensor([1, 8])), ValueError, "key_lengths.*0 to 7.*8"),
        (dict(query_lengths=torch.tensor([-1, 2])), ValueError, "query_lengths.*0 to 5.*-1"),
        (dict(query_lengths=torch.tensor([1.0, 2.0])), RuntimeError, "query_lengths.*int64.*float32"),
        (dict(sinks=torch.ones(3)), ValueError, r"sinks.*\(4,\).*\(3,\)"),
        (dict(sinks=torch.ones(4).double()), RuntimeError, "sinks.*float32.*float64"),
        (dict(alibi_slopes=torch.ones(3, 4)), ValueError, r"alibi_slopes.*\(2, 4\).*\(3, 4\)"),
    ],
)
def test_wrong_arguments(options, error, pattern):
    q, k = torch.ones(2, 4, 5, 8), torch.ones(2, 4, 7, 8)
    with pytest.raises(error, match=pattern):
        attention(q, k, k, **options)

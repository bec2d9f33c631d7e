"""Which keys a row sees: causal, bool and float masks, their broadcasting, and all of them together."""

import math

import pytest
import torch

from tests.support.testing import (
    DTYPES,
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    ULPS,
    assert_close_to_reference,
    attention_and_gradients,
    check_attention,
    pairs,
    plain_run,
    random_tensor,
    reference_attention,
    reference_run,
    row_id,
)

ops = torch.ops.attnjourney


def inputs(dtype=torch.float32, q_len=9, kv_len=21, q_heads=4, kv_heads=4, batch=3, dim=8, outliers=True):
    return (
        random_tensor((batch, q_heads, q_len, dim), dtype, 1, outliers=outliers),
        random_tensor((batch, kv_heads, kv_len, dim), dtype, 2, outliers=outliers),
        random_tensor((batch, kv_heads, kv_len, dim), dtype, 3, outliers=outliers),
    )


def seen(q_len, kv_len, mask=None, dtype=torch.float32, **options):
    """(q_len, kv_len) bool: the keys with a weight, read from one-hot values."""
    q, k = torch.zeros(q_len, 4, dtype=dtype), torch.zeros(kv_len, 4, dtype=dtype)
    return attention_and_gradients(q, k, torch.eye(kv_len, dtype=dtype), mask, **options).out > 0


# ---------------------------------------------------------------------------------------------------- causal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_is_top_left_for_every_pair_of_lengths(dtype):
    for q_len in range(1, 10):
        for kv_len in range(1, 21):
            expected = torch.tensor([[j <= i for j in range(kv_len)] for i in range(q_len)])
            assert torch.equal(seen(q_len, kv_len, dtype=dtype, is_causal=True), expected), (q_len, kv_len)
    for q_len, kv_len in ((64, 65), (65, 64), (130, 67), (67, 130), (200, 3), (3, 200)):
        expected = torch.arange(kv_len) <= torch.arange(q_len)[:, None]
        assert torch.equal(seen(q_len, kv_len, dtype=dtype, is_causal=True), expected), (q_len, kv_len)


def test_one_causal_query_sees_the_first_key():
    q, k, v = inputs(q_len=1, kv_len=8)
    torch.testing.assert_close(attention_and_gradients(q, k, v, is_causal=True).out, v[..., :1, :])


def test_last_row_of_a_causal_run_is_not_a_causal_run_of_the_last_row():
    q, k, v = inputs(q_len=21)
    whole = attention_and_gradients(q, k, v, is_causal=True).out
    torch.testing.assert_close(whole[..., -1:, :], attention_and_gradients(q[..., -1:, :], k, v).out)
    torch.testing.assert_close(attention_and_gradients(q[..., -1:, :], k, v, is_causal=True).out, v[..., :1, :])


def test_rows_past_the_last_key_see_every_key():
    q, k, v = inputs(q_len=10, kv_len=4)
    causal, full = attention_and_gradients(q, k, v, is_causal=True), attention_and_gradients(q, k, v)
    torch.testing.assert_close(causal.out[..., 3:, :], full.out[..., 3:, :])


@pytest.mark.parametrize("with_mask", (False, True))
@pytest.mark.parametrize("with_dropout", (False, True))
@pytest.mark.parametrize("rank", (2, 3, 4))
def test_no_gradient_reaches_the_future(with_mask, with_dropout, rank):
    q, k, v = (t[(0,) * (4 - rank)] for t in inputs(q_len=12, kv_len=12))
    mask = torch.zeros(12, 12) if with_mask else None
    options = {"dropout_p": 0.5, "dropout_seed": 3} if with_dropout else {}
    for row in (0, 5, 11):
        grad_out = torch.zeros_like(q)
        grad_out[..., row, :] = 1
        result = attention_and_gradients(q, k, v, mask, is_causal=True, grad_out=grad_out, **options)
        assert not result.grad_key[..., row + 1 :, :].any() and not result.grad_value[..., row + 1 :, :].any()
        assert result.grad_value[..., : row + 1, :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ("bool", "float", "float32"))
@pytest.mark.parametrize("q_len, kv_len", [(70, 70), (40, 100), (100, 40)])
def test_causal_and_mask_compose(dtype, kind, q_len, kv_len):
    q, k, v = inputs(dtype, q_len, kv_len, 2, 2, 2)
    shown = random_tensor((2, 1, q_len, kv_len), seed=5, outliers=False) > -0.5
    mask = shown
    if kind != "bool":
        mask_dtype = dtype if kind == "float" else torch.float32
        mask = random_tensor(shown.shape, mask_dtype, 6).masked_fill(~shown, -math.inf)
    both = check_attention(q, k, v, mask, is_causal=True)
    causal = torch.ones(q_len, kv_len, dtype=torch.bool).tril()
    one = mask & causal if kind == "bool" else mask.masked_fill(~causal, -math.inf)
    composed = check_attention(q, k, v, one)
    if dtype != torch.bfloat16:  # which may take another kernel for more visible keys
        for name in ("out", "grad_query", "grad_key", "grad_value"):
            torch.testing.assert_close(getattr(both, name), getattr(composed, name))
    assert kind == "bool" or not both.grad_attn_mask.masked_select(~(shown & causal)).any()


def test_causal_and_padding_leave_ignored_keys_without_weight():
    q, k, v = (random_tensor((1, 13, 7, 37), seed=s) for s in range(3))
    padding = torch.tensor([0, 1, 1, 0, 0, 1, 0], dtype=torch.bool)
    result = check_attention(q, k, v, padding.view(1, 1, 1, 7), is_causal=True)
    assert not result.out[:, :, 0].any() and (result.lse[:, :, 0] == -math.inf).all()  # no key is left for row 0
    assert torch.equal(
        seen(7, 7, padding.view(1, 7), is_causal=True), torch.ones(7, 7, dtype=torch.bool).tril() & padding
    )


def test_signature_of_an_inverted_mask():
    # (scaled scores of four tokens) -> their causal weights, known numbers
    scores = torch.tensor(
        [
            [-0.012167113, -0.55046248, -0.37711906, 0.39070404],
            [0.3097055, -0.17063819, -0.31822443, -0.48890033],
            [-0.088825345, 0.17663771, 0.49089196, -0.4052847],
            [-0.2706871, 0.59133291, 0.0097594587, 0.29229057],
        ]
    )
    expected = torch.tensor(
        [
            [1.0, 0, 0, 0],
            [0.617829, 0.382171, 0, 0],
            [0.2445246, 0.3188685, 0.4366069, 0],
            [0.1550976, 0.3672617, 0.2053059, 0.2723348],
        ]
    )
    eye = torch.eye(4)
    for mask, is_causal in ((None, True), (torch.ones(4, 4, dtype=torch.bool).tril(), False)):
        torch.testing.assert_close(
            attention_and_gradients(2 * scores, eye, eye, mask, is_causal=is_causal).out, expected, atol=1e-6, rtol=1e-6
        )


# ---------------------------------------------------------------------------------------------------- broadcasting


SHAPES = (
    (4, 3, 9, 21), (1, 3, 9, 21), (4, 1, 9, 21), (1, 1, 9, 21), (4, 3, 1, 21), (4, 3, 9, 1), (1, 1, 1, 21),
    (4, 1, 1, 21), (1, 1, 9, 1), (4, 3, 1, 1), (1, 1, 1, 1), (3, 9, 21), (1, 9, 21), (3, 1, 21), (3, 9, 1), (1, 1, 21),
    (9, 21), (1, 21), (9, 1), (1, 1),
)  # fmt: skip


@pytest.mark.parametrize("row", pairs(shape=SHAPES, kind=("bool", "float", "float32"), dtype=DTYPES), ids=row_id)
def test_a_broadcast_mask_equals_its_copy(row):
    q, k, v = inputs(row["dtype"], q_heads=3, kv_heads=3, batch=4)
    mask = random_tensor(row["shape"], torch.float32 if row["kind"] == "float32" else row["dtype"], 5)
    if row["kind"] == "bool":
        mask = mask > -0.5
    small = check_attention(q, k, v, mask)
    full = mask.expand(4, 3, 9, 21)
    assert torch.equal(small.out, attention_and_gradients(q, k, v, full).out)  # through stride 0
    large = attention_and_gradients(q, k, v, full.contiguous())
    for name in ("out", "lse", "grad_query", "grad_key", "grad_value"):
        assert torch.equal(getattr(small, name), getattr(large, name)), name
    if row["kind"] != "bool":
        assert small.grad_attn_mask.shape == mask.shape


@pytest.mark.parametrize("kind", ("bool", "float"))
@pytest.mark.parametrize("shape", [(3, 1, 8, 8), (3, 8, 8, 8), (8, 1, 8), (1, 8, 1, 8)])
def test_grouped_heads_take_a_mask_per_query_head(kind, shape):
    q, k, v = random_tensor((3, 8, 8, 64)), random_tensor((3, 2, 8, 64), seed=1), random_tensor((3, 2, 8, 64), seed=2)
    mask = random_tensor(shape, seed=3)
    if kind == "bool":
        mask = mask > -0.5
    check_attention(q, k, v, mask, enable_gqa=True)
    check_attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), mask)


def test_a_mask_per_item_when_batch_equals_kv_heads():
    q, k, v = random_tensor((2, 4, 5, 8)), random_tensor((2, 2, 9, 8), seed=1), random_tensor((2, 2, 9, 8), seed=2)
    mask = random_tensor((2, 1, 5, 9), seed=3)
    together = check_attention(q, k, v, mask, enable_gqa=True).out
    for item in range(2):
        alone = attention_and_gradients(*(t[item] for t in (q, k, v)), mask[item], enable_gqa=True).out
        assert torch.equal(together[item], alone)


def test_a_3d_mask_is_per_head_even_when_batch_equals_heads():
    q, k, v = inputs(q_heads=3, kv_heads=3)
    mask = random_tensor((3, 9, 21), seed=5)
    assert torch.equal(
        attention_and_gradients(q, k, v, mask).out, attention_and_gradients(q, k, v, mask.expand(3, 3, 9, 21)).out
    )


def test_a_2d_mask_is_queries_by_keys_even_when_batch_equals_queries():
    q, k, v = inputs(q_len=3, kv_len=5)
    mask = random_tensor((3, 5), seed=5)
    check_attention(q, k, v, mask)
    with pytest.raises(ValueError, match=r"attn_mask.*\(3, 5\)"):
        ops.attention_forward(*inputs(q_len=4, kv_len=5), mask)


# ---------------------------------------------------------------------------------------------------- meanings


def test_the_same_matrix_as_bool_and_as_float():
    x = random_tensor((1, 1, 8, 8))
    matrix = torch.zeros(1, 1, 8, 8)
    matrix[..., :4, :4] = random_tensor((4, 4), seed=2)
    check_attention(x, x, x, matrix)
    added = check_attention(x, x, x, (matrix != 0).float()).out
    kept = check_attention(x, x, x, matrix != 0).out
    assert not kept[..., 4:, :].any() and added[..., 4:, :].any()
    expected, _ = reference_attention(x[..., :4, :], x[..., :4, :], x[..., :4, :])
    torch.testing.assert_close(kept[..., :4, :], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minus_infinity_hides_as_false_does(dtype):
    q, k, v = inputs(dtype)
    shown = random_tensor((9, 21), seed=5) > 0
    shown[3] = False
    hidden = torch.zeros(9, 21, dtype=dtype).masked_fill(~shown, -math.inf)
    first, second = (check_attention(q, k, v, m) for m in (shown, hidden))
    for name in ("out", "lse", "grad_query", "grad_key", "grad_value"):
        x, y = getattr(first, name), getattr(second, name)
        assert torch.equal(x == 0, y == 0) and torch.equal(x.isinf(), y.isinf()), name


def test_scale_does_not_reach_the_mask():
    q, k, v = (random_tensor((1, 1, n, 4), torch.float64, n) for n in (4, 6, 6))
    mask = random_tensor((4, 6), torch.float64, 5)
    expected = (q @ k.mT * 0.125 + mask).softmax(-1) @ v
    torch.testing.assert_close(attention_and_gradients(q, k, v, mask, scale=0.125).out, expected)


# ---------------------------------------------------------------------------------------------------- hidden blocks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ("bool", "-inf", "min"))
@pytest.mark.parametrize("hidden", (1, 16, 64, 128, 300))
def test_first_keys_hidden(dtype, kind, hidden):
    # the online softmax must not divide by, or subtract, what an empty first block leaves
    q, k, v = inputs(dtype, 19, 441 if hidden > 64 else 150, 1, 1, 1, 16, outliers=False)
    mask = torch.zeros(1, k.size(-2), dtype=dtype)
    mask[:, :hidden] = {"bool": 1, "-inf": -math.inf, "min": torch.finfo(dtype).min}[kind]
    grad_out = random_tensor(q.shape, dtype, 4)
    result = attention_and_gradients(q, k, v, mask == 0 if kind == "bool" else mask, grad_out=grad_out)
    rest = attention_and_gradients(q, k[..., hidden:, :], v[..., hidden:, :], grad_out=grad_out)
    tolerance = dict(atol=16 * torch.finfo(dtype).eps, rtol=16 * torch.finfo(dtype).eps)
    torch.testing.assert_close(result.out, rest.out, **tolerance)
    torch.testing.assert_close(result.lse, rest.lse)
    torch.testing.assert_close(result.grad_query, rest.grad_query, **tolerance)
    for got, expected in ((result.grad_key, rest.grad_key), (result.grad_value, rest.grad_value)):
        # exp of the smallest number may come out as the smallest number of the dtype
        assert got[..., :hidden, :].abs().max() <= (1e-30 if kind == "min" else 0)
        torch.testing.assert_close(got[..., hidden:, :], expected, **tolerance)


@pytest.mark.parametrize("n", (511, 512, 513, 640))
def test_band_whose_early_blocks_are_hidden(n):
    x = torch.ones(n, 2)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    band = (distance >= 0) & (distance < 10)
    check_attention(x, x, random_tensor((n, 2)), torch.zeros(n, n).masked_fill(~band, -math.inf))
    check_attention(x, x, random_tensor((n, 2)), band)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_hidden_keys_anywhere_in_the_row(dtype):
    # one visible key, or one visible block, wandering through the row
    q, k, v = inputs(dtype, 5, 270, 1, 1, 1)
    for start in range(0, 270, 13):
        for width in (1, 40):
            shown = (torch.arange(270) >= start) & (torch.arange(270) < start + width)
            check_attention(q, k, v, shown.view(1, 270))


@pytest.mark.parametrize("length", (1023, 1025))
def test_position_score_and_causal(length):
    q, k, v = (random_tensor((1, 1, length, 16), seed=s) for s in range(3))
    position = (torch.arange(length)[:, None] - torch.arange(length)).float()
    result = check_attention(q, k, v, position, is_causal=True)
    assert all(
        getattr(result, n).isfinite().all()
        for n in ("out", "lse", "grad_query", "grad_key", "grad_value", "grad_attn_mask")
    )


# -------------------------------------------------------------------------------------------- the smallest number


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
def test_smallest_number_everywhere_gives_the_mean(dtype):
    # finfo.min is an ordinary number: every key weighs the same
    q, k, v = inputs(dtype, outliers=False)
    mask = torch.full((9, 21), torch.finfo(dtype).min, dtype=dtype)
    result = attention_and_gradients(q, k, v, mask)
    torch.testing.assert_close(
        result.out.double(), v.double().mean(-2, keepdim=True).expand(3, 4, 9, 8), atol=1e-2, rtol=1e-2
    )
    for name in ("grad_query", "grad_key", "grad_value", "grad_attn_mask"):
        assert getattr(result, name).isfinite().all(), name


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
def test_smallest_number_in_one_row_spoils_no_other(dtype):
    q, k, v = inputs(dtype)
    mask = random_tensor((9, 21), dtype, 5)
    mask[4] = torch.finfo(dtype).min
    grad_out = random_tensor(q.shape, dtype, 6)
    grad_out[..., 4, :] = 0
    result = attention_and_gradients(q, k, v, mask, grad_out=grad_out)
    others = [i for i in range(9) if i != 4]
    rest, grad_rest = (q[..., others, :], k, v, mask[others]), grad_out[..., others, :]
    exact = reference_run(rest, grad_rest, None, None)
    plain, roundings = plain_run(rest, grad_rest, None, None, ULPS)
    names = ("out", "lse", "grad_query", "grad_key", "grad_value")
    for name, same_dtype, wide, rounding in zip(names, plain, exact, roundings):
        actual = getattr(result, name)
        if name in ("out", "grad_query"):
            actual = actual[..., others, :]
        elif name == "lse":
            actual = actual[..., others]
        factor = OUTPUT_FACTOR if name in ("out", "lse") else GRADIENT_FACTOR
        assert_close_to_reference(actual, same_dtype, wide, factor, name, rounding)


def test_sum_of_two_smallest_numbers_is_minus_infinity_and_hides():
    lowest = torch.finfo(torch.bfloat16).min
    causal = torch.zeros(8, 8, dtype=torch.bfloat16).masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), lowest)
    padding = torch.zeros(1, 8, dtype=torch.bfloat16)
    padding[:, 5:] = lowest
    q, k, v = (random_tensor((2, 8, 4), torch.bfloat16, s) for s in range(3))
    both = causal + padding
    assert (both == -math.inf).any()
    shown = (causal == 0) & (padding == 0)
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        torch.testing.assert_close(
            getattr(attention_and_gradients(q, k, v, both), name),
            getattr(attention_and_gradients(q, k, v, shown), name),
        )


def test_large_finite_bias_is_not_a_mask():
    q, k, v = inputs()
    for bias in (-10000.0, 10000.0, -1e30, 1e30):
        mask = torch.zeros(1, 21)
        mask[:, 3] = bias
        expected, _ = reference_attention(q, k, v, mask)
        torch.testing.assert_close(attention_and_gradients(q, k, v, mask).out, expected, atol=2e-2, rtol=0)


# ---------------------------------------------------------------------------------------------------- size


@pytest.mark.parametrize("kind", ("bool", "bfloat16"))
def test_mask_of_more_than_2_to_the_31_elements(kind):
    # the last 4 rows of a 46342 x 46342 mask, whose storage is addressed but mostly never touched
    n, rows = 46342, 4
    dtype = torch.bool if kind == "bool" else torch.bfloat16
    storage = torch.empty(n * n, dtype=dtype)
    mask = storage.view(n, n)
    visible = torch.arange(n) <= torch.arange(n - rows, n)[:, None]
    mask[-rows:] = visible if kind == "bool" else torch.zeros(rows, n).masked_fill(~visible, -math.inf).to(dtype)
    wide = mask.as_strided((2, n), ((n - 1) * n, 1))  # rows 0 and n - 1, one row stride above 2^31 apart
    wide[0] = True if kind == "bool" else 0
    q, k, v = (random_tensor((m, 8), torch.float32 if kind == "bool" else dtype, s) for s, m in enumerate((rows, n, n)))
    expected, _ = reference_attention(q.double(), k.double(), v.double(), visible)
    out, _, _ = ops.attention_forward(q, k, v, mask[-rows:])
    assert (out - expected).abs().max() < (1e-4 if kind == "bool" else 0.3)
    expected, _ = reference_attention(
        q[:2].double(), k.double(), v.double(), torch.stack([torch.ones(n), visible[-1]]) > 0
    )
    out, _, _ = ops.attention_forward(q[:2], k, v, wide)
    assert (out - expected).abs().max() < (1e-4 if kind == "bool" else 0.3)

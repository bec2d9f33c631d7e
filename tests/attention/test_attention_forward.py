"""Values of `attention`: all options crossed by pairs, forward and gradients in one go; lengths, layouts, extremes."""

import math

import pytest
import torch

from tests.support.testing import (
    DTYPES,
    LAYOUTS,
    attention_and_gradients,
    check_attention,
    expanded,
    pairs,
    random_tensor,
    reference_attention,
    row_id,
)

HEAD_DIMS = (1, 2, 3, 7, 8, 16, 31, 32, 64, 80, 96, 128, 192, 256, 300)
# name -> heads and last batch size of query, key, value; enable_gqa
SHARING = {
    "equal": ((2, 2, 2), (2, 2, 2), False),
    "gqa_8_1": ((8, 1, 1), (2, 2, 2), True),
    "gqa_6_2": ((6, 2, 2), (2, 2, 2), True),
    "gqa_6_k2_v3": ((6, 2, 3), (2, 2, 2), True),
    "broadcast_kv_heads": ((3, 1, 1), (2, 2, 2), False),
    "broadcast_q_heads": ((1, 3, 3), (2, 2, 2), False),
    "broadcast_v_heads": ((3, 3, 1), (2, 2, 2), False),
    "broadcast_kv_batch": ((2, 2, 2), (2, 1, 1), False),
    "broadcast_q_batch": ((2, 2, 2), (1, 2, 2), False),
    "gqa_broadcast_kv_batch": ((4, 2, 2), (2, 1, 1), True),
}
# the mask's dimensions, right-aligned: b batch, h heads, l queries, s keys, 1 broadcast
MASK_SHAPES = ("ls", "1s", "l1", "hls", "h1s", "bhls", "b11s", "1h1s", "b1ls", "bhl1")


def qkv(lead_q, lead_k, lead_v, q_len, kv_len, head_dim, v_head_dim, dtype, layouts=("contiguous",) * 3, outliers=True):
    return (
        random_tensor((*lead_q, q_len, head_dim), dtype, 1, layouts[0], outliers),
        random_tensor((*lead_k, kv_len, head_dim), dtype, 2, layouts[1], outliers),
        random_tensor((*lead_v, kv_len, v_head_dim), dtype, 3, layouts[2], outliers),
    )


def make_mask(kind, dims, sizes, layout, dtype):
    """kind: bool, float (of dtype) or float32. Some keys are hidden; row 1 sees none if the mask has several rows."""
    shape = tuple(1 if d == "1" else sizes[d] for d in dims if d in sizes or d == "1")
    shown = random_tensor(shape, torch.float64, 5, outliers=False) > -0.5
    if shape[-2] > 1:
        shown[..., 1, :] = False
    if kind == "bool":
        return LAYOUTS[layout](shown) if layout in ("contiguous", "transposed", "columns") else shown
    bias = random_tensor(shape, dtype if kind == "float" else torch.float32, 6).masked_fill(~shown, -math.inf)
    return LAYOUTS[layout](bias)


GRID = pairs(
    head_dim=HEAD_DIMS,
    lengths=[
        (1, 1), (1, 7), (5, 3), (3, 17), (16, 16), (17, 33), (31, 64), (33, 31), (64, 65), (65, 15), (2, 129), (40, 5),
        (0, 4), (4, 0), (70, 70),
    ],
    sharing=list(SHARING),
    mask_shape=MASK_SHAPES,
    v_head_dim=("same", 1, 5, 24, 33, 64, 136),
    layout_q=list(LAYOUTS),
    layout_k=list(LAYOUTS),
    layout_v=list(LAYOUTS),
    mask_layout=("contiguous", "transposed", "columns", "stepped_rows", "offset"),
    rank=(2, 3, 4, 5, 6),
    mask=("none", "bool", "float", "float32"),
    dtype=DTYPES,
    scale=(None, 0.3, -0.2, 0.0),
    is_causal=(False, True),
    outliers=(False, True),
)  # fmt: skip


@pytest.mark.parametrize("row", GRID, ids=row_id)
def test_values_and_gradients(row):
    heads, batches, enable_gqa = SHARING[row["sharing"]]
    rank, dtype, (q_len, kv_len) = row["rank"], row["dtype"], row["lengths"]

    def lead(i):
        return {2: (), 3: (heads[i],), 4: (batches[i], heads[i]), 5: (1, batches[i], heads[i])}.get(
            rank, (batches[i], 1, 1, heads[i])
        )

    v_head_dim = row["head_dim"] if row["v_head_dim"] == "same" else row["v_head_dim"]
    layouts = (row["layout_q"], row["layout_k"], row["layout_v"])
    q, k, v = qkv(
        lead(0), lead(1), lead(2), q_len, kv_len, row["head_dim"], v_head_dim, dtype, layouts, row["outliers"]
    )
    mask = None
    if row["mask"] != "none":
        sizes = {"l": q_len, "s": kv_len}
        if rank >= 3:
            sizes["h"] = max(heads)
        if rank >= 4:
            sizes["b"] = max(batches) if rank == 4 else 1 if rank == 6 else 2
        dims = row["mask_shape"][-rank:]
        mask = make_mask(row["mask"], dims, sizes, row["mask_layout"], dtype)
    check_attention(q, k, v, mask, scale=row["scale"], is_causal=row["is_causal"], enable_gqa=enable_gqa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_residue_of_the_lengths(dtype):
    # L and S walk through 1..70 in different order, so that every residue modulo any tile occurs, on several heads
    for n in range(1, 71):
        q_len, kv_len, dim = n, n * 37 % 71, (5, 8, 16, 40)[n % 4]
        q, k, v = qkv((2,), (2,), (2,), q_len, kv_len, dim, dim, dtype)
        check_attention(q, k, v, is_causal=n % 2 == 0)
        q, k, v = qkv((2,), (2,), (2,), kv_len, q_len, dim, dim + 1, dtype)
        check_attention(q, k, v, is_causal=n % 3 == 0)


@pytest.mark.parametrize(
    "row",
    pairs(
        lengths=[
            (127, 255),
            (128, 128),
            (129, 127),
            (197, 197),
            (255, 513),
            (256, 129),
            (257, 256),
            (513, 257),
            (600, 128),
        ],
        head_dim=(32, 64, 80),
        dtype=DTYPES,
        mask=("none", "bool", "float"),
        is_causal=(False, True),
    ),
    ids=row_id,
)
def test_longer_than_a_tile(row):
    q_len, kv_len = row["lengths"]
    q, k, v = qkv((2,), (2,), (2,), q_len, kv_len, row["head_dim"], row["head_dim"], row["dtype"])
    mask = None
    if row["mask"] != "none":
        mask = make_mask(row["mask"], "ls", {"l": q_len, "s": kv_len}, "contiguous", row["dtype"])
    check_attention(q, k, v, mask, is_causal=row["is_causal"])


@pytest.mark.parametrize("q_len, kv_len", [(1025, 1025), (3, 1025), (1025, 2)])
def test_longest(q_len, kv_len):
    q, k, v = qkv((), (), (), q_len, kv_len, 16, 16, torch.float32)
    check_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("head_dim", (64, 96, 128))
def test_few_queries_on_any_number_of_keys(head_dim):
    for kv_len in range(1, 131):
        q, k, v = qkv((2,), (1,), (1,), 1 + kv_len % 8, kv_len, head_dim, head_dim, torch.float32)
        check_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
def test_layout_changes_no_bit(dtype, layout):
    shapes = (2, 3, 9, 8), (2, 3, 21, 8), (2, 3, 21, 12)
    dense = [random_tensor(s, dtype, i) for i, s in enumerate(shapes)]
    strided = [random_tensor(s, dtype, i, layout) for i, s in enumerate(shapes)]
    expected, got = attention_and_gradients(*dense), attention_and_gradients(*strided)
    for name in ("out", "lse", "grad_query", "grad_key", "grad_value"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


@pytest.mark.parametrize("dim", (0, 1, 2, 3))
def test_expanded_inputs(dim):
    q, k, v = (expanded(t, dim) for t in qkv((2, 3), (2, 3), (2, 3), 5, 9, 8, 8, torch.float32))
    check_attention(q, k, v)
    check_attention(q, k.contiguous(), v, is_causal=True)


def test_one_key_value_head_expanded_to_sixteen():
    q = random_tensor((1, 16, 1, 128))
    k, v = (random_tensor((1, 1, 16, 128), seed=s).expand(1, 16, 16, 128) for s in (1, 2))
    check_attention(q, k, v, torch.ones(1, 1, 1, 16, dtype=torch.bool))


@pytest.mark.parametrize("kv_len", (31, 32, 33, 34, 63, 64, 65, 66))
def test_expanded_wide_head_with_outliers(kv_len):
    k = random_tensor((1, 1, kv_len, 512), torch.bfloat16, 1).expand(1, 2, kv_len, 512)
    v = (
        random_tensor((1, 1, kv_len, 512), torch.bfloat16, 2)
        * torch.where(torch.arange(512) % 97 == 0, 300, 0.01).bfloat16()
    )
    q = random_tensor((1, 2, 3, 512), torch.bfloat16, 3)
    check_attention(q, k, v.expand(1, 2, kv_len, 512), torch.ones(1, 1, 3, kv_len, dtype=torch.bool))


@pytest.mark.parametrize("head_dim", (32, 64, 100, 128))
def test_permuted_tiny_sequence(head_dim):
    for length in range(1, 9):
        q, k, v = (random_tensor((12, length, 3, head_dim), seed=s).permute(0, 2, 1, 3) for s in range(3))
        check_attention(q, k, v)


def test_rows_cut_from_a_longer_tensor():
    q = random_tensor((1, 4, 40, 16))
    k, v = (random_tensor((1, 4, 40, 16), seed=s) for s in (1, 2))
    k[:, :, -3:], v[:, :, -3:] = math.nan, math.nan
    check_attention(q, k[:, :, :-3], v[:, :, :-3])


# ---------------------------------------------------------------------------------------------------- special values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", (False, True))
def test_large_scores(dtype, is_causal):
    # scores of about +-1e4: one key takes all the weight, and no exponential may overflow
    q, k, v = (random_tensor((2, n, 16), dtype, n, outliers=False) for n in (37, 75, 75))
    for scale in (1e4 / 15, -1e4 / 15):
        check_attention(q, k, v, scale=scale, is_causal=is_causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiny_scores_and_equal_scores_give_the_mean(dtype):
    q, k, v = qkv((2,), (2,), (2,), 9, 75, 16, 8, dtype)
    for scale in (1e-30, 0.0):
        out = check_attention(q, k, v, scale=scale).out
        mean = v.double().mean(-2, keepdim=True).expand(out.shape)
        assert (out.double() - mean).abs().max() <= 4 * torch.finfo(dtype).eps * v.abs().max()
    check_attention(torch.zeros_like(q), k, v)
    check_attention(torch.ones_like(q), torch.ones_like(k), torch.ones_like(v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", (-80.0, 80.0, -1000.0, 1000.0))
@pytest.mark.parametrize("block", (8, 64, 128))
def test_first_keys_far_below_or_above_the_rest(dtype, shift, block):
    # the running maximum moves by `shift` after `block` keys
    q, k, v = qkv((1,), (1,), (1,), 5, 2 * block + 3, 8, 8, dtype)
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[..., :block, 0] = shift
    check_attention(q, k, v, scale=1.0)
    rising = torch.arange(k.size(-2)).to(dtype) * (shift / 100)  # a new maximum at every key
    k[..., 0] = rising
    check_attention(q, k, v, scale=1.0)


def test_huge_equal_values_in_bfloat16():
    for keys in (1, 3, 70):
        x = torch.full((1, 1, keys, 64), 133120.0, dtype=torch.bfloat16)
        for q in (x, -x):
            assert torch.equal(attention_and_gradients(q, x, x).out, x)


def test_float16_scores_above_its_range():
    q = (
        torch.full((1, 1, 8, 64), 576.0, dtype=torch.float16)
        * random_tensor((8, 1), torch.float16, 1, outliers=False).sign()
    )
    k = random_tensor((1, 1, 19, 64), torch.float16, 2, outliers=False).clamp(-3.8, 3.8) * 100
    v = random_tensor((1, 1, 19, 64), torch.float16, 3)
    result = check_attention(q, k, v)
    assert all(t.isfinite().all() for t in (result.out, result.grad_query, result.grad_key, result.grad_value))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_sees_one_key_returns_its_value(dtype):
    q, k, v = qkv((3,), (3,), (3,), 20, 20, 16, 24, dtype)
    only = torch.eye(20, dtype=torch.bool)[torch.randperm(20, generator=torch.Generator().manual_seed(0))]
    expected = torch.einsum("ls,hse->hle", only.to(torch.float64), v.double())
    for mask in (only, torch.where(only, 0.5, -math.inf).to(dtype)):
        out = attention_and_gradients(q, k, v, mask).out.double()
        tolerance = 0 if dtype.itemsize == 2 else 2 * torch.finfo(dtype).eps
        assert ((out - expected).abs() <= tolerance * expected.abs()).all()
    one = attention_and_gradients(q, k, v, is_causal=True).out[:, 0]
    assert torch.equal(one, v[:, 0]) or dtype.itemsize > 2


def test_minus_zero_counts_as_zero():
    q, k, v = qkv((2,), (2,), (2,), 5, 9, 8, 8, torch.float32)
    assert torch.equal(
        attention_and_gradients(q, k, v, torch.full((5, 9), -0.0)).out,
        attention_and_gradients(q, k, v, torch.zeros(5, 9)).out,
    )
    zero = torch.zeros_like(q)
    assert torch.equal(attention_and_gradients(-zero, k, v).out, attention_and_gradients(zero, k, v).out)


def test_no_fast_exponential_in_wide_dtypes():
    q, k, v = (random_tensor((1, 2, 300, 16), torch.float64, s, outliers=False) for s in range(3))
    reference, lse = reference_attention(q, k, v)
    result = attention_and_gradients(q, k, v)
    assert (result.out - reference).abs().max() < 1e-14 and (result.lse - lse).abs().max() < 1e-13
    q, k, v = (t.float() for t in (q, k, v))
    reference, lse = reference_attention(q.double(), k.double(), v.double())
    result = attention_and_gradients(q, k, v)
    assert (result.out - reference).abs().max() < 2e-6 and (result.lse - lse).abs().max() < 2e-6


# ---------------------------------------------------------------------------------------------------- sizes of 0


@pytest.mark.parametrize(
    "lead_q, lead_kv, q_len, kv_len",
    [
        ((0, 2), (0, 2), 3, 4), ((2, 0), (2, 0), 3, 4), ((0, 0), (0, 0), 0, 0), ((0, 2), (1, 2), 3, 4),
        ((1, 2), (0, 2), 3, 4), ((2, 2), (2, 2), 0, 4), ((2, 2), (2, 2), 3, 0), ((0,), (0,), 3, 4), ((), (), 0, 4),
        ((), (), 4, 0), ((), (), 0, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
def test_sizes_of_zero(lead_q, lead_kv, q_len, kv_len, options):
    if options.get("enable_gqa") and lead_q[-1:] != lead_kv[-1:]:
        pytest.skip("grouped heads must divide")
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = qkv(lead_q, lead_kv, lead_kv, q_len, kv_len, 8, 6, dtype)
        result = check_attention(q, k, v, **options)
        assert not result.out.any() and (result.lse == -math.inf).all()
        assert all(not g.any() for g in (result.grad_query, result.grad_key, result.grad_value))
        mask = torch.zeros(q_len, kv_len, dtype=dtype)
        assert check_attention(q, k, v, mask, **options).grad_attn_mask.shape == mask.shape

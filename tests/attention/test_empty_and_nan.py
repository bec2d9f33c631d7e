"""Rows that see no key are zero; NaN and infinity show exactly where they are seen."""

import math

import pytest
import torch

from tests.support.testing import DTYPES, Result, attention_and_gradients, check_attention, pairs, random_tensor, row_id

GRADIENTS = ("grad_query", "grad_key", "grad_value")


def inputs(dtype=torch.float32, q_len=9, kv_len=21, dim=8, heads=2):
    return tuple(
        random_tensor((heads, n, dim), dtype, s, outliers=False) for s, n in enumerate((q_len, kv_len, kv_len))
    )


def as_mask(shown, kind, dtype):
    """The same visibility as a bool mask, or as a float one with random numbers where it shows."""
    if kind == "bool":
        return shown
    mask_dtype = torch.float32 if kind == "float32" else dtype
    return random_tensor(shown.shape, mask_dtype, 9, outliers=False).masked_fill(~shown, -math.inf)


def assert_row_is_empty(result: Result, row):
    assert (result.out[..., row, :] == 0).all() and (result.lse[..., row] == -math.inf).all()
    assert (result.grad_query[..., row, :] == 0).all()
    if result.grad_attn_mask is not None:
        assert (result.grad_attn_mask[..., row, :] == 0).all()


# ---------------------------------------------------------------------------------------------------- no visible key


@pytest.mark.parametrize(
    "row",
    pairs(
        dtype=DTYPES,
        kind=("bool", "float", "float32"),
        empty=([0], [8], [0, 1, 2, 3], [3, 5], list(range(9))),
        kv_len=(1, 7, 64, 65, 130),
        is_causal=(False, True),
        with_lse=(False, True),
    ),
    ids=row_id,
)
def test_rows_without_a_key(row):
    dtype = row["dtype"]
    q, k, v = inputs(dtype, kv_len=row["kv_len"])
    shown = torch.ones(9, row["kv_len"], dtype=torch.bool)
    shown[row["empty"]] = False
    mask = as_mask(shown, row["kind"], dtype)
    grad_out = random_tensor(q.shape, dtype, 3)
    grad_lse = (
        random_tensor((2, 9), torch.float64 if dtype == torch.float64 else torch.float32, 4)
        if row["with_lse"]
        else None
    )
    options = dict(is_causal=row["is_causal"], grad_lse=grad_lse)
    result = check_attention(q, k, v, mask, grad_out=grad_out, **options)
    for i in row["empty"]:
        assert_row_is_empty(result, i)
    # whatever arrives at such a row goes nowhere: not even NaN
    grad_out[:, row["empty"]] = math.nan
    if grad_lse is not None:
        grad_lse[:, row["empty"]] = math.inf
    poisoned = attention_and_gradients(q, k, v, mask, grad_out=grad_out, **options)
    for name in (*GRADIENTS, *(["grad_attn_mask"] if row["kind"] != "bool" else [])):
        assert torch.equal(getattr(poisoned, name), getattr(result, name)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_query_row(dtype):
    q, k, v = (random_tensor((1, 2, n, 8), dtype, s) for s, n in enumerate((6, 10, 10)))
    shown = torch.ones(6, 10, dtype=torch.bool).tril()
    shown[5] = False
    grad_out = random_tensor(q.shape, dtype, 3)
    grad_out[..., 5, :] = 0
    result = attention_and_gradients(q, k, v, shown.view(1, 1, 6, 10), scale=0.125, grad_out=grad_out)
    rest = attention_and_gradients(q[..., :5, :], k, v, shown[:5], scale=0.125, grad_out=grad_out[..., :5, :])
    assert_row_is_empty(result, 5)
    close = dict(rtol=4 * torch.finfo(dtype).eps, atol=40 * torch.finfo(dtype).eps)
    torch.testing.assert_close(result.out[..., :5, :], rest.out, **close)
    torch.testing.assert_close(result.grad_query[..., :5, :], rest.grad_query, **close)
    torch.testing.assert_close(result.grad_key, rest.grad_key, **close)
    torch.testing.assert_close(result.grad_value, rest.grad_value, **close)


def test_a_head_and_an_item_switched_off():
    q, k, v = (random_tensor((2, 3, n, 5), seed=s) for s, n in enumerate((5, 7, 7)))
    shown = torch.ones(2, 3, 1, 1, dtype=torch.bool)
    shown[0, 2] = shown[1, 0] = False
    for mask in (shown, torch.zeros(2, 3, 1, 1).masked_fill(~shown, -math.inf)):
        result = check_attention(q, k, v, mask)
        for item, head in ((0, 2), (1, 0)):
            for name in ("out", *GRADIENTS):
                assert not getattr(result, name)[item, head].any(), name
            assert (result.lse[item, head] == -math.inf).all()


def test_every_key_hidden_and_no_keys_at_all():
    q, k, v = inputs()
    for mask in (
        torch.zeros(9, 21, dtype=torch.bool),
        torch.full((1, 1), -math.inf),
        torch.zeros(1, 1, dtype=torch.bool),
    ):
        result = attention_and_gradients(q, k, v, mask)
        assert not any(getattr(result, name).any() for name in ("out", *GRADIENTS))
    result = attention_and_gradients(q, k[:, :0], v[:, :0])
    assert not result.out.any() and (result.lse == -math.inf).all() and not result.grad_query.any()


def test_keys_nobody_sees_get_no_gradient():
    q, k, v = inputs()
    shown = torch.ones(1, 21, dtype=torch.bool)
    shown[:, 4::3] = False
    result = check_attention(q, k, v, shown)
    assert not result.grad_key[:, 4::3].any() and not result.grad_value[:, 4::3].any()
    result = attention_and_gradients(q, k, v, is_causal=True)  # keys past the last query
    assert not result.grad_key[:, 9:].any() and not result.grad_value[:, 9:].any()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_left_padded_batch_through_two_layers(dtype):
    lengths, total = (3, 5), 5
    x = random_tensor((2, 2, total, 8), dtype, outliers=False)
    keep = torch.stack([torch.arange(total) >= total - n for n in lengths])
    shown = torch.ones(total, total, dtype=torch.bool).tril() & keep[:, None, None, :]
    twice = x
    for _ in range(2):
        twice = check_attention(twice, twice, twice, shown).out
    for item, n in enumerate(lengths):
        alone = x[item, :, total - n :]
        for _ in range(2):
            alone = check_attention(alone, alone, alone, is_causal=True).out
        torch.testing.assert_close(twice[item, :, total - n :], alone)
        assert not twice[item, :, : total - n].any()


# ---------------------------------------------------------------------------------------------------- NaN and infinity

# visibility of (q_len, kv_len) and the key that is poisoned
VISIBILITY = {
    "causal": lambda i, j: j <= i,
    "column": lambda i, j: (j != 5) | (i >= 6),
    "band": lambda i, j: (j <= i) & (j > i - 4),
    "nobody": lambda i, j: (j != 5) & (i >= 0),
}


def poisoned_cases():
    return pairs(
        visible=list(VISIBILITY),
        kind=("causal", "bool", "float", "float32"),
        dtype=DTYPES,
        poison=(math.nan, math.inf, -math.inf),
        where=("key", "value", "key and value"),
        sizes=[(9, 21), (40, 33), (70, 140), (300, 260)],
    )


@pytest.mark.parametrize("row", poisoned_cases(), ids=row_id)
def test_poison_in_a_key_reaches_the_rows_that_see_it_and_no_other(row):
    if (row["kind"] == "causal") != (row["visible"] == "causal"):
        row = {**row, "kind": "bool" if row["kind"] == "causal" else row["kind"]}
    dtype, (q_len, kv_len) = row["dtype"], row["sizes"]
    q, k, v = inputs(dtype, q_len, kv_len)
    shown = VISIBILITY[row["visible"]](torch.arange(q_len)[:, None], torch.arange(kv_len))
    options = (
        {"attn_mask": None, "is_causal": True}
        if row["kind"] == "causal"
        else {"attn_mask": as_mask(shown, row["kind"], dtype)}
    )
    hurt = shown[:, 5]
    grad_out = random_tensor(q.shape, dtype, 3)
    grad_out[:, hurt] = 0
    clean = attention_and_gradients(q, k, v, grad_out=grad_out, **options)
    for name, t in (("key", k), ("value", v)):
        if name in row["where"]:
            t[1, 5] = row["poison"]
    got = attention_and_gradients(q, k, v, grad_out=grad_out, **options)

    assert torch.equal(got.out[:, ~hurt], clean.out[:, ~hurt]) and torch.equal(got.lse[:, ~hurt], clean.lse[:, ~hurt])
    assert torch.equal(got.out[0], clean.out[0])  # the other head
    assert torch.equal(got.grad_query[:, ~hurt], clean.grad_query[:, ~hurt])
    for name in GRADIENTS:
        assert torch.equal(getattr(got, name)[0], getattr(clean, name)[0]), name
    if not hurt.any():
        assert torch.equal(got.grad_key, clean.grad_key) and torch.equal(got.grad_value, clean.grad_value)
    elif math.isnan(row["poison"]) or row["where"] == "value":
        assert not got.out[1, hurt].isfinite().any()  # and it shows where it is seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ("causal", "bool", "float"))
@pytest.mark.parametrize("q_len, kv_len", [(9, 21), (70, 140), (200, 130)])
def test_poison_in_an_upstream_gradient_reaches_the_keys_its_row_sees_and_no_other(dtype, kind, q_len, kv_len):
    q, k, v = inputs(dtype, q_len, kv_len)
    shown = VISIBILITY["causal" if kind == "causal" else "band"](torch.arange(q_len)[:, None], torch.arange(kv_len))
    options = {"is_causal": True} if kind == "causal" else {"attn_mask": as_mask(shown, kind, dtype)}
    grad_out = random_tensor(q.shape, dtype, 3)
    clean = attention_and_gradients(q, k, v, grad_out=grad_out, **options)
    for poison in (math.nan, math.inf):
        grad_out[1, 7] = poison
        got = attention_and_gradients(q, k, v, grad_out=grad_out, **options)
        others, unseen = torch.arange(q_len) != 7, ~shown[7]
        assert torch.equal(got.grad_query[:, others], clean.grad_query[:, others])
        for name in ("grad_key", "grad_value"):
            assert torch.equal(getattr(got, name)[:, unseen], getattr(clean, name)[:, unseen]), name
            assert torch.equal(getattr(got, name)[0], getattr(clean, name)[0]), name
            assert not getattr(got, name)[1, ~unseen].isfinite().any(), name
        assert not got.grad_query[1, 7].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_in_a_query_row_stays_in_its_row(dtype):
    q, k, v = inputs(dtype, 70, 90)
    clean = attention_and_gradients(q, k, v)
    q[0, 40] = math.nan
    got = attention_and_gradients(q, k, v)
    others = torch.arange(70) != 40
    assert torch.equal(got.out[:, others], clean.out[:, others])
    assert torch.equal(got.grad_query[:, others], clean.grad_query[:, others])
    assert got.out[0, 40].isnan().all() and got.lse[0, 40].isnan() and torch.equal(got.out[1], clean.out[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_in_sight_is_not_taken_for_an_empty_row(dtype):
    q, k, v = (random_tensor((2, 4, 16, 8), dtype, s) for s in range(3))
    assert attention_and_gradients(torch.full_like(q, math.nan), k, v).out.isnan().all()
    one = k.clone()
    one[:, :, 11, 3] = math.nan
    result = attention_and_gradients(q, one, v)
    assert result.out.isnan().all() and result.lse.isnan().all() and result.grad_query.isnan().all()
    one = v.clone()
    one[:, :, 11, 3] = math.nan
    out = attention_and_gradients(q, k, one).out
    assert out[..., 3].isnan().all() and out[..., torch.arange(8) != 3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_in_a_mask_shows_in_its_row(dtype):
    q, k, v = inputs(dtype)
    mask = random_tensor((9, 21), dtype, 4, outliers=False)
    clean = attention_and_gradients(q, k, v, mask)
    mask[3, 17] = math.nan
    got = attention_and_gradients(q, k, v, mask)
    others = torch.arange(9) != 3
    assert got.out[:, 3].isnan().all() and torch.equal(got.out[:, others], clean.out[:, others])
    hidden = attention_and_gradients(q, k, v, mask, is_causal=True)  # row 3 does not see key 17
    assert not hidden.out.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", (math.nan, math.inf, 1e4))
def test_what_lies_around_a_tensor_is_never_used(dtype, poison):
    # heads, rows and columns cut from buffers full of poison, at lengths and dims that fill no vector or tile
    def cut(seed, length, dim):
        buffer = torch.full((3, 3, length + 9, dim + 9), poison, dtype=dtype)
        view = buffer[1:2, 1:3, 4 : 4 + length, 3 : 3 + dim]
        view.copy_(random_tensor((1, 2, length, dim), dtype, seed))
        return view

    for q_len, kv_len, dim, v_dim in ((5, 7, 3, 5), (33, 65, 17, 9), (65, 130, 70, 33)):
        q, k, v = cut(1, q_len, dim), cut(2, kv_len, dim), cut(3, kv_len, v_dim)
        mask, grad_out = cut(4, q_len, kv_len), cut(5, q_len, v_dim)
        check_attention(q, k, v, mask, grad_out=grad_out, is_causal=q_len > 30)

"""Scores, finite masks and values of any size the dtype has: forward, gradients, tangents, second derivatives, weights.

Plain PyTorch saves the weights of its forward; a fused backward makes them again, and the rounding of a large score, or
of lse, must not show. Scores here are products of one number a row, so that plain PyTorch rounds none of them and the
rule of tests/support/testing.py is a sharp one: beside it only what is 2^-100 of the numbers that a result is made of.
"""

import math

import pytest
import torch

import attnjourney
from tests.support.testing import (
    DTYPES,
    FLOOR_ULPS,
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    assert_close_to_reference,
    check_attention,
    random_tensor,
)

ROWS, KEYS, DIM = 7, 40, 8
LOWEST, HIGHEST = -3.38e38, 3e38


def plain(query, key, value, attn_mask=None, is_causal=False):
    """With scale 1, in the dtype of query or, beside 16 bits, float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(wide) @ key.to(wide).mT).to(wide)
    if attn_mask is not None:
        scores = scores + attn_mask.to(wide)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return (scores.softmax(-1).to(query.dtype) @ value).to(query.dtype)


def ours(query, key, value, attn_mask=None, is_causal=False):
    return attnjourney.attention(query, key, value, attn_mask, is_causal=is_causal, scale=1.0)


def inputs(*, score=None, keys=None):
    """query, key, value in float64. With `score`: that times `keys`, small whole numbers, in every row."""
    query, key, value = (random_tensor((1, 2, n, DIM), torch.float64, n, outliers=False) for n in (ROWS, KEYS, KEYS))
    if score is not None:
        query, key = torch.zeros_like(query), torch.zeros_like(key)
        query[..., 0], key[..., 0] = score, torch.as_tensor(keys, dtype=torch.float64)
    return query, key, value


def one(at, number=1.0):
    return torch.zeros(KEYS).index_fill(0, torch.tensor([at]), number)


def row_mask(number):
    mask = torch.zeros(ROWS, KEYS, dtype=torch.float64)
    mask[2] = number
    return mask


def key_mask(number, begin=9, end=KEYS, rest=0.0):
    mask = torch.full((ROWS, KEYS), rest, dtype=torch.float64)
    mask[:, begin:end] = number
    return mask


# name: (query, key, value, mask, whether a weight of each row is 1 to the last bit)
SCORES = {
    **{f"dominant_{n:g}": (*inputs(score=2.0**n, keys=one(3)), None, True) for n in (6, 9, 13, 20, 40, 100)},
    **{f"negative_{n:g}": (*inputs(score=-(2.0**n), keys=1 - one(17)), None, True) for n in (6, 13, 40, 100)},
    **{f"rising_{n:g}": (*inputs(score=2.0**n, keys=torch.arange(KEYS)), None, True) for n in (6, 12, 90)},
    **{f"falling_{n:g}": (*inputs(score=-(2.0**n), keys=torch.arange(KEYS)), None, True) for n in (6, 12, 90)},
    **{f"equal_{n:g}": (*inputs(score=2.0**n, keys=torch.ones(KEYS)), None, False) for n in (6, 13, 40)},
    "rising": (*inputs(score=1.0, keys=torch.arange(KEYS)), None, False),
    "falling": (*inputs(score=-1.0, keys=torch.arange(KEYS)), None, False),
}
MASKS = {
    **{f"row_{m:g}": (*inputs(), row_mask(m), False) for m in (-1e9, -1e20, -1e30, LOWEST, 1e9, 1e30, HIGHEST)},
    **{f"keys_{m:g}": (*inputs(), key_mask(m), False) for m in (-1e4, -1e9, -1e30, LOWEST)},
    **{f"one_key_{m:g}": (*inputs(), key_mask(m, 11, 12), True) for m in (1e4, 1e30, HIGHEST)},
    "all_lowest": (*inputs(), key_mask(LOWEST, 0), False),
    "two_of_the_lowest": (*inputs(), key_mask(-2e38, 5, 9, LOWEST), False),
    "both_ends": (*inputs(), key_mask(HIGHEST, 5, 9, LOWEST), False),
}


def tensors_of(case, dtype):
    *tensors, mask, exact = case
    mask_dtype = torch.float32 if dtype == torch.float16 else dtype
    return [x.to(dtype) for x in tensors], None if mask is None else mask.to(mask_dtype), exact


def results(function, tensors, mask, dtype):
    """{name: number} of forward, gradients, tangents and second derivatives."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
    if mask is not None:
        mask = mask.double() if dtype == torch.float64 else mask
    names = ("query", "key", "value")
    directions = [random_tensor(x.shape, x.dtype, 30 + i, outliers=False) for i, x in enumerate(tensors)]
    grad_out = random_tensor((*tensors[0].shape[:-1], DIM), tensors[0].dtype, 40, outliers=False)
    moves = [x.to(dtype) for x in directions]
    out = function(*leaves, mask)
    first = torch.autograd.grad(out, leaves, grad_out.to(dtype).requires_grad_(), create_graph=True)
    second = torch.autograd.grad(first, leaves, moves)
    detached = [x.detach() for x in leaves]
    tangent = torch.func.jvp(lambda *x: function(*x, mask), tuple(detached), tuple(moves))[1]
    found = {"out": out, "out_tangent": tangent}
    found |= {f"grad_{n}": g for n, g in zip(names, first)} | {f"second_{n}": g for n, g in zip(names, second)}
    return {name: x.detach() for name, x in found.items()}


def check(case, dtype, label):
    tensors, mask, exact = tensors_of(case, dtype)
    if not all(x.isfinite().all() for x in (*tensors, *([] if mask is None else [mask]))):
        pytest.skip("beyond the dtype")
    if dtype == torch.float64:
        return check_in_float64(tensors, mask, exact, label)
    actual, same = (results(f, tensors, mask, dtype) for f in (ours, plain))
    right = results(plain, tensors, mask, torch.float64)
    compare(actual, same, right, tensors, exact, dtype, label)


def check_in_float64(tensors, mask, exact, label):
    """Plain PyTorch is the reference, and no less exact: both errors are those of rounding."""
    actual, right = (results(f, tensors, mask, torch.float64) for f in (ours, plain))
    compare(actual, right, right, tensors, exact, torch.float64, label)


def compare(actual, same, right, tensors, exact, dtype, label):
    query, key, value = (max(1.0, x.abs().max().item()) for x in tensors)
    sizes = {"query": key, "key": query, "value": 1.0}  # of what a gradient is a sum of, but for value and grad_out
    for name, x in actual.items():
        if right[name].abs().max() > torch.finfo(dtype).max:
            continue
        kind, _, of = name.partition("_")
        size = 20 * max(value, 1.0) * (sizes[of] if kind in ("grad", "second") else 1.0)
        size *= 20 * max(query, key) ** 2 if kind == "second" else 20 * max(query, key) if of == "tangent" else 1.0
        eps = torch.finfo(dtype).eps
        least = 2.0**-100 * size if exact else 3 * eps * size
        if kind == "second" and eps > 2.0**-20:  # made of tangents of scores, sums in float32 whose order may differ
            least = max(least, 20 * 2.0**-23 * max(query, key))
        rounding = FLOOR_ULPS * eps * right[name].abs() + least
        factor = OUTPUT_FACTOR if kind == "out" else GRADIENT_FACTOR
        assert_close_to_reference(x, same[name], right[name], factor, f"{label} {name}", rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name, dtype):
    check(SCORES[name], dtype, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype):
    check(MASKS[name], dtype, name)


@pytest.mark.parametrize("name", ("dominant_20", "rising_90", "row_-1e+30", "all_lowest", "two_of_the_lowest"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
def test_weights(name, dtype):
    (query, key, _), mask, _ = tensors_of({**SCORES, **MASKS}[name], dtype)
    actual = attnjourney.attention_weights(query, key, mask, scale=1.0)
    eye = torch.eye(KEYS, dtype=dtype).expand(1, 2, -1, -1)
    wide = [x if x is None else x.double() for x in (query, key, eye, mask)]
    least = torch.full(actual.shape, FLOOR_ULPS * torch.finfo(dtype).eps, dtype=torch.float64)
    assert_close_to_reference(actual, plain(query, key, eye, mask), plain(*wide), name=name, rounding=least)


@pytest.mark.parametrize("size", (1, 10, 100, 300))
@pytest.mark.parametrize("options", ({}, {"is_causal": True}, {"sinks": torch.tensor([90.0, -90.0])}), ids=str)
def test_random_scores(size, options):
    """Products of several numbers: a score is rounded, and the rule's derivation says what that may cost."""
    query, key, value = (random_tensor((1, 2, n, 16), seed=n, outliers=False) for n in (70, 90, 90))
    check_attention(query * size**0.5, key * size**0.5, value, **options)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("keys", (1, 60))
@pytest.mark.parametrize(
    "score, value", [(40, 1e25), (10, 3e37), (-27, 1e-33), (-27, 1e-35), (41, 1e-35), (0, None), (4, None)]
)
def test_values_of_equal_keys(score, value, keys, dtype):
    """The output is the value, whatever weights and their sum were before they were divided by it."""
    query, key = torch.full((1, 1, 16, 1), float(score), dtype=dtype), torch.ones(1, 1, keys, 1, dtype=dtype)
    v = torch.full((1, 1, keys, 5), 0.9 * torch.finfo(dtype).max if value is None else value, dtype=dtype)
    eps = max(2, keys / 2) * torch.finfo(dtype).eps  # of sums of that many numbers
    for rows in (3, 16):  # few and more go to other kernels
        out = ours(query[:, :, :rows], key, v)
        assert ((out - v[:, :, :1]).abs() <= eps * v[:, :, :1].abs()).all()
    # beside rows of other sizes, whose bits stay what they are alone
    query = torch.cat([query, torch.full((1, 1, 60, 1), 0.5, dtype=dtype)], 2)
    assert torch.equal(ours(query, key, v)[:, :, :16], out)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_decode(name, dtype):
    (query, key, value), mask, _ = tensors_of(MASKS[name], dtype)
    lengths = torch.tensor([KEYS])
    out = attnjourney.decode(query, key, value, lengths, is_causal=False, attn_mask=mask, scale=1.0)
    wide = [x.double() for x in (query, key, value, mask)]
    least = torch.full(out.shape, 4 * FLOOR_ULPS * torch.finfo(dtype).eps, dtype=torch.float64)
    assert_close_to_reference(out, plain(query, key, value, mask), plain(*wide), name=name, rounding=least)


@pytest.mark.slow
@pytest.mark.parametrize("keys", (1 << 18, 1 << 22))
def test_sums_of_long_rows(keys):
    query, key, value = (random_tensor((1, 1, n, d), seed=n, outliers=False) for n, d in ((2, 4), (keys, 4), (keys, 1)))
    out, lse = attnjourney.attention(query, key, value + 1, return_lse=True)
    scores = query.double() @ key.double().mT / 2
    assert ((lse - scores.logsumexp(-1)).exp() - 1).abs().max() < 1e-5
    assert (out - scores.softmax(-1) @ (value.double() + 1)).abs().max() < 1e-5


def test_rows_beyond_the_lengths_have_stats_of_zero():
    query = torch.randn(2, 2, 7, 8)
    for _ in range(4):
        garbage = torch.full((2, 2, 7, 2), torch.nan)  # memory that the results may be given again
        del garbage
        stats = torch.ops.attnjourney.attention_forward(query, query, query, query_lengths=torch.tensor([3, 7]))[2]
        assert stats[0, :, 3:].eq(0).all() and stats[1].ne(0).any(-1).all()

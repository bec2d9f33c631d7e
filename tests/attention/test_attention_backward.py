"""Gradients of `attention` beyond the grid of test_attention_forward.py: what is asked for, strides, lse, same bits."""

import pytest
import torch

from tests.support.testing import (
    DTYPES,
    LAYOUTS,
    LSE_DTYPE,
    attention_and_gradients,
    check_attention,
    expanded,
    pairs,
    poison_memory,
    random_tensor,
    row_id,
    threads,
)

GRADIENTS = ("grad_query", "grad_key", "grad_value", "grad_attn_mask")
ops = torch.ops.attnjourney


def inputs(dtype=torch.float32, q_len=9, kv_len=21, head_dim=8, v_head_dim=12, q_heads=4, kv_heads=2, batch=2):
    return (
        random_tensor((batch, q_heads, q_len, head_dim), dtype, 1),
        random_tensor((batch, kv_heads, kv_len, head_dim), dtype, 2),
        random_tensor((batch, kv_heads, kv_len, v_head_dim), dtype, 3),
    )


# ---------------------------------------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize("need", range(16))
@pytest.mark.parametrize("kind", ("none", "bool", "float", "float32"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_only_the_gradients_asked_for(need, kind, dtype):
    q, k, v = inputs(dtype)
    mask = None if kind == "none" else random_tensor((4, 9, 21), dtype if kind == "float" else torch.float32, 5)
    if kind == "bool":
        mask = mask > -1
    out, lse, stats = ops.attention_forward(q, k, v, mask, enable_gqa=True)
    grad_out = random_tensor(out.shape, dtype, 6)

    def gradients(need):
        return ops.attention_backward(grad_out, None, q, k, v, mask, out, lse, stats, enable_gqa=True, need=need)

    every, asked = gradients(15), gradients(need)
    for bit, (given, full, got) in enumerate(zip((q, k, v, mask), every, asked)):
        if need >> bit & 1 and given is not None and given.dtype != torch.bool:
            assert got.shape == given.shape and got.dtype == given.dtype
            assert torch.equal(got, full), GRADIENTS[bit]
        else:
            assert got.shape == (0,), GRADIENTS[bit]


def test_a_gradient_is_contiguous_whatever_the_input_was():
    q, k, v = (random_tensor((2, 3, n, 8), seed=n, layout="transposed") for n in (9, 21, 22))
    result = attention_and_gradients(q, k, v[:, :, :21])
    for tensor in (result.out, result.lse, result.grad_query, result.grad_key, result.grad_value):
        assert tensor.is_contiguous()


# ---------------------------------------------------------------------------------------------------- strides


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
def test_layout_of_the_upstream_gradient_changes_no_bit(dtype, layout):
    q, k, v = inputs(dtype)
    dense = random_tensor((2, 4, 9, 12), dtype, 7)
    expected = attention_and_gradients(q, k, v, enable_gqa=True, grad_out=dense)
    got = attention_and_gradients(q, k, v, enable_gqa=True, grad_out=LAYOUTS[layout](dense))
    for name in GRADIENTS[:3]:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_upstream_gradient_of_stride_zero(dtype):
    q, k, v = inputs(dtype)
    one = torch.full((), 0.75, dtype=dtype).expand(2, 4, 9, 12)  # what sum().backward() hands over
    check_attention(q, k, v, enable_gqa=True, grad_out=one)
    for dim in range(4):
        check_attention(q, k, v, enable_gqa=True, grad_out=expanded(random_tensor((2, 4, 9, 12), dtype, 8), dim))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
def test_layout_of_out_and_lse_changes_no_bit(layout):
    q, k, v = inputs()
    mask = random_tensor((9, 21), seed=4)
    out, lse, stats = ops.attention_forward(q, k, v, mask, enable_gqa=True)
    grad_out, grad_lse = random_tensor(out.shape, seed=5), random_tensor(lse.shape, seed=6)

    def gradients(out, lse, grad_lse):
        return ops.attention_backward(grad_out, grad_lse, q, k, v, mask, out, lse, stats, enable_gqa=True)

    move = LAYOUTS[layout]
    for got, expected in zip(gradients(move(out), move(lse), move(grad_lse)), gradients(out, lse, grad_lse)):
        assert torch.equal(got, expected)


def test_expanded_out_and_lse():
    q, k, v = (expanded(t, 0) for t in inputs(kv_heads=4))
    out, lse, stats = ops.attention_forward(q, k, v)
    grad_out = random_tensor(out.shape, seed=5)
    expected = ops.attention_backward(grad_out, None, q, k, v, None, out, lse, stats)
    got = ops.attention_backward(grad_out, None, q, k, v, None, expanded(out, 0), expanded(lse, 0), expanded(stats, 0))
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_dense_key_beside_transposed_value():
    q, k = (random_tensor((2, 4, 65, 16), seed=s) for s in (1, 2))
    v, grad_out = (random_tensor((2, 4, 65, 16), seed=s, layout="transposed") for s in (3, 4))
    check_attention(q, k, v, grad_out=grad_out)


def test_one_tensor_as_query_key_and_value():
    x = random_tensor((2, 3, 17, 8))
    check_attention(x, x, x, is_causal=True)


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "row",
    pairs(
        dtype=DTYPES,
        lengths=[(1, 1), (9, 21), (33, 17), (70, 70)],
        mask=("none", "bool", "float"),
        is_causal=(False, True),
        only_lse=(False, True),
    ),
    ids=row_id,
)
def test_gradient_of_lse(row):
    dtype, (q_len, kv_len) = row["dtype"], row["lengths"]
    q, k, v = inputs(dtype, q_len, kv_len)
    mask = None if row["mask"] == "none" else random_tensor((4, q_len, kv_len), dtype, 5)
    if row["mask"] == "bool":
        mask = mask > -0.5
        mask[:, q_len // 2] = False  # a row that sees no key: its lse is -inf, and has no gradient
    grad_lse = random_tensor((2, 4, q_len), LSE_DTYPE.get(dtype, torch.float32), 6)
    grad_out = random_tensor((2, 4, q_len, 12), dtype, 7) * (0 if row["only_lse"] else 1)
    check_attention(q, k, v, mask, grad_out=grad_out, grad_lse=grad_lse, is_causal=row["is_causal"], enable_gqa=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", (31, 33, 50, 65, 97))
def test_tail_of_a_head_does_not_spill_into_the_next(dtype, length):
    q, k, v = inputs(dtype, length, length, 16, 16, q_heads=3, kv_heads=3)
    grad_out = random_tensor(q.shape, dtype, 1)
    together = check_attention(q, k, v, is_causal=True, grad_out=grad_out)
    for head in range(3):
        alone = attention_and_gradients(
            *(t[:, head : head + 1] for t in (q, k, v)), is_causal=True, grad_out=grad_out[:, head : head + 1]
        )
        for name in ("out", *GRADIENTS[:3]):
            assert torch.equal(getattr(together, name)[:, head], getattr(alone, name)[:, 0]), name


@pytest.mark.parametrize(
    "head_dim, v_head_dim", [(128, d) for d in range(8, 121, 16)] + [(192, 128), (8, 16), (1, 300), (300, 1)]
)
def test_value_dim_differs(head_dim, v_head_dim):
    q, k, v = inputs(torch.float32, 5, 19, head_dim, v_head_dim)
    result = check_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert result.out.shape == (2, 4, 5, v_head_dim) and result.grad_value.shape == v.shape


def test_grouped_heads_value_dim_and_one_query_at_rank_6():
    q, k, v = random_tensor((8, 4, 1, 32)), random_tensor((8, 1, 36, 32), seed=1), random_tensor((8, 1, 36, 24), seed=2)
    assert check_attention(q, k, v, enable_gqa=True).out.shape == (8, 4, 1, 24)
    q, k, v = (t.unflatten(0, (2, 2, 2)) for t in (q, k, v))
    assert check_attention(q, k, v, enable_gqa=True).out.shape == (2, 2, 2, 4, 1, 24)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_heads_equal_repeated_ones(dtype):
    # [h0, h0, h0, h1, h1, h1]: query head h reads key/value head h // 3
    q, k, v = inputs(dtype, q_heads=6, kv_heads=2)
    grad_out = random_tensor((2, 6, 9, 12), dtype, 9)
    grouped = attention_and_gradients(q, k, v, enable_gqa=True, grad_out=grad_out)
    repeated = attention_and_gradients(q, *(t.repeat_interleave(3, 1) for t in (k, v)), grad_out=grad_out)
    assert torch.equal(grouped.out, repeated.out) and torch.equal(grouped.grad_query, repeated.grad_query)
    for name in ("grad_key", "grad_value"):
        total = getattr(repeated, name).double().unflatten(1, (2, 3)).sum(2)
        error = (getattr(grouped, name).double() - total).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * getattr(repeated, name).abs().max(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_do_not_depend_on_the_scores_give_query_and_key_no_gradient(dtype):
    # one key: the weight is 1 whatever the score; equal values: the output is the value whatever the weights
    q, k, v = inputs(dtype, kv_len=1)
    check_attention(q, k, v, enable_gqa=True)
    q, k, v = inputs(dtype)
    check_attention(q, k, expanded(v, 2), enable_gqa=True)
    zero = attention_and_gradients(q, k, torch.zeros_like(v), enable_gqa=True)
    assert not zero.grad_query.any() and not zero.grad_key.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_upstream_gradient_no_gradient(dtype):
    q, k, v = inputs(dtype)
    mask = random_tensor((9, 21), dtype, 4)
    result = attention_and_gradients(q, k, v, mask, enable_gqa=True, grad_out=torch.zeros(2, 4, 9, 12, dtype=dtype))
    assert not any(getattr(result, name).any() for name in GRADIENTS)


# ---------------------------------------------------------------------------------------------------- same bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", (1, 2))
def test_same_bits_every_time_in_poisoned_memory(dtype, count):
    first = None
    q, k, v = (random_tensor((20, 4, 4, 32), dtype, s) for s in range(3))
    long = [random_tensor((1, n, 24), dtype, n) for n in (150, 200, 200)]
    mask = random_tensor((150, 200), dtype, 4)
    with threads(count):
        for _ in range(30):
            poison_memory()
            results = [attention_and_gradients(q, k, v), attention_and_gradients(*long, mask, is_causal=True)]
            bits = [getattr(r, n) for r in results for n in ("out", "lse", *GRADIENTS) if getattr(r, n) is not None]
            assert first is None or all(torch.equal(a, b) for a, b in zip(first, bits))
            first = bits

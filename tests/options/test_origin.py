"""A call that is a part of a larger one: where its rows, keys and heads stand there (the operators' `origin`)."""

import pytest
import torch

import attnjourney
from tests.support.testing import random_tensor

ops = torch.ops.attnjourney
SEED = torch.tensor(5)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first_key", [8, *range(1, 16, 2), 6])
def test_dropout_has_the_bits_of_the_whole(dtype, first_key):
    """Zeros of the weights themselves: the values are a unit matrix."""
    rows, keys, row = 40, 96, 7
    q, k = torch.zeros(2, 4, rows, 8, dtype=dtype), torch.zeros(2, 4, keys, 8, dtype=dtype)
    options = dict(dropout_p=0.5, dropout_seed=SEED)
    whole = attnjourney.attention(q, k, torch.eye(keys, dtype=dtype).expand(2, 4, -1, -1), **options) != 0
    n = keys - first_key
    part = ops.attention_forward(
        q[:, 1:3, row:], k[:, 1:3, first_key:], torch.eye(n, dtype=dtype).expand(2, 2, -1, -1),
        origin=[row, first_key, 1, 4], **options,
    )[0]  # fmt: skip
    assert torch.equal(part != 0, whole[:, 1:3, row:, first_key:])


def test_heads_of_packed_sequences():
    lengths, n = torch.tensor([0, 7, 7, 24], dtype=torch.int32), 24
    q = torch.zeros(n, 4, 8, dtype=torch.float64)
    value = torch.eye(n, dtype=torch.float64)[:, None].expand(-1, 4, -1)
    options = dict(dropout_p=0.5, dropout_seed=SEED)
    whole = ops.varlen_attention(q, q, value, lengths, lengths, **options) != 0
    part = ops.varlen_attention(q[:, 1:3], q[:, 1:3], value[:, 1:3], lengths, lengths, origin=[0, 0, 1, 4], **options)
    assert torch.equal(part != 0, whole[:, 1:3])
    assert whole[:7, :, 7:].sum() == 0 and not whole[:7, :, :7].all()


def test_blocks_of_the_whole():
    """Eight blocks of rows and of keys; the part begins at the third of the ones and the second of the others."""
    block, n, row, first_key = 16, 128, 32, 16
    unit = torch.eye(n, dtype=torch.float64)
    mask = attnjourney.BlockMask.from_dense(random_tensor((n, n), torch.float64) > 0, block)
    part_mask = mask.part(row, n, first_key, n)
    options = dict(dropout_p=0.5, dropout_seed=SEED)
    q = torch.zeros(2, 4, n, 8, dtype=torch.float64)
    whole = ops.block_attention(q, q, unit.expand(2, 4, -1, -1), *mask.tensors, **options) != 0
    part = ops.block_attention(
        q[:, 1:3, row:], q[:, 1:3, first_key:], unit[first_key:, first_key:].expand(2, 2, -1, -1),
        *part_mask.tensors, origin=[row, first_key, 1, 4], **options,
    )  # fmt: skip
    assert torch.equal(part != 0, whole[:, 1:3, row:, first_key:])
    assert whole.any() and not whole[..., ~mask.to_dense()[0, 0]].any()


@pytest.mark.parametrize("first_key", [0, 5])
@pytest.mark.parametrize("q_len", [2, 23])  # few rows, and tiles of them
@pytest.mark.parametrize(
    "options",
    [dict(is_causal=True), dict(window_size=(6, 2)), dict(is_causal=True, window_size=(9, -1), dropout_p=0.25)],
    ids=str,
)
def test_positions_count_from_there(options, q_len, first_key):
    length, row = 40, 40 - q_len
    tensors = [random_tensor((2, 4, length, 8), torch.float64, i).requires_grad_() for i in range(3)]
    query, key, value = tensors
    slopes = random_tensor((4,), torch.float64, 9).abs().requires_grad_()
    seen = (torch.arange(length) >= first_key).expand(length, length)
    seed = dict(dropout_seed=SEED) if "dropout_p" in options else {}
    whole = attnjourney.attention(query, key, value, seen, alibi_slopes=slopes, **options, **seed)[:, :, row:]
    part = ops.attention(
        query[:, :, row:], key[:, :, first_key:], value[:, :, first_key:], None, origin=[row, first_key, 0, 0],
        alibi_slopes=slopes, **options, **seed,
    )  # fmt: skip
    torch.testing.assert_close(part, whole)
    weights = random_tensor(part.shape, torch.float64, 7)
    for grads in zip(*(torch.autograd.grad((x * weights).sum(), (*tensors, slopes)) for x in (part, whole))):
        torch.testing.assert_close(*grads)


def test_a_prefix_is_of_the_call():
    q = random_tensor((1, 2, 8, 4), torch.float64)
    expected = ops.attention(q, q, q, is_causal=True, prefix_length=3)
    assert torch.equal(ops.attention(q, q, q, is_causal=True, prefix_length=3, origin=[5, 5, 0, 0]), expected)


@pytest.mark.parametrize(
    "options",
    [
        dict(origin=[0, 0, 0]),
        dict(origin=[-1, 0, 0, 0]),
        dict(origin=[0, 1 << 40, 0, 0]),
        dict(origin=[0, 0, 0, 3]),
        dict(origin=[1, 0, 0, 0], causal_alignment=1),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options):
    q = random_tensor((1, 4, 8, 4))
    with pytest.raises((ValueError, RuntimeError), match="origin"):
        ops.attention(q, q, q, **options)

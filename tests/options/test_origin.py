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

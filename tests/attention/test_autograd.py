"""Gradients of `attention` in float64 by finite differences, only where they are asked for; what is not differentiable
raises."""

import pytest
import torch
from torch.autograd.gradcheck import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import attnjourney
from attnjourney import reference

ops = torch.ops.attnjourney


def leaf(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def qkv(q=(2, 2, 3, 4), k=None, v=None):
    k = k or q
    return leaf(*q, seed=1), leaf(*k, seed=2), leaf(*(v or k), seed=3)


def float_mask(*shape, hidden=()):
    """A trainable mask; `hidden` indices of the last two dimensions hold -inf."""
    mask = leaf(*shape, seed=4)
    with torch.no_grad():
        for row, key in hidden:
            mask[..., row, key] = -torch.inf
    return mask


SHAPES = {
    "square": (qkv(), {}),
    "causal": (qkv(), dict(is_causal=True)),
    "causal_more_keys": (qkv((1, 2, 3, 4), (1, 2, 5, 4)), dict(is_causal=True)),
    "causal_more_queries": (qkv((1, 2, 5, 4), (1, 2, 3, 4)), dict(is_causal=True)),
    "scale": (qkv(), dict(scale=0.3)),
    "value_dim": (qkv((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 7)), dict(is_causal=True)),
    "gqa": (qkv((1, 4, 3, 4), (1, 2, 4, 4)), dict(enable_gqa=True)),
    "mqa_causal": (qkv((2, 3, 3, 4), (2, 1, 3, 4)), dict(enable_gqa=True, is_causal=True)),
    "gqa_value_heads": (qkv((1, 4, 3, 2), (1, 2, 3, 2), (1, 1, 3, 2)), dict(enable_gqa=True)),
    "broadcast_heads": (qkv((2, 2, 3, 4), (2, 1, 3, 4), (1, 2, 3, 4)), {}),
    "broadcast_query": (qkv((1, 1, 3, 4), (2, 3, 3, 4)), {}),
    "rank2": (qkv((3, 4), (5, 4)), dict(is_causal=True)),
    "rank3": (qkv((2, 3, 4), (2, 5, 4)), {}),
    "rank5": (qkv((2, 1, 2, 3, 2), (1, 2, 2, 3, 2)), {}),
    "one_query": (qkv((1, 2, 1, 4), (1, 2, 6, 4)), {}),
    "one_key": (qkv((1, 2, 4, 4), (1, 2, 1, 4)), {}),
    "head_dim_1": (qkv((1, 1, 3, 1)), {}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_gradcheck_shapes(name):
    inputs, options = SHAPES[name]
    assert gradcheck(lambda *x: attnjourney.attention(*x, **options), inputs)


MASKS = {
    "full": (float_mask(2, 2, 3, 5), {}),
    "batch": (float_mask(2, 1, 1, 5), {}),
    "heads": (float_mask(2, 3, 1), {}),
    "rows_keys": (float_mask(3, 5), dict(is_causal=True)),
    "keys": (float_mask(5), {}),
    "scalar_like": (float_mask(1, 1), {}),
    "hidden": (float_mask(3, 5, hidden=[(0, 1), (2, 0), (2, 4)]), {}),
    "empty_row": (float_mask(2, 1, 3, 5, hidden=[(1, j) for j in range(5)]), dict(is_causal=True)),
    "gqa": (float_mask(2, 4, 3, 5), dict(enable_gqa=True)),
}


@pytest.mark.parametrize("name", MASKS)
def test_gradcheck_float_mask(name):
    mask, options = MASKS[name]
    heads = 4 if name == "gqa" else 2
    inputs = qkv((2, heads, 3, 4), (2, 2, 5, 4))
    hidden = mask.detach() == -torch.inf  # finite differences of -inf are NaN: check the gradient of the finite part
    base = mask.detach().masked_fill(hidden, 0.0).requires_grad_()

    def function(query, key, value, part):
        return attnjourney.attention(query, key, value, part.masked_fill(hidden, -torch.inf), **options)

    assert gradcheck(function, (*inputs, base))


@pytest.mark.parametrize("shape", [(2, 1, 3, 5), (3, 5), (1, 5)])
def test_gradcheck_bool_mask(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[..., -1, :] = mask.shape[-2] == 1  # an empty row where the mask has rows
    assert gradcheck(lambda *x: attnjourney.attention(*x, mask, is_causal=True), qkv((2, 2, 3, 4), (2, 2, 5, 4)))


def test_gradcheck_not_contiguous():
    packed = leaf(2, 3, 3, 2, 4)  # (batch, length, 3, heads, dim), as a fused projection gives it
    mask = leaf(5, 3)

    def function(packed, mask):
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        return attnjourney.attention(query, key, value, mask[1:4].T, is_causal=True)

    assert gradcheck(function, (packed, mask))
    columns = tuple(x.detach().mT.contiguous().mT.requires_grad_() for x in qkv())  # last dimension not dense
    assert gradcheck(attnjourney.attention, columns)


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_gradcheck_dropout(p):
    def function(*x):
        torch.manual_seed(11)
        return attnjourney.attention(*x, dropout_p=p, enable_gqa=True)

    inputs = (*qkv((2, 4, 3, 4), (2, 2, 9, 4)), float_mask(3, 9))
    assert gradcheck(function, inputs)


def test_gradcheck_lse():
    """attention_forward called directly: both outputs are differentiable."""
    inputs = (*qkv((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 2)), float_mask(3, 5))
    assert gradcheck(lambda *x: ops.attention_forward(*x, is_causal=True), inputs)
    assert gradcheck(lambda *x: ops.attention_forward(*x)[1], inputs)  # lse alone: no gradient of out comes in


@pytest.mark.parametrize("q_len, kv_len", [(0, 3), (3, 0), (0, 0)])
def test_empty_lengths(q_len, kv_len):
    query, key, value = qkv((2, 2, q_len, 4), (2, 2, kv_len, 4))
    mask = leaf(q_len, kv_len)
    out = attnjourney.attention(query, key, value, mask)
    assert torch.equal(out, torch.zeros_like(query))
    out.backward(torch.ones_like(out))
    for x in (query, key, value, mask):
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_batch_of_zero():
    query, key, value = qkv((0, 2, 3, 4))
    attnjourney.attention(query, key, value).sum().backward()
    assert query.grad.shape == key.grad.shape == value.grad.shape == (0, 2, 3, 4)


def test_hidden_nan_gives_no_gradient():
    query, key, value = qkv((1, 1, 4, 4), (1, 1, 5, 4))
    with torch.no_grad():
        key[..., 3, :] = torch.nan  # hidden from every row below
        value[..., 3, :] = torch.nan
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[:, 3] = False
    mask[2] = False  # and one row sees nothing
    out = attnjourney.attention(query, key, value, mask)
    out.backward(torch.ones_like(out))
    assert torch.equal(out[0, 0, 2], torch.zeros(4, dtype=torch.float64))
    assert torch.equal(query.grad[0, 0, 2], torch.zeros(4, dtype=torch.float64))
    for x in (query, key, value):
        assert x.grad.isfinite().all()
    for x in (key, value):
        assert torch.equal(x.grad[0, 0, 3], torch.zeros(4, dtype=torch.float64))


def test_gradients_equal_reference_with_dropout():
    """The same seed drops the same weights in the operator and in the reference."""
    mask = float_mask(7, 19, hidden=[(3, 1), (6, 2), (6, 6), *((2, j) for j in range(19))])
    inputs = (*qkv((2, 4, 7, 4), (2, 2, 19, 4), (2, 2, 19, 3)), mask)
    results = []
    for function in (attnjourney.attention, reference.attention):
        torch.manual_seed(3)
        out = function(*inputs, dropout_p=0.4, is_causal=True, enable_gqa=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    torch.testing.assert_close(results[0], results[1])


def test_dropout_bits():
    """Bits drawn in (row, key // 8, head) order: known words of Philox4x32-7, and rates that fit."""
    # 7-round test vector of Random123 (kat_vectors): counter 0, key 0 -> 5f6fb709 0d893f64 4f121f81 4f730a48
    words = (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    bits = torch.tensor([half for word in words for half in (word & 0xFFFF, word >> 16)])
    for p in (0.1, 0.25, 0.5, 0.72):
        assert torch.equal(reference.dropout_keep_mask(0, 1, 1, 1, 8, p)[0, 0, 0], bits >= round(p * 65536))
    keep = reference.dropout_keep_mask(1 << 61 | 12345, 2, 3, 64, 64, 0.3)
    assert abs(keep.double().mean().item() - 0.7) < 5 * (0.3 * 0.7 / keep.numel()) ** 0.5

    # a value of unit vectors shows the weights: they are kept where the reference says
    query = torch.zeros(2, 3, 5, 1)
    value = torch.eye(21).expand(2, 3, 21, 21)
    seed = torch.tensor(-5)
    out, _, _ = ops.attention_forward(query, torch.zeros(2, 3, 21, 1), value, None, 0.25, dropout_seed=seed)
    keep = reference.dropout_keep_mask(seed, 2, 3, 5, 21, 0.25)
    torch.testing.assert_close(out, keep / (21 * 0.75))


class Calls(TorchDispatchMode):
    """Records every operator below autograd, with its arguments by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema = function._schema.arguments
        defaults = {a.name: a.default_value for a in schema}
        self.calls.append((str(function), {**defaults, **dict(zip(defaults, args)), **(kwargs or {})}))
        return function(*args, **(kwargs or {}))

    def named(self, name):
        return [arguments for function, arguments in self.calls if function == f"attnjourney.{name}.default"]


@pytest.mark.parametrize("wanted", range(16))
def test_only_wanted_gradients(wanted):
    inputs = [x.detach() for x in (*qkv(), float_mask(3, 3))]
    for bit, x in enumerate(inputs):
        x.requires_grad_(bool(wanted >> bit & 1))
    with Calls() as calls:
        out = attnjourney.attention(*inputs)
        assert out.requires_grad == (wanted > 0)
        if wanted:
            out.sum().backward()
    backward = calls.named("attention_backward")
    assert [call["need"] for call in backward] == ([wanted] if wanted else [])
    assert [x.grad is not None for x in inputs] == [bool(wanted >> bit & 1) for bit in range(4)]
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    if wanted:
        reference.attention(*leaves).sum().backward()
    for x, y in zip(inputs, leaves):
        torch.testing.assert_close(x.grad, y.grad)


def test_raw_backward_skips():
    """A gradient not asked for comes back with shape (0,)."""
    query, key, value = (x.detach() for x in qkv())
    out, lse, stats = ops.attention_forward(query, key, value)
    for need in range(8):
        grads = ops.attention_backward(out, None, query, key, value, None, out, lse, stats, need=need)
        expected = [x.shape if need >> bit & 1 else (0,) for bit, x in enumerate((query, key, value))] + 3 * [(0,)]
        assert [g.shape for g in grads] == expected


def test_no_graph_without_need():
    query, key, value = qkv()
    with torch.no_grad():
        assert not attnjourney.attention(query, key, value).requires_grad
    plain = [x.detach() for x in (query, key, value)]
    with Calls() as calls:
        attnjourney.attention(*plain)
    assert [name for name, _ in calls.calls] == ["attnjourney.attention_forward.default"]


def test_second_backward_of_freed_graph_and_version_check():
    query, key, value = qkv()
    out = attnjourney.attention(query, key, value)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    changed = query * 1
    out = attnjourney.attention(changed, key, value)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_errors_keep_their_type_and_text():
    query, key, value = qkv()
    for inputs in ((query, key, value), (query.detach(), key.detach(), value.detach())):
        with pytest.raises(ValueError, match="^dropout_p: expected a number between 0 and 1, got 2"):
            attnjourney.attention(*inputs, dropout_p=2.0)
        with pytest.raises(ValueError, match="^key: expected the head_dim of query, 4, got 3"):
            attnjourney.attention(inputs[0], inputs[1][..., :3], inputs[2])
        with pytest.raises(RuntimeError, match="^key: expected the dtype of query"):
            attnjourney.attention(inputs[0], inputs[1].float(), inputs[2])

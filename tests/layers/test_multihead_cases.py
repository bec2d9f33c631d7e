"""Inputs on which multi-head attention modules have gone wrong elsewhere, named after what they show."""

import math
import warnings

import pytest
import torch
from torch import nn as torch_nn
from torch.nn.utils import prune

from attnjourney import nn, replace_attention
from tests.support.testing import random_tensor

TRUE, FALSE = True, False


def module(*args, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return nn.MultiheadAttention(*args, dtype=dtype, **options)


def encoder_layer(width, heads, hidden, dtype=torch.float64):
    torch.manual_seed(0)
    layer = torch_nn.TransformerEncoderLayer(width, heads, hidden, 0.0, batch_first=True, dtype=dtype)
    replace_attention(layer)
    return layer


def close(a, b, tolerance=1e-10):
    __tracebackhide__ = True
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# -------------------------------------------------------------------------------------- rows without a key


@pytest.mark.parametrize("need_weights", [True, False])
def test_band_and_padding_that_leave_a_row_empty_give_finite_gradients(need_weights):
    m = module(1, 1)
    with torch.no_grad():
        m.out_proj.bias.fill_(0.75)
    x = torch.rand(3, 2, 1, dtype=torch.float64)
    padding = torch.tensor([[FALSE, FALSE, FALSE], [FALSE, TRUE, TRUE]])
    band = torch.full((3, 3), -math.inf, dtype=torch.float64)
    band[[0, 1, 2, 1, 2], [0, 1, 2, 0, 1]] = 0.0
    options = dict(key_padding_mask=padding, need_weights=need_weights)
    out, weights = m(x, x, x, attn_mask=band, **options)
    assert out[2, 1].item() == 0.75  # step 2 of item 1 sees steps 1 and 2, both padding: the bias alone
    if need_weights:
        assert torch.equal(weights[1, 2], torch.zeros(3, dtype=torch.float64))
    gradients = torch.autograd.grad(out[0].sum(), list(m.parameters()))
    without = m(x[:2], x, x, attn_mask=band[:2], **options)[0]  # the same without that query
    for a, b in zip(gradients, torch.autograd.grad(without[0].sum(), list(m.parameters()))):
        assert a.isfinite().all()
        close(a, b)


def test_one_head_switched_off_by_the_mask():
    m = module(3, 3, batch_first=True)
    x = random_tensor((1, 5, 3), torch.float64, outliers=False)
    blocked = torch.tensor([FALSE, FALSE, TRUE])[:, None, None].expand(3, 5, 5)
    with_weights, weights = m(x, x, x, attn_mask=blocked, average_attn_weights=False)
    without, _ = m(x, x, x, attn_mask=blocked, need_weights=False)
    close(with_weights, without)
    assert weights.shape == (1, 3, 5, 5) and not weights[0, 2].any()
    close(weights[0, :2].sum(-1), torch.ones(2, 5, dtype=torch.float64))
    for out in (with_weights, without):
        gradient = torch.autograd.grad(out.sum(), m.in_proj_weight)[0]
        assert not gradient[8].any() and gradient[6:8].any()  # the value rows of head 2, of heads 0 and 1


@pytest.mark.parametrize("length", [511, 512, 513, 600, 640, 1025])
def test_window_whose_first_blocks_of_keys_are_hidden(length):
    m = module(2, 1, dtype=torch.float32)
    x = torch.ones(length, 2)
    row, column = torch.arange(length)[:, None], torch.arange(length)
    mask = torch.zeros(length, length).masked_fill((column > row) | (column <= row - 10), -math.inf)
    with_weights, weights = m(x, x, x, attn_mask=mask)
    without, _ = m(x, x, x, attn_mask=mask, need_weights=False)
    assert with_weights.isfinite().all()
    close(with_weights, without, 1e-6)
    close(with_weights, m(x[:1], x[:1], x[:1])[0].expand(length, 2), 1e-6)  # all values are equal
    close(weights[50, 41:51], torch.full((10,), 0.1), 1e-6)


def test_left_padding_through_two_layers():
    layers = [module(8, 2, seed=s, batch_first=True) for s in (0, 1)]
    x = random_tensor((2, 5, 8), torch.float64, outliers=False)
    start = torch.tensor([2, 0])  # item 0 has length 3
    hidden = torch.arange(5) < start[:, None]
    mask = (hidden[:, None, :] | torch.ones(5, 5, dtype=torch.bool).triu(1)).repeat_interleave(2, 0)
    y = x
    for m in layers:
        y = m(y, y, y, attn_mask=mask)[0]
    assert y.isfinite().all()
    for i, first in enumerate(start.tolist()):
        alone = x[i : i + 1, first:]
        for m in layers:
            alone = m(alone, alone, alone, is_causal=True, need_weights=False)[0]
        close(y[i : i + 1, first:], alone)


# ---------------------------------------------------------------------------------------------------- the causal hint


@pytest.mark.parametrize("padded", [False, True])
def test_asking_for_weights_keeps_the_causal_condition(padded):
    m = module(8, 2, batch_first=True)
    x = random_tensor((4, 3, 8), torch.float64, outliers=False)
    padding = torch.tensor([[FALSE, FALSE, i % 2 == 1] for i in range(4)]) if padded else None
    with_weights, weights = m(x, x, x, key_padding_mask=padding, is_causal=True)
    without, _ = m(x, x, x, key_padding_mask=padding, is_causal=True, need_weights=False)
    close(with_weights, without, 1e-12)
    assert not weights.triu(1).any()
    future = torch.ones(3, 3, dtype=torch.bool).triu(1)
    close(with_weights, m(x, x, x, key_padding_mask=padding, attn_mask=future)[0], 1e-12)


def test_mask_of_a_wrong_shape_beside_the_causal_hint_is_an_error():
    layer = encoder_layer(4, 1, 8, torch.float32)
    with pytest.raises(ValueError, match=r"attn_mask: expected shape \(8, 8\).*got \(3, 1\)"):
        layer(torch.ones(2, 8, 4), torch.zeros(3, 1), is_causal=True)


def test_causal_hint_and_padding_are_both_kept():
    m = module(8, 2, batch_first=True)
    x = random_tensor((2, 6, 8), torch.float64, outliers=False).requires_grad_()
    padding = torch.tensor([[FALSE] * 6, [FALSE, TRUE, FALSE, FALSE, TRUE, TRUE]])
    out, weights = m(x, x, x, key_padding_mask=padding, is_causal=True, average_attn_weights=False)
    assert not weights.triu(1).any() and not weights[1, :, :, padding[1]].any()
    gradient = torch.autograd.grad(out[1, 2].sum(), x)[0]
    assert gradient[1, [0, 2]].any() and not gradient[1, [1, 3, 4, 5]].any() and not gradient[0].any()


# ---------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("training", [True, False])
def test_float_padding_is_added(training):
    m = module(1, 1, bias=False).train(training)
    with torch.no_grad():
        m.in_proj_weight.copy_(torch.tensor([[1.0], [3.0], [2.0]]))
        m.out_proj.weight.fill_(2.0)
    x, padding = torch.tensor([[1.0], [2.0]]).double(), torch.tensor([0.0, 1.0]).double()
    expected = (torch.tensor([[3.0, 6.0], [6.0, 12.0]]).double() + padding).softmax(-1)
    with torch.set_grad_enabled(training):
        out, weights = m(x, x, x, key_padding_mask=padding)
    close(weights, expected)
    close(out, 4 * expected @ x)


@pytest.mark.parametrize("batch, length, embed, heads, padded", [(8, 100, 512, 8, False), (2, 8, 4, 4, True)])
def test_a_mask_for_every_item_and_head(batch, length, embed, heads, padded):
    m = module(embed, heads, batch_first=True, dtype=torch.float32)
    x = random_tensor((batch, length, embed), outliers=False)
    blocked = torch.rand(batch * heads, length, length, generator=torch.Generator().manual_seed(1)) < 0.5
    blocked[..., 0] = False
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[1:, -2:] = padded
    out, weights = m(x, x, x, attn_mask=blocked, key_padding_mask=padding, average_attn_weights=False)
    with torch.no_grad():
        evaluated, _ = m.eval()(x, x, x, attn_mask=blocked, key_padding_mask=padding, need_weights=False)
    close(out, evaluated, 1e-5)
    for item, head in ((0, 0), (1, heads - 1), (batch - 1, 1)):
        hidden = blocked[item * heads + head] | padding[item]
        assert torch.equal(weights[item, head] == 0, hidden)


def test_weights_under_dropout_are_those_before_it():
    m = module(20, 5, dropout=0.1)
    x = random_tensor((5, 4, 20), torch.float64, outliers=False)
    padding = torch.arange(5) >= torch.tensor([5, 3, 1, 0])[:, None]
    torch.manual_seed(1)
    out, weights = m(x, x, x, key_padding_mask=padding)
    close(weights[:3].sum(-1), torch.ones(3, 5, dtype=torch.float64))
    assert not weights[3].any() and weights.max() <= 1
    close(out[:, 3], m.out_proj.bias.expand(5, 20))
    assert not torch.equal(out, m.eval()(x, x, x, key_padding_mask=padding)[0])  # dropout did happen


def test_zero_attention_and_a_strictly_causal_mask():
    m = module(8, 2, add_zero_attn=True)
    x = torch.ones(4, 1, 8, dtype=torch.float64).requires_grad_()
    for mask in (torch.full((4, 4), -10000.0).double().triu(), torch.ones(4, 4, dtype=torch.bool).triu()):
        tiny = 0.0 if mask.dtype == torch.bool else 1e-300  # a visible key never has weight 0
        out = m(x, x, x, attn_mask=mask)[0]
        for i in range(4):
            gradient = torch.autograd.grad(out[i].sum(), x, retain_graph=True)[0]
            assert (gradient[i + 1 :].abs() <= tiny).all()
            assert (gradient[i].abs() > tiny).any() == (
                i > 0
            )  # through the query, where there is a past beside the zero key


@pytest.mark.parametrize("grad", [True, False])
def test_bool_padding_is_minus_infinity(grad):
    layer = encoder_layer(8, 2, 16).eval()
    x = random_tensor((3, 5, 8), torch.float64, outliers=False)
    padding = torch.arange(5) >= torch.tensor([5, 3, 2])[:, None]
    added = torch.zeros(3, 5, dtype=torch.float64).masked_fill(padding, -math.inf)
    with torch.set_grad_enabled(grad):
        close(layer(x, src_key_padding_mask=padding), layer(x, src_key_padding_mask=added))


def test_float_ones_and_zeros_are_added_not_kept():
    layer = encoder_layer(10, 5, 16).eval()
    x = random_tensor((5, 50, 10), torch.float64, outliers=False)
    padding = torch.ones(5, 50, dtype=torch.float64)
    padding[:, -1] = 0.0  # e^-1 times lighter than the others
    shifted = torch.zeros(5, 50, dtype=torch.float64)
    shifted[:, -1] = -1.0
    with torch.no_grad():
        close(layer(x, src_key_padding_mask=padding), layer(x, src_key_padding_mask=shifted))


def test_layer_with_an_added_position_bias_is_the_same_without_grad():
    layer = encoder_layer(8, 2, 16).eval()
    x, bias = random_tensor((3, 5, 8), torch.float64, outliers=False), random_tensor((5, 5), torch.float64)
    with torch.no_grad():
        without = layer(x, bias)
    close(layer(x, bias), without)
    assert without.isfinite().all()


# ---------------------------------------------------------------------------------------------------- the module itself


def test_hooks_on_the_output_projection_and_what_replaces_it_take_part():
    m = module(8, 2)
    x = random_tensor((3, 2, 8), torch.float64, outliers=False)
    before = m(x, x, x, need_weights=False)[0]
    calls = []
    handle = m.out_proj.register_forward_hook(lambda module, args, out: calls.append(1))
    close(m(x, x, x, need_weights=False)[0], before, 1e-12)
    assert calls == [1]
    handle.remove()

    class PlusOne(torch_nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + 1

    m.out_proj = PlusOne(m.out_proj)
    for need_weights in (True, False):
        close(m(x, x, x, need_weights=need_weights)[0], before + 1, 1e-12)


def test_pruned_and_parametrized_output_projections_take_part():
    x = random_tensor((3, 2, 8), torch.float64, outliers=False)
    pruned, weighted = module(8, 2), module(8, 2)
    prune.random_unstructured(pruned.out_proj, "weight", 0.5)
    weighted_before = weighted(x, x, x, need_weights=False)[0]
    torch_nn.utils.parametrizations.weight_norm(weighted.out_proj)
    close(weighted(x, x, x, need_weights=False)[0], weighted_before, 1e-12)
    for m in (pruned, weighted):
        out = m(x, x, x, need_weights=False)[0]
        close(out, m(x, x, x)[0], 1e-12)
        gradients = torch.autograd.grad(out.sum(), list(m.out_proj.parameters()), allow_unused=True)
        assert all(g is not None for g in gradients)


def test_no_heads():
    with pytest.raises(ValueError, match="num_heads: expected a positive number, got 0"):
        nn.MultiheadAttention(8, 0)


@pytest.mark.parametrize("need_weights", [True, False])
def test_batch_first_is_only_a_transpose(need_weights):
    first, second = module(8, 2, batch_first=True), module(8, 2)
    q, k = (random_tensor(s, torch.float64, seed=i, outliers=False) for i, s in enumerate(((3, 5, 8), (3, 7, 8))))
    for shape in ((5, 7), (6, 5, 7)):
        mask = random_tensor(shape, torch.float64) > 1.0
        mask[..., 0] = False
        options = dict(attn_mask=mask, need_weights=need_weights)
        a, a_weights = first(q, k, k, **options)
        memory = k.transpose(0, 1)
        b, b_weights = second(q.transpose(0, 1), memory, memory, **options)
        assert torch.equal(a, b.transpose(0, 1))
        assert a_weights is None or torch.equal(a_weights, b_weights)


def test_a_mask_for_every_item_alone_is_refused_where_it_cannot_be_told_apart():
    x = torch.zeros(3, 4, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"attn_mask: .*\(6, 4, 4\), got \(3, 4, 4\)"):
        module(8, 2, batch_first=True)(x, x, x, attn_mask=torch.zeros(3, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attn_mask: .*\(4, 4, 4\), got \(2, 4, 4\)"):  # batch = heads = 2
        module(8, 2, batch_first=True)(x[:2], x[:2], x[:2], attn_mask=torch.zeros(2, 4, 4, dtype=torch.bool))


def test_a_nan_in_a_padded_key_or_value_does_not_leak():
    m = module(8, 2, batch_first=True)
    x = random_tensor((2, 4, 8), torch.float64, outliers=False)
    memory = x.clone()
    memory[1, 3] = math.nan
    padding = torch.tensor([[FALSE] * 4, [FALSE, FALSE, FALSE, TRUE]])
    for need_weights in (True, False):
        out, weights = m(x, memory, memory, key_padding_mask=padding, need_weights=need_weights)
        close(out[1:], m(x[1:], x[1:, :3], x[1:, :3])[0])
        assert weights is None or weights.isfinite().all()


def test_the_module_passes_no_dropout_in_evaluation():
    m = module(8, 2, dropout=0.5).eval()
    x = random_tensor((3, 2, 8), torch.float64)
    close(m(x, x, x, need_weights=False)[0], module(8, 2)(x, x, x)[0], 1e-12)


@pytest.mark.parametrize("options", [dict(bias=False), dict(kdim=8, vdim=8), {}], ids=str)
def test_traced_and_exported_with_optional_parts(options):
    """TorchScript's compiler takes no keyword-only argument (cache) and says so; its tracer and export do the work."""
    m = module(16, 2, **options).eval()
    x, memory = random_tensor((5, 3, 16), torch.float64), random_tensor((5, 3, m.kdim), torch.float64)
    expected = m(x, memory, memory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(torch.jit.trace(m, (x, memory, memory), check_trace=False)(x, memory, memory), expected, 1e-12)
        with pytest.raises(torch.jit.frontend.NotSupportedError, match="keyword-only arguments"):
            torch.jit.script(m)
    close(torch.export.export(m, (x, memory, memory)).module()(x, memory, memory), expected, 1e-12)


@pytest.mark.parametrize("need_weights", [True, False])
def test_forward_mode_through_a_frozen_module_in_evaluation(need_weights):
    m = module(8, 2, batch_first=True).eval().requires_grad_(False)
    theirs = torch_nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).requires_grad_(False)
    theirs.load_state_dict(m.state_dict())
    x, t, mask = (
        random_tensor(s, torch.float64, i, outliers=False) for i, s in enumerate(((2, 5, 8),) * 2 + ((5, 5),))
    )

    def run(layer):  # torch's fused kernel has no forward mode
        return lambda x, mask: layer(x, x, x, attn_mask=mask, need_weights=need_weights or layer is theirs)[0]

    inputs, tangents = (x, mask), (t, mask.cos())
    got, expected = (torch.func.jvp(run(layer), inputs, tangents) for layer in (m, theirs))
    close(got, expected)
    step = 1e-6
    moved = [run(m)(*(a + s * b for a, b in zip(inputs, tangents))) for s in (step, -step)]
    close(got[1], (moved[0] - moved[1]) / (2 * step), 1e-7)
    norms = (lambda x, f=f: f(x, mask).square().sum() for f in map(run, (m, theirs)))
    of_gradient = [torch.func.jvp(torch.func.grad(norm), (x,), (t,))[1] for norm in norms]
    close(*of_gradient)

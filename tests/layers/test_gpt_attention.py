"""`gpt_attention` and nn.CausalSelfAttention: values and every gradient beside torch's own layer with a causal mask."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import gradcheck

from attnjourney import nn
from attnjourney.ops.gpt_attention import gpt_attention
from attnjourney.reference.gpt_attention import gpt_attention as reference_gpt_attention
from tests.support.layer_checks import aten_calls, on_device
from tests.support.mha_cases import assert_results, leaf_of
from tests.support.testing import DTYPES, pairs, random_tensor, row_id

ops = torch.ops.attnjourney


def make_weights(embed, dtype=torch.float64, bias=(True, True)):
    """qkv_weight, qkv_bias, out_weight, out_bias."""
    shapes = (3 * embed, embed), (3 * embed,), (embed, embed), (embed,)
    tensors = [random_tensor(s, dtype, seed=20 + i, outliers=False) / math.sqrt(embed) for i, s in enumerate(shapes)]
    return [tensors[0], tensors[1] if bias[0] else None, tensors[2], tensors[3] if bias[1] else None]


def run(function, x, heads, weights, grad_out, dtype=None, **options):
    """[out, gradients of x and of the weights that are not None]."""
    x, *weights = (leaf_of(t, dtype) for t in (x, *weights))
    out = function(x, heads, *weights, **options)
    return [out, *torch.autograd.grad(out, [t for t in (x, *weights) if t is not None], grad_out.to(out.dtype))]


def torch_causal(x, heads, qkv_weight, qkv_bias, out_weight, out_bias):
    """torch's multi_head_attention_forward under a causal mask, on (seq, batch, embed)."""
    mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
    y = x.transpose(0, 1)
    arguments = (qkv_weight, qkv_bias, None, None, False, 0.0, out_weight, out_bias)
    out = F.multi_head_attention_forward(y, y, y, x.size(2), heads, *arguments, need_weights=False, attn_mask=mask)[0]
    return out.transpose(0, 1)


@pytest.mark.parametrize(
    "row",
    pairs(
        sizes=((2, 5, 8, 2), (1, 17, 12, 3), (3, 1, 6, 1), (2, 33, 32, 4), (1, 70, 40, 5), (2, 9, 6, 6)),
        bias=((True, True), (True, False), (False, True), (False, False)),
        layout=("contiguous", "transposed", "packed", "stepped_last", "offset"),
        dtype=DTYPES,
    ),
    ids=row_id,
)
def test_values_and_gradients_beside_torch(row):
    batch, seq, embed, heads = row["sizes"]
    dtype = row["dtype"]
    x, weights = (
        random_tensor((batch, seq, embed), dtype, 1, row["layout"], False),
        make_weights(embed, dtype, row["bias"]),
    )
    grad_out = random_tensor((batch, seq, embed), dtype, 9, row["layout"], False)
    expected = run(torch_causal, x, heads, weights, grad_out, torch.float64)
    actual = run(gpt_attention, x, heads, weights, grad_out)
    plain = run(reference_gpt_attention, x, heads, weights, grad_out)
    assert all(t.is_contiguous() for t in actual)
    in_double = lambda: run(reference_gpt_attention, x, heads, weights, grad_out, torch.float64)  # noqa: E731
    assert_results(actual, plain, expected, in_double)


def test_each_row_depends_on_the_past_only():
    x, weights = random_tensor((1, 6, 8), torch.float64).requires_grad_(), make_weights(8)
    out = gpt_attention(x, 2, *weights)
    for i in range(6):
        (gradient,) = torch.autograd.grad(out[0, i].sum(), x, retain_graph=True)
        assert gradient[0, : i + 1].any(-1).all() and not gradient[0, i + 1 :].any()


@pytest.mark.parametrize("bias", [(True, True), (True, False), (False, True), (False, False)])
def test_gradcheck(bias):
    x, *weights = (
        leaf_of(t) for t in (random_tensor((2, 3, 4), torch.float64, outliers=False), *make_weights(4, bias=bias))
    )
    wanted = [t for t in (x, *weights) if t is not None]

    def function(*new):
        new = iter(new)
        x, *rest = (t if t is None else next(new) for t in everything)
        return gpt_attention(x, 2, *rest)

    everything = [x, *weights]
    assert gradcheck(function, wanted)


@pytest.mark.parametrize("p", [0.4, 1.0])
def test_gradcheck_dropout(p):
    seed = torch.tensor(11)
    leaves = [leaf_of(t) for t in (random_tensor((2, 4, 4), torch.float64, outliers=False), *make_weights(4))]
    assert gradcheck(lambda x, *w: ops.gpt_attention_forward(x, 2, *w, dropout_p=p, dropout_seed=seed)[0], leaves)


def test_dropout_beside_the_reference():
    x, grad_out = (random_tensor((2, 9, 8), torch.float64, s) for s in (0, 9))
    weights = make_weights(8)

    def seeded(function):
        torch.manual_seed(3)
        return run(function, x, 2, weights, grad_out, dropout_p=0.3)

    torch.testing.assert_close(seeded(gpt_attention), seeded(reference_gpt_attention))


def test_gradients_only_where_asked():
    tensors = [random_tensor((2, 3, 4), torch.float64, outliers=False), *make_weights(4)]
    grad_out = random_tensor((2, 3, 4), torch.float64, 9, outliers=False)
    full = run(gpt_attention, tensors[0], 2, tensors[1:], grad_out)[1:]
    for subset in ([0], [1], [2], [3], [4], [0, 3], [1, 2], [2, 4], [0, 1, 2]):
        x, *weights = (t.detach().requires_grad_(i in subset) for i, t in enumerate(tensors))
        out = gpt_attention(x, 2, *weights)
        gradients = torch.autograd.grad(out, [(x, *weights)[i] for i in subset], grad_out)
        torch.testing.assert_close(gradients, tuple(full[i] for i in subset), rtol=1e-13, atol=1e-13)

    x, *weights = tensors
    out, attn, lse, stats, qkv = ops.gpt_attention_forward(x, 2, *weights)
    for bit, shape in enumerate(((2, 3, 4), (12, 4), (12,), (4, 4), (4,))):
        gradients = ops.gpt_attention_backward(out, x, 2, weights[0], weights[2], attn, lse, stats, qkv, need=1 << bit)
        assert [g.shape for g in gradients] == [shape if i == bit else (0,) for i in range(5)]


@pytest.mark.parametrize("batch, seq", [(0, 3), (2, 0)])
def test_sizes_of_zero(batch, seq):
    x, weights = torch.zeros(batch, seq, 8), make_weights(8, torch.float32)
    out, *gradients = run(gpt_attention, x, 2, weights, torch.ones(batch, seq, 8))
    assert out.shape == gradients[0].shape == (batch, seq, 8)
    assert all(not g.any() for g in gradients)


GOOD = dict(
    x=torch.zeros(2, 3, 8), num_heads=2, qkv_weight=torch.zeros(24, 8), qkv_bias=torch.zeros(24),
    out_weight=torch.zeros(8, 8), out_bias=torch.zeros(8),
)  # fmt: skip
ERRORS = [
    (dict(x=torch.zeros(3, 8)), ValueError, r"x: expected 3 dimensions .*\(3, 8\)"),
    (dict(x=torch.zeros(2, 3, 0)), ValueError, r"x: expected a last dimension of at least 1.*\(2, 3, 0\)"),
    (dict(x=torch.zeros(2, 3, 8, dtype=torch.int32)), RuntimeError, r"x: expected dtype .*torch.int32"),
    (dict(num_heads=0), ValueError, r"num_heads: expected a positive number, got 0"),
    (dict(num_heads=5), ValueError, r"num_heads: expected a divisor of .*8, got 5"),
    (dict(qkv_weight=torch.zeros(8, 24)), ValueError, r"qkv_weight: expected shape \(24, 8\), got \(8, 24\)"),
    (dict(qkv_weight=torch.zeros(24, 8).half()), RuntimeError, r"qkv_weight: expected the dtype of x.*float16"),
    (dict(qkv_bias=torch.zeros(24, 1)), ValueError, r"qkv_bias: expected shape \(24,\), got \(24, 1\)"),
    (dict(qkv_bias=torch.zeros(24).double()), RuntimeError, r"qkv_bias: expected the dtype of x.*float64"),
    (dict(out_weight=torch.zeros(8, 4)), ValueError, r"out_weight: expected shape \(8, 8\), got \(8, 4\)"),
    (dict(out_weight=torch.zeros(8, 8).bfloat16()), RuntimeError, r"out_weight: expected the dtype of x.*bfloat16"),
    (dict(out_bias=torch.zeros(4)), ValueError, r"out_bias: expected shape \(8,\), got \(4,\)"),
    (dict(dropout_p=-0.1), ValueError, r"dropout_p: expected a number between 0 and 1, got -0.1"),
    (dict(dropout_p=math.nan), ValueError, r"dropout_p: expected a number between 0 and 1"),
]  # fmt: skip


@pytest.mark.parametrize("how", ["no_grad", "grad", "meta"])
@pytest.mark.parametrize(
    "change, error, message", ERRORS, ids=[f"{i}_{next(iter(e[0]))}" for i, e in enumerate(ERRORS)]
)
def test_errors(change, error, message, how):
    arguments = {**GOOD, **change}
    if how == "grad":
        arguments = {n: leaf_of(t) if torch.is_tensor(t) and t.is_floating_point() else t for n, t in arguments.items()}
    arguments = on_device("meta" if how == "meta" else "cpu", arguments)
    keywords = {n: arguments.pop(n) for n in ("dropout_p",) if n in arguments}
    with pytest.raises(error, match=message):
        gpt_attention(*arguments.values(), **keywords)


def test_no_copy():
    """Forward: two products. Backward: two for each projection. No copy of query, key, value or of their gradients."""
    x, *weights = (leaf_of(t) for t in (random_tensor((2, 16, 32)), *make_weights(32, torch.float32)))
    outs = []
    calls = aten_calls(lambda: outs.append(gpt_attention(x, 4, *weights)))
    copies = {"clone", "contiguous", "cat", "stack", "zeros"}
    assert copies.isdisjoint(calls), calls
    assert calls.count("addmm") == 2 == calls.count("copy_")  # addmm copies its bias into the result
    grad_out = torch.ones_like(outs[0])
    calls = aten_calls(lambda: torch.autograd.grad(outs[0], [x, *weights], grad_out))
    assert {*copies, "copy_"}.isdisjoint(calls) and calls.count("mm") == 4, calls


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad):
    x, weights = random_tensor((2, 3, 4)).requires_grad_(grad), make_weights(4, torch.float32)
    weights = [t.requires_grad_(grad) for t in weights]
    torch.library.opcheck(ops.gpt_attention.default, (x, 2, *weights), {})
    torch.library.opcheck(ops.gpt_attention_forward.default, (x, 2, weights[0], None, weights[2], None), {})
    out, attn, lse, stats, qkv = (t.detach() for t in ops.gpt_attention_forward(x, 2, *weights))
    for need in (31, 0b01010):
        args = (out, x.detach(), 2, weights[0].detach(), weights[2].detach(), attn, lse, stats, qkv)
        torch.library.opcheck(ops.gpt_attention_backward.default, args, dict(need=need))


def test_compile():
    module = nn.CausalSelfAttention(8, 2, dtype=torch.float64)
    x = random_tensor((2, 5, 8), torch.float64).requires_grad_()

    def step(function):
        out = function(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]

    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled), step(module), rtol=1e-12, atol=1e-12)


def test_torch_func():
    """Per-sample gradients of a module, beside those taken one by one in eager mode."""
    module = nn.CausalSelfAttention(8, 2, dtype=torch.float64)
    x = random_tensor((3, 5, 8), torch.float64)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters, sample):
        return torch.func.functional_call(module, parameters, (sample[None],)).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        module.zero_grad()
        module(sample[None]).square().sum().backward()
        for name, p in module.named_parameters():
            torch.testing.assert_close(gradients[name][i], p.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("grad", [False, True])
def test_autocast(grad):
    module, x = nn.CausalSelfAttention(16, 2), random_tensor((2, 5, 16), outliers=False).requires_grad_(grad)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    rounded = nn.CausalSelfAttention(16, 2).bfloat16()
    rounded.load_state_dict(module.state_dict())
    assert torch.equal(out, rounded(x.bfloat16()))
    if grad:
        out.float().sum().backward()
        assert x.grad.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in module.parameters())


def test_backward_inside_autocast():
    """Autocast around the backward of a float32 forward changes nothing: no product of ours is on its lists."""
    x, *weights = (leaf_of(t) for t in (random_tensor((2, 5, 8)), *make_weights(8, torch.float32)))
    out = gpt_attention(x, 2, *weights)
    expected = torch.autograd.grad(out.sum(), [x, *weights], retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.autograd.grad(out.sum(), [x, *weights])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_module_drops_in_training_only():
    module, x = nn.CausalSelfAttention(8, 2, dropout=0.5), random_tensor((2, 6, 8))
    module.eval()
    assert torch.equal(module(x), module(x))
    module.train()
    torch.manual_seed(1)
    first = module(x)
    assert not torch.equal(first, module(x))
    torch.manual_seed(1)
    assert torch.equal(first, module(x))
    with pytest.raises(ValueError, match="num_heads: expected a divisor of embed_dim, 8, got 3"):
        nn.CausalSelfAttention(8, 3)
    assert set(dict(nn.CausalSelfAttention(8, 2, bias=False).named_parameters())) == {
        "qkv_proj.weight",
        "out_proj.weight",
    }

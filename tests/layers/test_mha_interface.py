"""`mha` towards its callers: errors, copies it does not make, opcheck, torch.compile, torch.func, autocast."""

import math

import pytest
import torch

from attnjourney import nn
from attnjourney.ops.mha import mha
from tests.support.layer_checks import aten_calls, on_device
from tests.support.mha_cases import MASKS, leaf_of, make_inputs, make_mask, make_weights, torch_mha
from tests.support.testing import random_tensor

ops = torch.ops.attnjourney

# ---------------------------------------------------------------------------------------------------- errors

GOOD = dict(
    query=torch.zeros(2, 3, 8), key=torch.zeros(2, 4, 8), value=torch.zeros(2, 4, 8), num_heads=2,
    in_proj_weight=torch.zeros(24, 8), in_proj_bias=torch.zeros(24), out_proj_weight=torch.zeros(8, 8),
    out_proj_bias=torch.zeros(8),
)  # fmt: skip
ERRORS = [
    (dict(query=torch.zeros(3, 8)), ValueError, r"query: expected 3 dimensions .*\(3, 8\)"),
    (dict(query=torch.zeros(2, 3, 8, dtype=torch.int64)), RuntimeError, r"query: expected dtype .*torch.int64"),
    (dict(key=torch.zeros(4, 8)), ValueError, r"key: expected 3 dimensions .*\(4, 8\)"),
    (dict(key=torch.zeros(1, 4, 8)), ValueError, r"key: expected shape \(2, 4, 8\).*\(1, 4, 8\)"),
    (dict(key=torch.zeros(2, 4, 6)), ValueError, r"key: expected shape \(2, 4, 8\).*\(2, 4, 6\)"),
    (dict(key=torch.zeros(2, 4, 8).double()), RuntimeError, r"key: expected the dtype of query.*float64"),
    (dict(value=torch.zeros(2, 5, 8)), ValueError, r"value: expected shape \(2, 4, 8\).*\(2, 5, 8\)"),
    (dict(value=torch.zeros(2, 4, 8).bfloat16()), RuntimeError, r"value: expected the dtype of query.*bfloat16"),
    (dict(num_heads=0), ValueError, r"num_heads: expected a positive number, got 0"),
    (dict(num_heads=-2), ValueError, r"num_heads: expected a positive number, got -2"),
    (dict(num_heads=3), ValueError, r"num_heads: expected a divisor of .*8, got 3"),
    (dict(in_proj_weight=torch.zeros(8, 24)), ValueError, r"in_proj_weight: expected shape \(24, 8\), got \(8, 24\)"),
    (dict(in_proj_weight=torch.zeros(24, 8).half()), RuntimeError, r"in_proj_weight: expected the dtype of query"),
    (dict(in_proj_bias=torch.zeros(8)), ValueError, r"in_proj_bias: expected shape \(24,\), got \(8,\)"),
    (dict(in_proj_bias=torch.zeros(24).half()), RuntimeError, r"in_proj_bias: expected the dtype of query"),
    (dict(out_proj_weight=torch.zeros(8)), ValueError, r"out_proj_weight: expected shape \(8, 8\), got \(8,\)"),
    (dict(out_proj_weight=torch.zeros(8, 8).double()), RuntimeError, r"out_proj_weight: expected the dtype"),
    (dict(out_proj_bias=torch.zeros(1)), ValueError, r"out_proj_bias: expected shape \(8,\), got \(1,\)"),
    (dict(attn_mask=torch.zeros(3, 3)), ValueError, r"attn_mask: expected shape .*\(3, 4\) or .*\(4, 3, 4\).*\(3, 3\)"),
    (dict(attn_mask=torch.zeros(1, 4)), ValueError, r"attn_mask: expected shape"),  # no broadcasting here
    (dict(attn_mask=torch.zeros(2, 3, 4)), ValueError, r"attn_mask: expected shape"),
    (dict(attn_mask=torch.zeros(3, 4).int()), RuntimeError, r"attn_mask: expected dtype torch.bool.*torch.int32"),
    (dict(attn_mask=torch.zeros(3, 4).double()), RuntimeError, r"attn_mask: expected dtype torch.bool.*torch.float64"),
    (dict(key_padding_mask=torch.zeros(4, 2)), ValueError, r"key_padding_mask: expected shape .*\(2, 4\), got"),
    (dict(key_padding_mask=torch.zeros(2, 4).long()), RuntimeError, r"key_padding_mask: expected dtype torch.bool"),
    (dict(dropout_p=1.5), ValueError, r"dropout_p: expected a number between 0 and 1, got 1.5"),
    (dict(dropout_p=math.nan), ValueError, r"dropout_p: expected a number between 0 and 1"),
    (dict(query=torch.zeros(2, 3, 0)), ValueError, r"query: expected a last dimension of at least 1"),
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
    keywords = {n: arguments.pop(n) for n in (*MASKS, "dropout_p") if n in arguments}
    with pytest.raises(error, match=message):
        mha(*arguments.values(), **keywords)


# ---------------------------------------------------------------------------------------------------- no copies


@pytest.mark.parametrize("sharing, products", [("qkv", 2), ("q kv", 3), ("q k v", 4)])
def test_no_copy(sharing, products):
    inputs = [leaf_of(t) for t in make_inputs("q k v", 2, 16, 16, 32, torch.float32)]
    inputs = [inputs[next(i for i, group in enumerate(sharing.split()) if name in group)] for name in "qkv"]
    weights = [leaf_of(t) for t in make_weights(32, torch.float32)]
    outs = []
    calls = aten_calls(lambda: outs.append(mha(*inputs, 4, *weights)))
    copies = {"clone", "contiguous", "cat", "stack", "zeros"}
    assert copies.isdisjoint(calls), calls
    assert calls.count("addmm") == products == calls.count("copy_")  # addmm copies its bias into the result
    grad_out = torch.ones_like(outs[0])
    calls = aten_calls(lambda: torch.autograd.grad(outs[0], [*{id(t): t for t in inputs}.values(), *weights], grad_out))
    assert {*copies, "copy_", "add", "add_"}.isdisjoint(calls), calls
    assert calls.count("mm") == 2 * products


# ---------------------------------------------------------------------------------------------------- torch integration


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad):
    (query, key, value), weights = make_inputs("q k v", 2, 3, 4, 4, torch.float32), make_weights(4, torch.float32)
    mask, padding = torch.zeros(4, 3, 4), torch.zeros(2, 4, dtype=torch.bool)
    if grad:
        query, key, value, mask = (leaf_of(t) for t in (query, key, value, mask))
        weights = [leaf_of(t) for t in weights]
    options = dict(attn_mask=mask, key_padding_mask=padding, is_causal=True)
    torch.library.opcheck(ops.mha.default, (query, key, value, 2, *weights), options)
    torch.library.opcheck(ops.mha.default, (query, query, query, 2, weights[0], None, weights[2], None), {})
    torch.library.opcheck(ops.mha_forward.default, (query, key, value, 2, *weights), options)
    torch.library.opcheck(ops.mha_forward.default, (query, key, None, 2, *weights), {})
    out, attn, lse, stats, projected = (t.detach() for t in ops.mha_forward(query, key, None, 2, *weights, **options))
    query, key, mask, *weights = (t.detach() for t in (query, key, mask, *weights))
    for need in (511, 0b010011010):
        args = (out, query, key, None, 2, weights[0], weights[2], mask, padding, attn, lse, stats, projected)
        torch.library.opcheck(ops.mha_backward.default, args, dict(is_causal=True, need=need))


def test_compile():
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = random_tensor((2, 5, 8), torch.float64).requires_grad_()
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True

    def step(function):
        out, _ = function(x, x, x, key_padding_mask=padding, need_weights=False, is_causal=True)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]

    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled), step(module), rtol=1e-12, atol=1e-12)


def test_torch_func():
    inputs, weights = make_inputs("q kv", 3, 4, 5, 8), make_weights(8)
    mask = make_mask("float", (4, 5), torch.float64)

    def loss(function, query, key, in_weight):
        query, key = query[None], key[None]
        return function(query, key, key, 2, in_weight, *weights[1:], attn_mask=mask).square().sum()

    def per_sample(function):
        gradient = torch.func.grad(lambda *x: loss(function, *x), argnums=(0, 1, 2))
        return torch.func.vmap(gradient, in_dims=(0, 0, None))(inputs[0], inputs[1], weights[0])

    expected = [
        torch.func.grad(lambda *x: loss(torch_loss_mha, *x), argnums=(0, 1, 2))(*x, weights[0])
        for x in zip(*inputs[:2])
    ]
    torch.testing.assert_close(
        per_sample(ops.mha), tuple(torch.stack(g) for g in zip(*expected)), rtol=1e-10, atol=1e-10
    )


def torch_loss_mha(*args, **kwargs):
    """torch.nn.MultiheadAttention's function: the reference looks at data, which torch.func does not allow."""
    return torch_mha(*args, **{"key_padding_mask": None, "is_causal": False, **kwargs})


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_beside_torch(grad):
    torch.manual_seed(0)
    ours, theirs = (cls(16, 2, batch_first=True) for cls in (nn.MultiheadAttention, torch.nn.MultiheadAttention))
    theirs.load_state_dict(ours.state_dict())
    x, mask = random_tensor((2, 5, 16), outliers=False).requires_grad_(grad), torch.zeros(5, 5)
    results = []
    for module in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = module(x, x, x, need_weights=False, attn_mask=mask)
        gradients = torch.autograd.grad(out.float().sum(), [x, *module.parameters()]) if grad else ()
        results.append([out, *gradients])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)

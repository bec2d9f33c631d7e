"""`mha` beside torch.nn.MultiheadAttention: values, every gradient, masks, layouts."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import gradcheck

from attnjourney.ops.mha import mha
from attnjourney.reference.mha import mha as reference_mha
from tests.support.mha_cases import (
    MASKS,
    assert_results,
    leaf_of,
    make_inputs,
    make_mask,
    make_weights,
    plain_mha,
    run,
    torch_mha,
)
from tests.support.testing import DTYPES, pairs, random_tensor, row_id

ops = torch.ops.attnjourney

GRID = pairs(
    sharing=("qkv", "qk v", "q kv", "qv k", "q k v"),
    attn_mask=("none", "bool 2", "bool 3", "float 2", "float 3", "float32 2"),
    key_padding_mask=("none", "bool", "float", "float32"),
    is_causal=(False, True),
    bias=(True, False),
    sizes=((2, 5, 7, 8, 2), (1, 9, 3, 12, 3), (3, 1, 4, 6, 1), (2, 17, 33, 32, 4)),
    dtype=DTYPES,
)


@pytest.mark.parametrize("row", GRID, ids=row_id)
def test_values_and_gradients_beside_torch(row):
    batch, q_len, kv_len, embed, heads = row["sizes"]
    if "q" in row["sharing"].replace("q ", " "):  # key or value is query
        kv_len = q_len
    dtype = row["dtype"]
    inputs = make_inputs(row["sharing"], batch, q_len, kv_len, embed, dtype)
    weights = make_weights(embed, dtype, row["bias"])
    kind, _, dims = row["attn_mask"].partition(" ")
    masks = (
        make_mask(kind, ((batch * heads,) if dims == "3" else ()) + (q_len, kv_len), dtype),
        make_mask(row["key_padding_mask"], (batch, kv_len), dtype),
    )
    grad_out = random_tensor((batch, q_len, embed), dtype, seed=9, outliers=False)
    args = (inputs, heads, weights, masks, grad_out)

    expected = run(torch_mha, *args, dtype=torch.float64, is_causal=row["is_causal"])
    actual = run(mha, *args, is_causal=row["is_causal"])
    plain = run(plain_mha, *args, is_causal=row["is_causal"])
    in_double = lambda: run(reference_mha, *args, dtype=torch.float64, is_causal=row["is_causal"])  # noqa: E731
    assert_results(actual, plain, expected, in_double)


# ---------------------------------------------------------------------------------------------------- gradients

CASES = {
    "self": dict(),
    "causal": dict(is_causal=True),
    "no_bias": dict(bias=False),
    "cross": dict(sharing="q k v"),
    "key_is_value": dict(sharing="q kv"),
    "query_is_key": dict(sharing="qk v"),
    "bool_mask": dict(attn_mask="bool 2"),
    "bool_masks": dict(attn_mask="bool 3", key_padding_mask="bool", sharing="q kv"),
    "float_mask": dict(attn_mask="float 2", is_causal=True),
    "float_masks": dict(attn_mask="float 3", key_padding_mask="float"),
    "float_bool": dict(attn_mask="float 2", key_padding_mask="bool", sharing="q k v"),
    "bool_float": dict(attn_mask="bool 3", key_padding_mask="float"),
}


def case(sharing="qkv", attn_mask="none", key_padding_mask="none", bias=True, is_causal=False, lengths=(3, 4)):
    """(function of the leaves, leaves, a description by name) of float64 inputs with batch 2, embed 4, 2 heads."""
    q_len, kv_len = lengths if sharing in ("q kv", "q k v") else lengths[:1] * 2
    inputs = [leaf_of(t) for t in {id(t): t for t in make_inputs(sharing, 2, q_len, kv_len, 4)}.values()]
    where = [next(i for i, group in enumerate(sharing.split()) if name in group) for name in "qkv"]
    weights = [leaf_of(t) for t in make_weights(4, bias=bias)]
    kind, _, dims = attn_mask.partition(" ")
    masks = [
        make_mask(kind, ((4,) if dims == "3" else ()) + (q_len, kv_len), torch.float64),
        make_mask(key_padding_mask, (2, kv_len), torch.float64),
    ]
    # finite differences of -inf are NaN: the leaf is finite, -inf comes in by masked_fill
    hidden = [None if m is None or m.dtype == torch.bool else m == -math.inf for m in masks]
    leaves = [m if h is None else m.masked_fill(h, 0.0).requires_grad_() for m, h in zip(masks, hidden)]
    everything = [*inputs, *weights, *leaves]
    wanted = [t for t in everything if t is not None and t.requires_grad]

    def function(*new):
        new = iter(new)
        *rest, attn, padding = [next(new) if t is not None and t.requires_grad else t for t in everything]
        x, w = rest[: len(inputs)], rest[len(inputs) :]
        given = [m if h is None else m.masked_fill(h, -math.inf) for m, h in zip((attn, padding), hidden)]
        return mha(*(x[i] for i in where), 2, *w, **dict(zip(MASKS, given)), is_causal=is_causal)

    return function, wanted


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    assert gradcheck(*case(**CASES[name]))


def test_gradcheck_dropout():
    function, leaves = case(attn_mask="float 2")
    seed = torch.tensor(7)

    def dropped(query, *rest):
        *weights, mask = rest
        options = dict(attn_mask=mask, dropout_p=0.4, dropout_seed=seed)
        return ops.mha_forward(query, None, None, 2, *weights, **options)[0]

    assert gradcheck(dropped, leaves)


def test_gradients_only_where_asked():
    function, leaves = case(sharing="q k v", attn_mask="float 3", key_padding_mask="float")
    out = function(*leaves)
    grad_out = random_tensor(out.shape, torch.float64, outliers=False)
    full = torch.autograd.grad(out, leaves, grad_out)
    wanted = [[i] for i in range(len(leaves))] + [[0, 3], [1, 4], [2, 7], [5, 6], [0, 1, 2], [3, 4, 5, 6]]
    for subset in wanted:
        some = [t.detach().requires_grad_(i in subset) for i, t in enumerate(leaves)]
        out = function_of_everything(some)
        gradients = torch.autograd.grad(out, [some[i] for i in subset], grad_out)
        for i, gradient in zip(subset, gradients):
            torch.testing.assert_close(gradient, full[i], rtol=1e-13, atol=1e-13)


def function_of_everything(leaves):
    hidden = [make_mask("float", shape, torch.float64) == -math.inf for shape in ((4, 3, 4), (2, 4))]
    masks = [m.masked_fill(h, -math.inf) for m, h in zip(leaves[7:], hidden)]
    return mha(*leaves[:3], 2, *leaves[3:7], **dict(zip(MASKS, masks)))


def test_backward_returns_nothing_unasked():
    inputs, weights = make_inputs("q k v", 2, 3, 4, 4), make_weights(4)
    mask = make_mask("float", (3, 4), torch.float64)
    out, attn, lse, stats, projected = ops.mha_forward(*inputs, 2, *weights, attn_mask=mask)
    for bit, shape in enumerate(((2, 3, 4), (2, 4, 4), (2, 4, 4), (12, 4), (12,), (4, 4), (4,), (3, 4), (0,))):
        args = (out, *inputs, 2, weights[0], weights[2], mask, None, attn, lse, stats, projected)
        gradients = ops.mha_backward(*args, need=1 << bit)
        assert [g.shape for g in gradients] == [shape if i == bit else (0,) for i in range(9)]


def test_a_detached_alias_gets_no_gradient():
    """key has query's memory but is another variable: sharing is decided by identity, not by address."""
    (x, _, _), weights = make_inputs("qkv", 2, 3, 3, 4), make_weights(4)
    x.requires_grad_()
    results = []
    for function in (mha, reference_mha):
        results.append(torch.autograd.grad(function(x, x.detach(), x.detach(), 2, *weights).sum(), x)[0])
        a, b = x.view_as(x), x.view_as(x)
        results.append(torch.autograd.grad(function(a, b, b, 2, *weights).square().sum(), [a])[0])
    torch.testing.assert_close(results[:2], results[2:], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["attn_bool", "attn_float", "padding_bool", "padding_float", "together"])
def test_a_row_without_visible_key_is_the_bias(where, dtype):
    x, weights = random_tensor((2, 3, 8), dtype, outliers=False), make_weights(8, dtype)
    attn, padding = torch.zeros(3, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)
    if where.startswith("attn"):
        attn[1], empty = True, (slice(None), 1)
    elif where.startswith("padding"):
        padding[1], empty = True, (1,)
    else:  # each mask leaves keys, both together leave none to row 2 of item 0
        attn[2, :2], padding[0, 2], empty = True, True, (0, 2)
    masks = [attn, padding]
    if where.endswith("float"):
        masks = [torch.zeros(m.shape, dtype=dtype).masked_fill(m, -math.inf) for m in masks]
    masks = [leaf_of(m) for m in masks]
    x, *weights = (leaf_of(t) for t in (x, *weights))
    out = mha(x, x, x, 2, *weights, **dict(zip(MASKS, masks)))
    assert torch.equal(out[empty], weights[3].expand(out[empty].shape))
    leaves = [t for t in (x, *weights, *masks) if t.requires_grad]
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True))
    for g, t in zip(torch.autograd.grad(out[empty].sum(), leaves), leaves):  # the row alone: only the bias moves it
        assert g.any() == (t is weights[3])


def test_nan_in_a_padded_key_does_not_leak():
    (query, key, value), weights = make_inputs("q k v", 2, 3, 4, 8), make_weights(8)
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[0, 2:] = True
    expected = mha(query, key, value, 2, *weights, key_padding_mask=padding)
    key[0, 2:], value[0, 3] = math.nan, math.nan
    assert torch.equal(mha(query, key, value, 2, *weights, key_padding_mask=padding), expected)
    assert mha(query, key, value, 2, *weights)[0].isnan().all()


def test_true_is_blocked():
    """The opposite of `attention`: with the future blocked, the first row sees the first key alone."""
    x, weights = random_tensor((1, 4, 8), torch.float64), make_weights(8)
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    out = mha(x, x, x, 2, *weights, attn_mask=future)
    torch.testing.assert_close(out, mha(x, x, x, 2, *weights, is_causal=True), rtol=1e-13, atol=1e-13)
    value = F.linear(x[:, :1], weights[0][16:], weights[1][16:])
    torch.testing.assert_close(out[:, :1], F.linear(value, *weights[2:]), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- layouts, sizes


@pytest.mark.parametrize("layout", ["transposed", "packed", "stepped_rows", "stepped_last", "offset", "columns"])
def test_layout_of_inputs_changes_nothing(layout):
    inputs, weights = [random_tensor((3, 5, 8), torch.float64, s) for s in range(3)], make_weights(8)
    strided = [random_tensor((3, 5, 8), torch.float64, s, layout) for s in range(3)]
    mask, grad_out = random_tensor((6, 5, 5), torch.float64), random_tensor((3, 5, 8), torch.float64, 9)
    expected = run(mha, inputs, 2, weights, (mask, None), grad_out)
    other = [t.mT.contiguous().mT if t.dim() == 2 else t for t in weights]
    mask = random_tensor((6, 5, 5), torch.float64, layout=layout)
    # leaf_of keeps strides; grad_out is strided too
    actual = run(mha, strided, 2, other, (mask, None), random_tensor((3, 5, 8), torch.float64, 9, layout))
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_seq_first_inputs_and_expanded_gradient():
    x, weights = random_tensor((5, 3, 8), torch.float64).transpose(0, 1).requires_grad_(), make_weights(8)
    results = [torch.autograd.grad(f(x, x, x, 2, *weights).sum(), x)[0] for f in (mha, reference_mha)]
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("batch, q_len, kv_len", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_sizes_of_zero(batch, q_len, kv_len):
    inputs, weights = make_inputs("q kv", batch, q_len, kv_len, 8), make_weights(8)
    masks = (torch.zeros(q_len, kv_len, dtype=torch.float64), torch.zeros(batch, kv_len, dtype=torch.bool))
    out, *gradients = run(mha, inputs, 2, weights, masks, torch.ones(batch, q_len, 8))
    assert torch.equal(out, weights[3].expand(batch, q_len, 8))
    assert torch.equal(gradients.pop(5), torch.full((8,), float(batch * q_len), dtype=torch.float64))
    assert all(not g.any() for g in gradients)


# ---------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_beside_the_reference(dtype):
    inputs, weights = make_inputs("qkv", 2, 9, 9, 8, dtype), make_weights(8, dtype)
    grad_out = random_tensor((2, 9, 8), dtype, 9, outliers=False)

    def seeded(function, dtype=None):
        torch.manual_seed(3)
        return run(function, inputs, 2, weights, (None, None), grad_out, dtype, dropout_p=0.3)

    actual = seeded(mha)
    in_double = lambda: seeded(reference_mha, torch.float64)  # noqa: E731
    assert_results(actual, seeded(reference_mha), in_double(), in_double)
    assert not torch.equal(actual[0], mha(*inputs, 2, *weights))
    out = mha(*inputs, 2, *weights, dropout_p=1.0)
    assert torch.equal(out, weights[3].expand(out.shape))

"""attention_weights and merge_states."""

import math

import pytest
import torch

import attnjourney
from attnjourney import reference
from tests.support.options_cases import OPTIONS, make
from tests.support.testing import DTYPES, random_tensor

NO_DROPOUT = [name for name in OPTIONS if name != "dropout"]


@pytest.mark.parametrize("name", NO_DROPOUT)
def test_weights_with_every_option(name):
    for dtype in DTYPES:
        q, k, v, arguments = make([name], dtype, q_len=70, kv_len=150)
        weights = attnjourney.attention_weights(q, k, **arguments)
        expected = reference.attention_weights(q.double(), k.double(), **as_double(arguments))
        eps = torch.finfo(dtype).eps
        assert weights.dtype == dtype and weights.shape == expected.shape
        assert not weights[expected == 0].any()
        assert dtype == torch.float16 or weights[expected > 0].all()  # float16 underflows
        bound = 2 * eps if dtype.itemsize == 2 else 64 * eps  # one rounding; the scores' own error
        assert (weights.double() - expected).abs().max() <= bound, (name, dtype)


def as_double(arguments):
    return {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }


def test_chosen_rows_and_heads():
    q, k, v, arguments = make(["alibi", "left", "sinks", "query_lengths"], q_len=130, kv_len=150)
    whole = attnjourney.attention_weights(q, k, **arguments)
    _, lse = attnjourney.attention(q, k, v, return_lse=True, **arguments)
    for rows in ([0], [129, 0, 1, 2, 64, 64], list(range(40, 120)), []):
        for heads in (None, [3, 1]):
            part = attnjourney.attention_weights(q, k, lse=lse, rows=rows, heads=heads, **arguments)
            expected = whole[:, range(4) if heads is None else heads][:, :, rows]
            torch.testing.assert_close(part, expected, atol=1e-15, rtol=1e-13)


def test_weights_times_values_is_the_output():
    q, k, v, arguments = make(["causal", "mask"])
    weights = attnjourney.attention_weights(q, k, **arguments)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), attnjourney.attention(q, k, v, **arguments))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=torch.float64))


def test_compiled_in_one_graph():
    q, k, _, arguments = make(["causal", "sinks"])
    seen = attnjourney.attention_weights(q, k, rows=[3, 1], **arguments)
    compiled = torch.compile(attnjourney.attention_weights, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, rows=[3, 1], **arguments), seen)
    with torch.no_grad():
        assert torch.equal(compiled(q.requires_grad_(), k, rows=[3, 1], **arguments), seen)


def test_weights_of_the_worked_example():
    scores = torch.tensor(
        [
            [-0.012167113, -0.55046248, -0.37711906, 0.39070404],
            [0.3097055, -0.17063819, -0.31822443, -0.48890033],
            [-0.088825345, 0.17663771, 0.49089196, -0.4052847],
            [-0.2706871, 0.59133291, 0.0097594587, 0.29229057],
        ]
    )
    weights = attnjourney.attention_weights(2 * scores, torch.eye(4), is_causal=True)
    assert weights.triu(1).eq(0).all()
    expected = torch.tensor([0.1550976, 0.3672617, 0.2053059, 0.2723348])
    torch.testing.assert_close(weights[3], expected, atol=1e-6, rtol=1e-6)


def test_the_operator_has_no_derivative_and_says_so():
    q = random_tensor((2, 5, 4)).requires_grad_()
    index = torch.arange(5), torch.arange(2)
    weights = torch.ops.attnjourney._attention_weights(q, q, torch.zeros(2, 5), None, *index, None, False)
    with pytest.raises(NotImplementedError, match="attention_weights"):
        weights.sum().backward()
    with pytest.raises(NotImplementedError, match="attention_weights"):
        torch.func.grad(lambda q: attnjourney.attention_weights(q, q).sum())(q.detach())


@pytest.mark.parametrize(
    "changes, error, pattern",
    [
        (dict(rows=[5]), ValueError, "rows.*0 to 4.*5"),
        (dict(heads=[-1]), ValueError, "heads.*-1"),
        (dict(lse=torch.zeros(2, 4)), ValueError, "lse"),
        (dict(lse=torch.zeros(2, 5).double()), RuntimeError, "lse.*float32.*float64"),
    ],
)
def test_wrong_arguments(changes, error, pattern):
    q = random_tensor((2, 5, 4))
    with pytest.raises(error, match=pattern):
        attnjourney.attention_weights(q, q, **changes)


# ---------------------------------------------------------------------------------------------------- merge_states


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merging_parts_equals_the_whole(dtype):  # keys 0..5 / 6..15 / none
    q, k, v = (random_tensor((2, 2, 16, 128), dtype, s, outliers=False) for s in range(3))
    whole, lse = attnjourney.attention(q, k, v, return_lse=True)
    assert lse.shape == (2, 2, 16) and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = (q.double() @ k.double().mT / 128**0.5).logsumexp(-1)  # natural logarithm
    torch.testing.assert_close(lse.double(), exact, atol=1e-5, rtol=1e-5)
    parts = [
        attnjourney.attention(q, k[..., a:b, :], v[..., a:b, :], return_lse=True)
        for a, b in ((0, 6), (6, 16), (16, 16))
    ]
    for order in ((0, 1, 2), (2, 1, 0)):
        out, merged = parts[order[0]]
        for i in order[1:]:
            out, merged = attnjourney.merge_states(out, merged, *parts[i])
        tolerance = 4 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(out, whole, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(merged, lse, atol=1e-5, rtol=1e-5)


def test_merge_with_empty_parts_has_no_nan():
    out = random_tensor((3, 4), torch.float64).requires_grad_()
    lse = torch.tensor([0.5, -math.inf, -math.inf], dtype=torch.float64, requires_grad=True)
    other = torch.full((3, 4), math.nan, dtype=torch.float64)
    other_lse = torch.full((3,), -math.inf, dtype=torch.float64)
    merged, total = attnjourney.merge_states(out, lse, other, other_lse)
    assert torch.equal(merged[0], out[0]) and not merged[1:].any()
    assert total.tolist() == [0.5, -math.inf, -math.inf]
    grads = torch.autograd.grad(merged.sum() + total[0], (out, lse))
    assert all(g.isfinite().all() for g in grads) and not grads[0][1:].any()


def test_merge_gradcheck_and_reference():
    a, b = (random_tensor((2, 3, 4), torch.float64, s).requires_grad_() for s in (1, 2))
    la, lb = (random_tensor((2, 3), torch.float64, s).requires_grad_() for s in (3, 4))
    for ours, theirs in zip(attnjourney.merge_states(a, la, b, lb), reference.merge_states(a, la, b, lb)):
        torch.testing.assert_close(ours, theirs)
    torch.autograd.gradcheck(attnjourney.merge_states, (a, la, b, lb), check_forward_ad=True)
    torch.autograd.gradgradcheck(attnjourney.merge_states, (a, la, b, lb))


def test_merge_of_wrong_shapes():
    x, lse = torch.ones(2, 3, 4), torch.ones(2, 3)
    with pytest.raises(ValueError, match="lse_a.*out_a"):
        attnjourney.merge_states(x, lse[0], x, lse)
    with pytest.raises(ValueError, match="out_b.*out_a"):
        attnjourney.merge_states(x, lse, x[0], lse)
    with pytest.raises(RuntimeError, match="out_b.*float32.*float64"):
        attnjourney.merge_states(x, lse, x.double(), lse)

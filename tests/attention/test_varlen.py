"""varlen_attention: packed sequences equal a loop over them; rows past the last one are zero."""

import itertools
import math

import pytest
import torch

import attnjourney
from attnjourney import reference
from attnjourney.reference.dropout import dropout_keep_mask
from tests.support.options_cases import check, leaves_of
from tests.support.testing import DTYPES, LSE_DTYPE, pairs, plain_run, poison_memory, random_tensor, row_id, threads

Q_LENGTHS, K_LENGTHS = (5, 0, 17, 1, 40), (9, 3, 17, 0, 70)


def offsets(lengths, dtype=torch.int64):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def packed(dtype, q_lengths=Q_LENGTHS, k_lengths=K_LENGTHS, q_heads=4, kv_heads=2, dim=8, v_dim=6, extra=0):
    q = random_tensor((sum(q_lengths) + extra, q_heads, dim), dtype, 1, outliers=False)
    k = random_tensor((sum(k_lengths) + extra, kv_heads, dim), dtype, 2, outliers=False)
    v = random_tensor((sum(k_lengths) + extra, kv_heads, v_dim), dtype, 3, outliers=False)
    return (q, k, v), dict(cu_seqlens_q=offsets(q_lengths), cu_seqlens_k=offsets(k_lengths))


def plain_varlen(tensors, arguments, gradients, ulps):
    """plain_run of each sequence; gradients of what they share are added up."""
    arguments = dict(arguments)
    q_ends, k_ends = (arguments.pop(f"cu_seqlens_{n}").tolist() for n in "qk")
    longest = [max((b - a for a, b in zip(x, x[1:])), default=0) for x in (q_ends, k_ends)]
    seed, (q, k, v), (grad_out, grad_lse) = arguments.pop("dropout_seed", None), tensors, gradients
    keep = [None] * len(q_ends)
    if seed is not None:
        keep = dropout_keep_mask(seed, len(q_ends) - 1, q.size(1), *longest, arguments["dropout_p"])
    shared = [n for n in ("sinks", "alibi_slopes") if arguments.get(n) is not None]
    shapes = [(*q.shape[:2], v.size(2)), q.shape[:2], q.shape, k.shape, v.shape, *(arguments[n].shape for n in shared)]
    wide = LSE_DTYPE.get(q.dtype, torch.float32)
    dtypes = [q.dtype, wide, *[q.dtype] * 3, *(arguments[n].dtype for n in shared)]
    values = [torch.zeros(s, dtype=t) for s, t in zip(shapes, dtypes)]
    values[1] -= math.inf
    variances = [torch.zeros(s, dtype=torch.float64) for s in shapes]
    for i, (q0, q1, k0, k1) in enumerate(zip(q_ends, q_ends[1:], k_ends, k_ends[1:])):
        own_keep = None if keep[i] is None else keep[i][:, : q1 - q0, : k1 - k0]
        own = (q[q0:q1].transpose(0, 1), k[k0:k1].transpose(0, 1), v[k0:k1].transpose(0, 1), None)
        sides = (grad_out[q0:q1].transpose(0, 1), grad_lse[:, q0:q1])
        x, roundings = plain_run(own, *sides, own_keep, ulps, enable_gqa=True, **arguments)
        rows = [slice(q0, q1)] * 3 + [slice(k0, k1)] * 2
        for j, (value, rounding) in enumerate(zip(x, roundings)):
            if j < 5:
                values[j][rows[j]] = value.transpose(0, 1)
                variances[j][rows[j]] = rounding.transpose(0, 1).square()
            else:
                values[j] += value
                variances[j] += rounding.square()
    values[1], variances[1] = values[1].mT, variances[1].mT
    return values, [x.sqrt() for x in variances]


def check_varlen(tensors, arguments, label=""):
    return check(tensors, arguments, attnjourney.varlen_attention, reference.varlen_attention, plain_varlen, label)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "bottom_right": dict(is_causal=True, causal_alignment="bottom_right"),
    "window": dict(window_size=(4, 1), causal_alignment="bottom_right"),
    "prefix": dict(is_causal=True, window_size=(2, -1), prefix_length=2),
    "softcap": dict(softcap=2.0),
    "scale": dict(scale=-0.3),
    "sinks": dict(sinks=SINKS),
    "alibi": dict(alibi_slopes=SINKS.abs() / 4, is_causal=True),
    "dropout": dict(dropout_p=0.25, dropout_seed=torch.tensor(7)),
}


@pytest.mark.parametrize("row", pairs(option=list(OPTIONS), dtype=DTYPES, extra=(0, 3)), ids=row_id)
def test_equals_a_loop(row):
    tensors, arguments = packed(row["dtype"], extra=row["extra"])
    poison_memory()
    result = check_varlen(tensors, {**arguments, **OPTIONS[row["option"]]}, row["option"])
    end = sum(Q_LENGTHS)
    assert not result["out"][end:].any() and not result["grad_query"][end:].any()
    assert (result["lse"][:, end:] == -math.inf).all()
    for name in ("grad_key", "grad_value"):
        assert not result[name][sum(K_LENGTHS) :].any()


@pytest.mark.parametrize("option", OPTIONS)
def test_gradcheck(option):
    tensors, arguments = packed(torch.float64, (2, 0, 3), (3, 2, 0), 4, 2, 3, 2, extra=1)
    tensors, arguments, leaves = leaves_of(tensors, {**arguments, **OPTIONS[option]}, torch.float64)

    def function(*inputs):
        call = {**arguments, **dict(zip(leaves, inputs))}
        out, lse = attnjourney.varlen_attention(**call, return_lse=True)
        return out, torch.where(lse.isfinite(), lse, 0.0)

    torch.autograd.gradcheck(function, tuple(leaves.values()), fast_mode=True)


def test_empty_items_and_a_length_of_one():  # 9 query heads, 3 key heads, causal
    (q, k, v), arguments = packed(torch.float32, (1, 0, 1), (3, 0, 5), 9, 3, 64, 64)
    check_varlen((q, k, v), {**arguments, "is_causal": True})


def test_one_sequence_of_one_row_keeps_its_shape():
    x = random_tensor((1, 8, 16))
    one = torch.tensor([0, 1], dtype=torch.int32)
    assert attnjourney.varlen_attention(x, x, x, one, one).shape == (1, 8, 16)
    torch.testing.assert_close(attnjourney.varlen_attention(x, x, x, one, one), x)


@pytest.mark.parametrize("q_lengths, k_lengths", [((0,), (0,)), ((0, 0), (3, 2)), ((2, 3), (0, 0))])
def test_nothing_to_attend(q_lengths, k_lengths):
    tensors, arguments = packed(torch.float64, q_lengths, k_lengths, extra=2)
    result = check_varlen(tensors, arguments)
    assert not result["out"].any()


def test_no_sequence_at_all():
    (q, k, v), arguments = packed(torch.float32, (), (), extra=2)
    q.requires_grad_()
    out, lse = attnjourney.varlen_attention(q, k, v, **arguments, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()
    assert not torch.autograd.grad(out.sum(), q)[0].any()


def test_a_window_is_each_sequences_own_and_causality_stays():
    tensors, arguments = packed(torch.float64, (6, 9), (6, 9))
    arguments.update(is_causal=True, window_size=(3, 3))
    q, k, v = tensors
    k = k.clone().requires_grad_()
    out = attnjourney.varlen_attention(q, k, v, **arguments)
    grad = torch.autograd.grad(out[2].sum(), k)[0]
    assert not grad[3:].any()


def test_a_long_sequence_among_short_ones_is_split():
    lengths = (300, 3, 4, 5)
    tensors, arguments = packed(torch.float32, lengths, lengths, 2, 1, 32, 32)
    results = []
    for count in (1, 2, 2):
        with threads(count):
            results.append(check_varlen(tensors, {**arguments, "is_causal": True}))
    assert torch.equal(results[0]["out"], results[1]["out"])
    for name in results[1]:
        assert torch.equal(results[1][name], results[2][name]), name


def test_strided_inputs():
    qkv = random_tensor((20, 3, 4, 8), torch.float64)
    cu = offsets((5, 9, 6))
    q, k, v = qkv.unbind(1)
    torch.testing.assert_close(
        attnjourney.varlen_attention(q, k, v, cu, cu), reference.varlen_attention(q, k, v, cu, cu)
    )


def test_dropout_follows_the_seed_of_torch():
    tensors, arguments = packed(torch.float32)
    torch.manual_seed(3)
    first = attnjourney.varlen_attention(*tensors, **arguments, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, attnjourney.varlen_attention(*tensors, **arguments, dropout_p=0.5))
    torch.manual_seed(3)
    torch.testing.assert_close(first, reference.varlen_attention(*tensors, **arguments, dropout_p=0.5))


@pytest.mark.parametrize(
    "changes, error, pattern",
    [
        (dict(cu_seqlens_q=torch.tensor([0, 5, 4])), ValueError, "cu_seqlens_q.*never fall"),
        (dict(cu_seqlens_k=torch.tensor([0, 5, 400])), ValueError, "cu_seqlens_k.*99"),
        (dict(cu_seqlens_k=torch.tensor([1, 5, 9])), ValueError, "cu_seqlens_k.*begin with 0"),
        (dict(cu_seqlens_k=torch.tensor([0, 9])), ValueError, "cu_seqlens_k.*cu_seqlens_q"),
        (dict(cu_seqlens_q=torch.tensor([0.0, 1, 2])), RuntimeError, "cu_seqlens_q.*int64.*float32"),
        (dict(query=torch.ones(2, 63, 4, 8)), ValueError, "query.*3 dimensions"),
        (dict(attn_mask=torch.ones(1)), TypeError, "attn_mask"),
    ],
)
def test_wrong_arguments(changes, error, pattern):
    (q, k, v), _ = packed(torch.float32)
    cu = torch.tensor([0, 20, 40])
    arguments = dict(query=q, key=k, value=v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    with pytest.raises(error, match=pattern):
        attnjourney.varlen_attention(**{**arguments, **changes})


def test_compiles_with_dynamic_totals():
    torch._dynamo.reset()
    compiled = torch.compile(attnjourney.varlen_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((3, 5), (7, 2), (6, 6)):
        (q, k, v), arguments = packed(torch.float32, lengths, lengths)
        q.requires_grad_()
        out = compiled(q, k, v, **arguments, is_causal=True)
        expected = attnjourney.varlen_attention(q, k, v, **arguments, is_causal=True)
        assert torch.equal(out, expected)
        assert torch.equal(*(torch.autograd.grad(x.sum(), q)[0] for x in (out, expected)))


def test_opcheck():
    (q, k, v), arguments = packed(torch.float32)
    sinks = SINKS.clone().requires_grad_()
    torch.library.opcheck(
        torch.ops.attnjourney.varlen_attention.default,
        (q.requires_grad_(), k, v, arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]),
        {"sinks": sinks},
    )

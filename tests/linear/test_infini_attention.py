"""Infini-attention beside a plain loop over the paper's equations; streaming, truncation, its module."""

import pytest
import torch

import attnjourney
from attnjourney import reference
from examples import recall
from tests.support.testing import (
    DTYPES,
    FLOOR_ULPS,
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    assert_close_to_reference,
    pairs,
    plain_run,
    random_tensor,
    row_id,
)


def inputs(dtype=torch.float64, heads=(2, 2), length=22, dims=(8, 8), memory=False):
    hq, hk = heads
    wide = torch.promote_types(dtype, torch.float32)
    q = random_tensor((2, hq, length, dims[0]), dtype, seed=1, outliers=False)
    k = random_tensor((2, hk, length, dims[0]), dtype, seed=2, outliers=False)
    v = random_tensor((2, hk, length, dims[1]), dtype, seed=3, outliers=False)
    beta = torch.linspace(-1, 2, hq).to(dtype)
    m = random_tensor((2, hk, *dims), wide, seed=4, outliers=False)
    return q, k, v, beta, ((m, random_tensor((2, hk, dims[0]), wide, seed=5).abs() + 1) if memory else None)


def tables(length, dim, dtype):
    return attnjourney.positions.rope_tables(
        attnjourney.rope_frequencies("default", dim)[0], torch.arange(length), 1.0, dtype
    )


def local_roundings(q, k, v, beta, segment):
    """What rounding alone may do to [out, grad_query, grad_key, grad_value] of the attention inside segments."""
    grad = random_tensor((*q.shape[:3], v.shape[3]), q.dtype, seed=9, outliers=False)
    grad = ((1 - torch.sigmoid(beta.float()))[:, None, None] * grad).to(q.dtype)
    parts = []
    for rows in torch.arange(q.shape[2]).split(segment):
        inputs = [x[:, :, rows] for x in (q, k, v)]
        _, roundings = plain_run([*inputs, None], grad[:, :, rows], is_causal=True, enable_gqa=True)
        parts.append([roundings[i] for i in (0, 2, 3, 4)])
    return [torch.cat(x, 2) for x in zip(*parts)]


def run(function, q, k, v, beta, memory, dtype=None, **options):
    """[out, M, z, gradients of q, k, v, beta, M, z] in `dtype`."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (q, k, v, beta)]
    parts = [] if memory is None else [t.detach().to(dtype or t.dtype).requires_grad_() for t in memory]
    options = {n: x.to(dtype) if dtype and isinstance(x, torch.Tensor) else x for n, x in options.items()}
    out, state = function(*leaves, memory=tuple(parts) or None, return_memory=True, **options)
    results = [out, *state]
    grads = [random_tensor(t.shape, q.dtype, seed=9, outliers=False).to(t.dtype) for t in results]
    return [t.detach() for t in results] + list(torch.autograd.grad(results, leaves + parts, grads))


ROWS = pairs(
    dtype=DTYPES,
    update=["linear", "delta"],
    heads=[(2, 2), (4, 2), (3, 1)],
    length=[3, 8, 22, 24],
    dims=[(8, 8), (6, 11)],
    memory=[False, True],
    rope=[False, True],
    truncate=[None, 1, 2],
)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_values_and_gradients(row):
    row = dict(row)
    options = dict(segment_length=8, update=row.pop("update"), truncate=row.pop("truncate"))
    rope, dtype = row.pop("rope"), row["dtype"]
    args = inputs(**row)
    if rope:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        options["cos"], options["sin"] = tables(row["length"], row["dims"][0], wide)
    actual = run(attnjourney.infini_attention, *args, **options)
    expected = run(reference.infini_attention, *args, torch.float64, **options)
    plain = run(reference.infini_attention, *args, dtype, **options)
    out, *gradients = local_roundings(*args[:4], 8)
    local = {0: out} | dict(enumerate(gradients, 3))
    for i, (a, p, e) in enumerate(zip(actual, plain, expected, strict=True)):
        if dtype == torch.float64:
            assert (a - e).abs().max() <= 1e-12 * e.abs().max().clamp_min(1), i
            continue
        rounding = FLOOR_ULPS * torch.finfo(dtype).eps * e.abs() + local.get(i, 0)
        factor = OUTPUT_FACTOR if i < 3 else GRADIENT_FACTOR
        assert_close_to_reference(a, p, e, factor, f"result {i}", rounding)


@pytest.mark.parametrize("update", ["linear", "delta"])
def test_streamed_segments_equal_one_call(update):
    q, k, v, beta, _ = inputs(length=22)
    cos, sin = tables(22, 8, torch.float64)
    whole, memory = attnjourney.infini_attention(
        q, k, v, beta, segment_length=4, update=update, cos=cos, sin=sin, return_memory=True
    )
    for cuts in ((4,) * 5 + (2,), (8, 12, 2)):
        state, outs = None, []
        for rows in torch.arange(22).split(cuts):
            rows = slice(int(rows[0]), int(rows[-1]) + 1)
            out, state = attnjourney.infini_attention(
                *(x[:, :, rows] for x in (q, k, v)), beta, segment_length=4, memory=state, update=update,
                cos=cos[rows], sin=sin[rows], return_memory=True,
            )  # fmt: skip
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-12, atol=1e-12)
        for a, b in zip(state, memory):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_an_empty_memory_reads_zero():
    q, k, v, beta, _ = inputs(length=5)
    out = attnjourney.infini_attention(q, k, v, torch.full_like(beta, 50.0), segment_length=5)  # the memory alone
    assert out.abs().max() < 1e-15
    zero = tuple(torch.zeros(s, dtype=torch.float64) for s in ((2, 2, 8, 8), (2, 2, 8)))
    given = attnjourney.infini_attention(q, k, v, beta, segment_length=5, memory=zero)
    torch.testing.assert_close(given, attnjourney.infini_attention(q, k, v, beta, segment_length=5))
    nothing, (m, z) = attnjourney.infini_attention(
        q[:, :, :0], k[:, :, :0], v[:, :, :0], beta, segment_length=5, return_memory=True
    )
    assert nothing.shape == (2, 2, 0, 8) and m.count_nonzero() == 0 and z.count_nonzero() == 0


def test_closed_gates_are_local_attention_and_open_ones_the_memory():
    q, k, v, beta, _ = inputs(length=16)
    local = attnjourney.infini_attention(q, k, v, torch.full_like(beta, -50.0), segment_length=8)
    for rows in (slice(0, 8), slice(8, 16)):
        own = attnjourney.attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], is_causal=True)
        torch.testing.assert_close(local[:, :, rows], own)
    memory = attnjourney.infini_attention(q, k, v, torch.full_like(beta, 50.0), segment_length=8)
    read = attnjourney.linear_attention(q[:, :, 8:], k[:, :, :8], v[:, :, :8], is_causal=False, eps=0.0)
    torch.testing.assert_close(memory[:, :, 8:], read)


def test_truncation_stops_gradients_and_nothing_else():
    q, k, v, beta, _ = inputs(length=16)
    k.requires_grad_()
    for truncate, crosses in ((None, True), (2, True), (1, False)):
        out = attnjourney.infini_attention(q, k, v, beta, segment_length=8, truncate=truncate)
        (grad,) = torch.autograd.grad(out[:, :, 8:].sum(), k)
        assert (grad[:, :, :8].count_nonzero() > 0) == crosses
    torch.testing.assert_close(out, attnjourney.infini_attention(q, k, v, beta, segment_length=8))


def test_no_quadratic_tensor_and_no_state_per_step_is_kept():
    q, k, v, beta, _ = inputs(torch.float32, length=8192)
    leaves = [t.requires_grad_() for t in (q, k, v, beta)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.untyped_storage()) or t, lambda t: t):
        out = attnjourney.infini_attention(*leaves, segment_length=256)
    kept = sum({s.data_ptr(): s.nbytes() for s in saved}.values())
    assert kept < 12 * q.nbytes
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


REFUSED = {
    "key: expected the length of query": dict(key=torch.zeros(1, 2, 5, 4)),
    "beta: expected shape .2,.": dict(beta=torch.zeros(1)),
    "segment_length: expected": dict(segment_length=0),
    "update: expected 'linear' or 'delta', got 'add'": dict(update="add"),
    "truncate: expected": dict(truncate=0),
    "memory: expected a pair": dict(memory=torch.zeros(1)),
    "initial_state: expected shape": dict(memory=(torch.zeros(1, 2, 4, 5), torch.zeros(1, 2, 4))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit(message):
    q, k, v = (torch.zeros(1, 2, 6, 4) for _ in range(3))
    arguments = dict(query=q, key=k, value=v, beta=torch.zeros(2), segment_length=4) | REFUSED[message]
    with pytest.raises(ValueError, match=message):
        attnjourney.infini_attention(**arguments)


@pytest.mark.parametrize("update", ["linear", "delta"])
def test_module_streams_and_trains(update):
    torch.manual_seed(0)
    layer = attnjourney.nn.InfiniAttention(24, 4, 2, segment_length=4, rope=10000.0, update=update, dtype=torch.float64)
    x = torch.randn(2, 15, 24, dtype=torch.float64)
    whole, memory, outs = layer(x), None, []
    for piece in x.split(4, 1):
        out, memory = layer(piece, memory=memory, return_memory=True)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-12, atol=1e-12)
    whole.sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.count_nonzero() for p in layer.parameters())
    with pytest.raises(ValueError, match="update: expected"):
        attnjourney.nn.InfiniAttention(24, 4, segment_length=4, update="add")


def test_compiled():
    q, k, v, beta, _ = inputs(length=12)

    def function(q, k, v, beta):
        return attnjourney.infini_attention(q, k, v, beta, segment_length=4, update="delta")

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, beta), function(q, k, v, beta))


def test_the_recall_example_plants_beyond_the_segment_and_shuts_the_memory():
    tokens, planted = recall.sequences(50, torch.Generator().manual_seed(0))
    markers = (tokens == recall.MARKER).nonzero()
    assert (markers[:, 0] == torch.arange(50)).all() and (markers[:, 1] < recall.SEGMENT - 1).all()
    assert (tokens[markers[:, 0], markers[:, 1] + 1] == planted).all() and (tokens[:, -1] == recall.QUESTION).all()
    torch.manual_seed(0)
    config = recall.Config(embed=16, heads=2)
    infini, local = recall.Infini(config), recall.Local(config)
    local.load_state_dict(infini.state_dict())
    x = torch.randn(2, 2 * recall.SEGMENT, 16)
    first = slice(0, recall.SEGMENT)
    torch.testing.assert_close(local(x)[:, first], infini(x)[:, first])
    other = x.clone()
    other[:, first] += 1
    assert torch.equal(local(x)[:, recall.SEGMENT :], local(other)[:, recall.SEGMENT :])
    assert not torch.allclose(infini(x)[:, recall.SEGMENT :], infini(other)[:, recall.SEGMENT :])
    assert 0 <= recall.train(recall.Infini, steps=1) <= 1

"""Gated linear attention: values and gradients in every dtype beside the recurrence in float64, forms, states."""

import functools

import pytest
import torch

import attnjourney
from attnjourney import reference
from attnjourney.ops.gated_linear_attention import DELTA, GATED, UPDATES
from tests.support.arithmetic import roundings_of
from tests.support.onnx_nodes import node_cases
from tests.support.testing import (
    DTYPES,
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    assert_close_to_reference,
    pairs,
    random_tensor,
    row_id,
    threads,
)

NAMES = ("query", "key", "value", "gate", "beta", "initial_state")


def inputs(
    dtype, update="gated_delta", heads=(2, 2, 2), length=70, dims=(16, 16), layout="contiguous", state=False,
    strength=0.3, channels=False, batch=2, sequences=None,
):  # fmt: skip
    """The tensors by name, None where the update takes none: keys of norm 1, gates about -strength."""
    (hq, hk, hv), (d, dv) = heads, dims
    number, wide = UPDATES.index(update), torch.promote_types(dtype, torch.float32)

    def make(*shape, seed, dtype=dtype, layout=layout):
        return random_tensor(shape, dtype, seed=seed, layout=layout, outliers=False)

    key = make(batch, hk, length, d, seed=2)
    key = (key.double() / key.double().norm(dim=-1, keepdim=True)).to(dtype)
    gate = beta = initial = None
    if number in GATED:
        shape = (batch, hv, length, d) if channels or update == "kda" else (batch, hv, length)
        gate = (-strength * make(*shape, seed=4, dtype=wide).exp()).to(wide)
    if number in DELTA:
        beta = make(batch, hv, length, seed=5).sigmoid()
    if state:
        initial = make(sequences or batch, hv, d, dv, seed=6, dtype=wide, layout="contiguous")
    tensors = (make(batch, hq, length, d, seed=1), key, make(batch, hv, length, dv, seed=3), gate, beta, initial)
    return dict(zip(NAMES, tensors))


@functools.cache  # made before arithmetic that is rounded on purpose
def grad_like(shape, dtype, seed):
    return random_tensor(shape, dtype, seed=seed, outliers=False)


def run(function, tensors, dtype=None, grads_of=None, **options):
    """out, state and every gradient by name, under fixed output gradients."""
    leaves = {n: None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}
    out, state = function(**leaves, return_state=True, **options)
    grads = [grad_like(t.shape, tensors["query"].dtype, 9 + i).to(t.dtype) for i, t in enumerate((out, state))]
    wanted = {n: t for n, t in leaves.items() if t is not None}
    found = torch.autograd.grad((out, state), list(wanted.values()), grads)
    return {"out": out.detach(), "state": state.detach(), **{f"grad_{n}": g for n, g in zip(wanted, found)}}


def plain(query, key, value, gate, beta, initial_state, *, update="gated_delta", scale=None, qk_l2norm=False,
          return_state=True, chunk=64):  # fmt: skip
    """The chunked formula in plain PyTorch, every number in query's dtype."""
    dtype, delta = query.dtype, update in ("delta", "gated_delta", "kda")
    if qk_l2norm:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    heads, out_heads = value.shape[1], max(query.shape[1], value.shape[1])
    k = key.repeat_interleave(heads // key.shape[1], 1)
    q = query.repeat_interleave(out_heads // query.shape[1], 1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    group = out_heads // heads
    b, _, length, d = k.shape
    state = k.new_zeros(b, heads, d, value.shape[-1]) if initial_state is None else initial_state.to(dtype)
    g = k.new_zeros(b, heads, length, 1) if gate is None else gate.to(dtype)
    g = (g if g.dim() == 4 else g[..., None]).expand(b, heads, length, d)
    rate = k.new_ones(b, heads, length) if beta is None else beta.to(dtype)
    outs = []
    for first in range(0, length, chunk):
        rows = slice(first, first + chunk)
        k_, v_, q_, sums, rate_ = (
            k[:, :, rows],
            value[:, :, rows],
            q[:, :, rows],
            g[:, :, rows].cumsum(2),
            rate[:, :, rows],
        )
        n = k_.shape[2]
        lower = torch.ones(n, n, dtype=torch.bool).tril()
        decays = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(~lower[..., None], -torch.inf).exp()
        writes = decays * (rate_[..., None] * k_)[:, :, None]  # (b, h, i, j, d)
        errors = v_
        if delta:
            pairs_ = torch.einsum("bhid,bhijd->bhij", k_, writes).tril(-1)
            right = v_ - (sums.exp() * k_) @ state
            eye = torch.eye(n, dtype=torch.float32 if dtype.itemsize < 4 else dtype)
            errors = torch.linalg.solve_triangular(eye + pairs_, right.to(eye.dtype), upper=False).to(dtype)
        wide_sums, wide_writes, wide_errors, before = (
            x.repeat_interleave(group, 1) for x in (sums, writes, errors, state)
        )
        scores = torch.einsum("bhid,bhijd->bhij", q_, wide_writes)
        outs.append((wide_sums.exp() * q_) @ before + scores @ wide_errors)
        state = sums[:, :, -1].exp()[..., None] * state + writes[:, :, -1].transpose(-1, -2) @ errors
    return torch.cat(outs, 2), state


def check(tensors, actual=None, **options):
    """`actual`: as `run` gives it; the operator's by default."""
    actual = actual or run(attnjourney.gated_linear_attention, tensors, **options)
    expected = run(reference.gated_linear_attention, tensors, torch.float64, **options)
    formula = run(plain, tensors, tensors["query"].dtype, **options)

    def in_double():
        return list(run(reference.gated_linear_attention, tensors, torch.float64, **options).values())

    roundings = roundings_of(in_double, list(expected.values()), tensors["query"].dtype)
    for (name, x), rounding in zip(actual.items(), roundings, strict=True):
        factor = GRADIENT_FACTOR if name.startswith("grad") else OUTPUT_FACTOR
        assert_close_to_reference(x, formula[name], expected[name], factor, name, rounding)


ROWS = pairs(
    dtype=DTYPES,
    update=UPDATES,
    heads=[(2, 2, 2), (4, 2, 2), (2, 2, 4), (3, 1, 1), (2, 1, 2)],
    length=[1, 3, 37, 150, 64],
    dims=[(16, 16), (20, 33), (64, 8), (3, 5), (16, 80)],
    strength=[0.02, 1.0, 12.0],
    channels=[False, True],
    state=[False, True],
    qk_l2norm=[False, True],
    layout=["contiguous", "transposed", "offset"],
)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_values_and_gradients(row):
    row = dict(row)
    options = dict(update=row["update"], qk_l2norm=row.pop("qk_l2norm"))
    check(inputs(**row), scale=0.7, **options)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("strength", [0.1, 30.0])
def test_the_three_forms_agree_in_float64(update, strength):
    tensors = inputs(torch.float64, update, length=150, dims=(20, 33), strength=strength, state=True)
    chunked, last = attnjourney.gated_linear_attention(**tensors, update=update, return_state=True)
    state, steps = tensors["initial_state"], []
    for i in range(150):
        row = {n: None if t is None else t[:, :, i : i + 1] for n, t in tensors.items() if n != "initial_state"}
        out, state = attnjourney.gated_linear_attention(**row, initial_state=state, update=update, return_state=True)
        steps.append(out)
    recurrence, expected = reference.gated_linear_attention(**tensors, update=update, return_state=True)
    for a, b in ((chunked, recurrence), (torch.cat(steps, 2), recurrence), (last, expected), (state, expected)):
        assert (a - b).abs().max() < 1e-12


def test_two_halves_joined_by_the_state_are_one_sequence_with_its_gradients():
    tensors = inputs(torch.float64, length=131, state=True)

    def halves(initial_state, return_state, **tensors):
        outs = []
        for rows in (slice(0, 50), slice(50, None)):
            part = {n: t[:, :, rows] for n, t in tensors.items()}
            out, initial_state = attnjourney.gated_linear_attention(
                **part, initial_state=initial_state, return_state=True
            )
            outs.append(out)
        return torch.cat(outs, 2), initial_state

    whole = run(attnjourney.gated_linear_attention, tensors)
    for name, a in run(halves, tensors).items():
        assert (a - whole[name]).abs().max() < 1e-11 * whole[name].abs().max().clamp_min(1), name


@pytest.mark.parametrize("update", UPDATES)
def test_gradcheck(update):
    tensors = inputs(torch.float64, update, heads=(2, 1, 2), length=7, dims=(3, 2), state=True)
    names = [n for n, t in tensors.items() if t is not None]

    def function(*leaves):
        given = {**tensors, **dict(zip(names, leaves))}
        return attnjourney.gated_linear_attention(**given, update=update, qk_l2norm=True, return_state=True)

    assert torch.autograd.gradcheck(function, [tensors[n].clone().requires_grad_() for n in names])


@pytest.mark.parametrize("wanted", ["query", "key", "value", "gate", "beta", "initial_state"])
@pytest.mark.parametrize("of", ["out", "state"])
def test_only_what_needs_a_gradient(wanted, of):
    tensors = inputs(torch.float64, state=True, heads=(1, 1, 2))
    leaf, grads = tensors[wanted].requires_grad_(), []
    for function in (attnjourney.gated_linear_attention, reference.gated_linear_attention):
        out, state = function(**tensors, return_state=True)
        loss = (out if of == "out" else state).square().sum()
        if wanted == "query" and of == "state" and function is reference.gated_linear_attention:
            grads.append(torch.zeros_like(leaf))
        else:
            grads.append(torch.autograd.grad(loss, leaf)[0])
    torch.testing.assert_close(*grads)


SEQUENCES = [0, 0, 70, 71, 71, 150, 163]


@pytest.mark.parametrize("update", ["gated", "gated_delta", "kda"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_sequences_are_sequences(update, index):
    tensors = inputs(torch.float64, update, heads=(2, 1, 2), length=170, batch=1, sequences=6, state=True)
    cu_seqlens = torch.tensor(SEQUENCES, dtype=index)
    packed = run(attnjourney.gated_linear_attention, tensors, update=update, cu_seqlens=cu_seqlens)
    expected = run(reference.gated_linear_attention, tensors, update=update, cu_seqlens=cu_seqlens)
    for name, x in packed.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-10, atol=1e-12, msg=name)
    assert packed["out"][:, :, 163:].count_nonzero() == 0 and packed["grad_key"][:, :, 163:].count_nonzero() == 0
    assert torch.equal(packed["state"][0], tensors["initial_state"][0])  # an empty sequence hands its state on


@pytest.mark.parametrize("heads", [(1, 1, 1), (2, 1, 2), (4, 2, 2)])
def test_any_number_of_threads(heads):
    tensors = inputs(torch.float32, heads=heads, length=700, dims=(32, 200), state=True)
    results = []
    for count in (1, 2, 5):
        with threads(count):
            results.append(run(attnjourney.gated_linear_attention, tensors))
            again = run(attnjourney.gated_linear_attention, tensors)
        assert all(torch.equal(x, again[name]) for name, x in results[-1].items())
    for other in results[1:]:
        assert torch.equal(other["out"], results[0]["out"]) and torch.equal(other["state"], results[0]["state"])
        for name, x in other.items():
            torch.testing.assert_close(x, results[0][name], rtol=1e-4, atol=1e-4 * x.abs().max().item())


@pytest.mark.parametrize("update", ["gated_delta", "kda"])
@pytest.mark.parametrize("bad", ["key", "value", "query", "gate", "beta", "grad_out"])
def test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other(bad, update):
    tensors = inputs(torch.float32, update)
    at, grad = 41, torch.ones(2, 2, 70, 16)
    {**tensors, "grad_out": grad}[bad][0, 0, at] = torch.nan
    leaves = {n: None if t is None else t.clone().requires_grad_() for n, t in tensors.items()}
    out = attnjourney.gated_linear_attention(**leaves, update=update)
    wanted = [t for t in leaves.values() if t is not None]
    grads = dict(zip(leaves, torch.autograd.grad(out, wanted, grad)))

    def rows(t):
        bad_rows = t.detach()[0, 0].isnan()
        return (bad_rows.flatten(1).any(1) if bad_rows.dim() > 1 else bad_rows).nonzero().flatten().tolist()

    after, before = list(range(at, 70)), list(range(at + 1))
    assert rows(out) == {"query": [at], "grad_out": []}.get(bad, after)
    if bad in ("query", "grad_out"):
        assert rows(grads["query"]) == ([at] if bad == "grad_out" else [])  # out is linear in the query
        assert rows(grads["key"]) == before and rows(grads["value"]) == before
    else:
        assert rows(grads["query"]) == after
    for x in (out, *grads.values()):
        assert not x[0, 1].isnan().any() and not x[1].isnan().any()


@pytest.mark.parametrize("update", ["gated", "gated_delta", "kda"])
@pytest.mark.parametrize("length", [2, 100])
def test_a_gate_of_minus_infinity_forgets_everything(update, length):
    tensors = inputs(torch.float64, update, length=length, state=True)
    cut = length // 2
    tensors["gate"][:, :, cut] = -torch.inf
    out, last = attnjourney.gated_linear_attention(**tensors, update=update, return_state=True)
    rest = {n: None if t is None else t[:, :, cut:] for n, t in tensors.items() if n != "initial_state"}
    expected, state = reference.gated_linear_attention(**rest, update=update, return_state=True)
    assert (out[:, :, cut:] - expected).abs().max() < 1e-12 and (last - state).abs().max() < 1e-12


def test_positive_gates_let_the_state_grow():
    for update in ("gated_delta", "kda"):
        tensors = inputs(torch.float64, update, length=40, strength=-0.4, state=True)
        out, expected = (
            f.gated_linear_attention(**tensors, update=update) for f in (attnjourney, reference)
        )  # fmt: skip
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_no_rows_and_no_values():
    tensors = inputs(torch.float32, state=True)
    none = {n: t if n == "initial_state" else t[:, :, :0] for n, t in tensors.items()}
    results = run(attnjourney.gated_linear_attention, none)
    assert results["out"].shape == (2, 2, 0, 16) and torch.equal(results["state"], tensors["initial_state"])
    torch.testing.assert_close(results["grad_initial_state"], grad_like((2, 2, 16, 16), torch.float32, 10))
    tensors["value"], tensors["initial_state"] = tensors["value"][..., :0], tensors["initial_state"][..., :0]
    results = run(attnjourney.gated_linear_attention, tensors)
    assert results["out"].shape == (2, 2, 70, 0) and results["grad_key"].count_nonzero() == 0


def test_memory_of_a_long_sequence_is_that_of_its_tensors():
    tensors = inputs(torch.float32, length=20_000, heads=(1, 1, 1), dims=(8, 8), batch=1)
    leaves = {n: None if t is None else t.requires_grad_() for n, t in tensors.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        saved = []
        out = attnjourney.gated_linear_attention(**leaves)
    assert sum(t.numel() for t in saved) <= 3 * 20_000 * 8 + 2 * 20_000
    assert all(
        g.isfinite().all() for g in torch.autograd.grad(out.sum(), [t for t in leaves.values() if t is not None])
    )


def unpacked(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def test_onnx_node_tests():
    seen = set()
    for case in node_cases("LinearAttention", "linear_attention"):
        a, given = case.attributes, case.inputs
        update, hq, hk = a.get("update_rule", "gated_delta"), a["q_num_heads"], a["kv_num_heads"]
        query, key, value = (unpacked(given[n], h) for n, h in (("query", hq), ("key", hk), ("value", hk)))
        gate, beta = given.get("decay"), given.get("beta")
        if gate is not None:
            gate = unpacked(gate, hk)
            gate = gate[..., 0] if gate.shape[-1] == 1 else gate
        if beta is not None:
            beta = beta.transpose(1, 2).expand(-1, hk, -1)
        past = given.get("past_state")
        out, state = attnjourney.gated_linear_attention(
            query, key, value, gate, beta, update=update, scale=a.get("scale") or None, return_state=True,
            initial_state=None if past is None else past.float(),
        )  # fmt: skip
        seen.add((update, case.name))
        tolerance = dict(rtol=1e-3, atol=1e-6 if query.dtype == torch.float32 else 1e-3)  # onnx's own
        torch.testing.assert_close(out.transpose(1, 2).flatten(2), case.outputs[0], msg=case.name, **tolerance)
        torch.testing.assert_close(state.to(case.outputs[1].dtype), case.outputs[1], msg=case.name, **tolerance)
    assert {update for update, _ in seen} == {"linear", "gated", "delta", "gated_delta"} and len(seen) >= 14

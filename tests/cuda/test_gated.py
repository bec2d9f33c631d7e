"""Gated linear attention on a CUDA device."""

import pytest
import torch

import attnjourney
from attnjourney.ops.gated_linear_attention import UPDATES
from tests.cuda.test_linear import there_and_back
from tests.linear.test_gated_linear_attention import ROWS, SEQUENCES, check, inputs, run
from tests.support.testing import DTYPES, row_id

pytestmark = pytest.mark.cuda
ON_DEVICE = there_and_back(attnjourney.gated_linear_attention)


@pytest.mark.parametrize("row", ROWS[::2], ids=row_id)
def test_values_and_gradients(row):
    row = dict(row)
    options = dict(update=row["update"], qk_l2norm=row.pop("qk_l2norm"), scale=0.7)
    tensors = inputs(**row)
    check(tensors, run(ON_DEVICE, tensors, **options), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dims", [(128, 128), (256, 200)])
def test_wide_heads(dims, dtype):
    for update in ("gated_delta", "kda"):
        tensors = inputs(dtype, update, (2, 1, 2), 200, dims, batch=1, state=True)
        check(tensors, run(ON_DEVICE, tensors, update=update), update=update)


@pytest.mark.parametrize("update", ["gated_delta", "kda"])
@pytest.mark.parametrize("ends", [SEQUENCES, [-3, 0, 70, 50, 71, 150, 163], [0, 0, 70, 71, 71, 150, 10**6]])
def test_packed_sequences_with_offsets_that_fit_or_do_not(update, ends):
    tensors = inputs(torch.float64, update, heads=(2, 1, 2), length=170, batch=1, sequences=6, state=True)
    fit = torch.tensor(ends).clamp(0, 170).cummax(0).values
    packed = run(ON_DEVICE, tensors, update=update, cu_seqlens=torch.tensor(ends))
    expected = run(attnjourney.gated_linear_attention, tensors, update=update, cu_seqlens=fit)
    for name, x in packed.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("update", UPDATES)
def test_one_step_at_a_time_and_graph_capture(update):
    tensors = {
        n: None if x is None else x.cuda() for n, x in inputs(torch.float32, update, length=70, state=True).items()
    }
    whole, last = attnjourney.gated_linear_attention(**tensors, update=update, return_state=True)
    state, steps = tensors["initial_state"], []
    for i in range(70):
        row = {n: None if x is None else x[:, :, i : i + 1] for n, x in tensors.items() if n != "initial_state"}
        out, state = attnjourney.gated_linear_attention(**row, initial_state=state, update=update, return_state=True)
        steps.append(out)
    torch.testing.assert_close(torch.cat(steps, 2), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnjourney.gated_linear_attention(**tensors, update=update)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, whole)


def test_no_rows_no_values_and_no_sequences():
    tensors = inputs(torch.float32, state=True, batch=1)
    none = {n: x if n == "initial_state" else x[:, :, :0] for n, x in tensors.items()}
    results = run(ON_DEVICE, none)
    assert results["out"].shape == (1, 2, 0, 16) and torch.equal(results["state"], tensors["initial_state"])
    no_values = {n: x[..., :0] if n in ("value", "initial_state") else x for n, x in tensors.items()}
    results = run(ON_DEVICE, no_values)
    assert results["out"].shape == (1, 2, 70, 0) and not results["grad_key"].any()
    no_sequences = {**tensors, "initial_state": tensors["initial_state"][:0]}
    results = run(ON_DEVICE, no_sequences, cu_seqlens=torch.tensor([0]))
    assert not results["out"].any() and not results["grad_query"].any() and results["state"].shape[0] == 0

"""attnjourney.trace_state: every stage against the recurrence in float64, and the last one what the operator gives."""

import pytest
import torch

import attnjourney
from attnjourney import reference
from attnjourney.ops.gated_linear_attention import DELTA, GATED, UPDATES
from tests.linear.test_gated_linear_attention import inputs, plain
from tests.seeing.test_states import GatedLayer
from tests.support.testing import DTYPES, assert_close_to_reference, pairs, row_id

CLOSE = dict(atol=1e-13, rtol=1e-12)
ROWS = pairs(
    update=UPDATES,
    heads=[(2, 2, 2), (4, 2, 2), (2, 1, 4)],
    channels=[False, True],
    state=[False, True],
    qk_l2norm=[False, True],
)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_every_stage(row):
    row = dict(row)
    update, number = row["update"], UPDATES.index(row["update"])
    options = {"update": update, "qk_l2norm": row.pop("qk_l2norm"), "scale": 0.7}
    tensors = inputs(torch.float64, length=5, dims=(4, 3), **row)
    seen = attnjourney.trace_state(**tensors, **options)
    out, last = attnjourney.gated_linear_attention(**tensors, return_state=True, **options)
    group = out.shape[1] // last.shape[1]
    assert torch.equal(seen.result[0], out) and torch.equal(seen.result[1], last)
    torch.testing.assert_close(seen.output, out, **CLOSE)
    assert ("decay" in seen) == ("decayed_state" in seen) == (number in GATED)
    assert ("predicted" in seen) == ("error" in seen) == ("beta" in seen) == (number in DELTA)

    # states: what the reference has after so many rows
    before = tensors["initial_state"]
    before = torch.zeros_like(last) if before is None else before
    for i in range(5):
        first = {n: None if x is None else x[:, :, : i + 1] for n, x in tensors.items() if n != "initial_state"}
        _, after = reference.gated_linear_attention(
            **first, initial_state=tensors["initial_state"], return_state=True, **options
        )
        torch.testing.assert_close(seen.state_before[:, :, i], before.repeat_interleave(group, 1), **CLOSE)
        torch.testing.assert_close(seen.state_after[:, :, i], after.repeat_interleave(group, 1), **CLOSE)
        before = after
    held = seen["decayed_state" if number in GATED else "state_before"]
    if number in GATED:
        decay = tensors["gate"].exp().repeat_interleave(group, 1)
        assert torch.equal(seen.decay, decay)
        by_channel = (decay if decay.dim() == 4 else decay[..., None])[..., None]
        torch.testing.assert_close(held, seen.state_before * by_channel, **CLOSE)
    value = tensors["value"].repeat_interleave(group, 1)
    assert torch.equal(seen.value, value)
    if number in DELTA:
        torch.testing.assert_close(seen.predicted, (held * seen.key[..., None]).sum(-2), **CLOSE)
        torch.testing.assert_close(seen.error, value - seen.predicted, **CLOSE)
        beta = tensors["beta"].repeat_interleave(group, 1)
        assert torch.equal(seen.beta, beta)
        torch.testing.assert_close(seen.written, beta[..., None] * seen.error, **CLOSE)
    else:
        assert torch.equal(seen.written, value)
    torch.testing.assert_close(seen.state_after, held + seen.key[..., None] * seen.written[..., None, :], **CLOSE)
    torch.testing.assert_close(seen.output, 0.7 * (seen.state_after * seen.query[..., None]).sum(-2), **CLOSE)

    part = attnjourney.trace_state(**tensors, rows=[-1, 2], heads=[1, 0], **options)
    for name, x in seen.items():
        assert torch.equal(part[name], x[:, [1, 0]][:, :, [4, 2]]), name


@pytest.mark.parametrize("update", ["delta", "kda"])
def test_other_dtypes(update):
    for dtype in DTYPES:
        tensors = inputs(dtype, update, length=6, dims=(4, 3), state=True)
        seen = attnjourney.trace_state(**tensors, update=update)
        assert seen.output.dtype == dtype
        assert seen.state_after.dtype == torch.promote_types(dtype, torch.float32)
        wide = {n: None if x is None else x.double() for n, x in tensors.items()}
        exact = reference.gated_linear_attention(**wide, update=update)
        formula, _ = plain(**tensors, update=update)
        for mine in (seen.output, seen.result[0]):
            assert_close_to_reference(mine, formula, exact)


def worked_example(**options):
    """The first key comes back in row 2, with another value, after the state has been halved three times."""
    key = torch.eye(2, dtype=torch.float64)[[0, 1, 0]].view(1, 1, 3, 2)
    value = torch.tensor([[1.0, 0.0], [5.0, 1.0], [3.0, 2.0]], dtype=torch.float64).view(1, 1, 3, 2)
    half = torch.full((1, 1, 3), 0.5, dtype=torch.float64)
    return attnjourney.trace_state(key, key, value, half.log(), half, scale=1.0, **options)


def test_the_worked_example_digit_by_digit():
    seen = worked_example()
    assert seen.predicted[0, 0].tolist() == [[0, 0], [0, 0], [0.125, 0]]
    assert seen.error[0, 0].tolist() == [[1, 0], [5, 1], [2.875, 2]]
    assert seen.written[0, 0].tolist() == [[0.5, 0], [2.5, 0.5], [1.4375, 1]]
    assert seen.state_after[0, 0, 2].tolist() == [[1.5625, 1], [1.25, 0.25]]
    assert seen.output[0, 0].tolist() == [[0.5, 0], [2.5, 0.5], [1.5625, 1]]


def cells(line):
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_as_a_table():
    text = str(worked_example(rows=[2]))
    assert text.startswith("gated_linear_attention: rows 2, heads 0\n")
    lines = [cells(line) for line in text.splitlines() if line.startswith("│")]
    assert ["state_after", "(1, 1, 1, 2, 2)", "float64"] in lines
    numbers = lines[[line[0] for line in lines].index("2") :]  # from the row's number on
    assert numbers == [
        ["2", "query", "", "1.0000", "0.0000"],
        ["", "key", "", "1.0000", "0.0000"],
        ["", "value", "", "3.0000", "2.0000"],
        ["", "state_before", "0", "0.2500", "0.0000"],
        ["", "", "1", "2.5000", "0.5000"],
        ["", "decay", "", "0.5000", ""],
        ["", "decayed_state", "0", "0.1250", "0.0000"],
        ["", "", "1", "1.2500", "0.2500"],
        ["", "predicted", "", "0.1250", "0.0000"],
        ["", "error", "", "2.8750", "2.0000"],
        ["", "beta", "", "0.5000", ""],
        ["", "written", "", "1.4375", "1.0000"],
        ["", "state_after", "0", "1.5625", "1.0000"],
        ["", "", "1", "1.2500", "0.2500"],
        ["", "output", "", "1.5625", "1.0000"],
    ]
    assert "<pre" in worked_example()._repr_html_()
    many = str(attnjourney.trace_state(**inputs(torch.float32, length=3)))
    assert "Numbers are shown for up to 12 rows, 12 channels" in many and "0.0000" not in many


def test_a_module_that_keeps_a_state():
    torch.manual_seed(0)
    layer, x = GatedLayer(dtype=torch.float64), torch.randn(2, 6, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = layer(x)
    seen = attnjourney.trace_module(layer, x)
    assert torch.equal(seen.result, expected)
    torch.testing.assert_close(seen.output.transpose(1, 2).flatten(2), expected, **CLOSE)
    part = attnjourney.trace_module(layer, x, rows=[-1], heads=[1])
    assert torch.equal(part.state_after, seen.state_after[:, 1:, -1:])
    assert str(part).startswith("GatedLayer: rows 5, heads 1\n")


def test_errors():
    tensors = inputs(torch.float32, length=5)
    for options, pattern in (
        (dict(rows=[5]), "rows: expected numbers from -5 to 4, got 5"),
        (dict(rows=[]), "rows: expected at least one, got none"),
        (dict(heads=[2]), "heads: expected numbers from -2 to 1, got 2"),
        (dict(update="none"), "update: expected 'linear'.* got 'none'"),
        (dict(beta=None), "beta: expected a tensor"),
        (dict(gate=tensors["gate"][:, :, 1:]), "gate: expected shape"),
    ):
        with pytest.raises(ValueError, match=pattern):
            attnjourney.trace_state(**tensors | options)

    class Packed(torch.nn.Module):
        def forward(self, x):
            return attnjourney.gated_linear_attention(x, x, x, update="linear", cu_seqlens=torch.tensor([0, 3]))

    with pytest.raises(ValueError, match="trace one sequence at a time"):
        attnjourney.trace_module(Packed(), torch.randn(1, 1, 3, 4))

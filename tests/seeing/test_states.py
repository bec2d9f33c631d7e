"""attnjourney.capture of layers that keep a state: the state, its gates, and the weights that it stands for."""

import contextlib
import math

import pytest
import torch

import attnjourney
from attnjourney import nn, reference, viz
from attnjourney.ops.gated_linear_attention import UPDATES
from attnjourney.seeing.recording import StateRecord, _states
from tests.linear.test_gated_linear_attention import inputs
from tests.seeing.test_capture_models import Block
from tests.support.testing import DTYPES, assert_close_to_reference, pairs, random_tensor, row_id

MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad)
CLOSE = dict(atol=1e-12, rtol=1e-10)


def weights_in_closed_form(query, key, gate=None, beta=None, **_):
    """No recurrence: the writes of the delta rule are the solution of one triangular system, and all else is products
    of decays by differences of summed gates. Query and key for each head, (B, H, L, D), float64; scale 1."""
    batch, heads, length, dim = query.shape
    gate = query.new_zeros(batch, heads, length, 1) if gate is None else gate.double()
    sums = (gate if gate.dim() == 4 else gate[..., None]).expand(batch, heads, length, dim).cumsum(2)
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    decays = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(~lower[..., None], -torch.inf).exp()
    reads = torch.einsum("bhid,bhjd,bhijd->bhij", query, key, decays)
    if beta is None:
        return reads
    overlaps = torch.einsum("bhid,bhjd,bhijd->bhij", key, key, decays).tril(-1)
    rate = torch.diag_embed(beta.double())
    return reads @ torch.linalg.solve(torch.eye(length, dtype=torch.float64) + rate @ overlaps, rate)


def by_head(x, heads):
    return None if x is None else x.double().repeat_interleave(heads // x.shape[1], 1)


def unit(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


ROWS = pairs(
    update=UPDATES,
    dtype=DTYPES,
    heads=[(2, 2, 2), (4, 2, 2), (2, 1, 4), (3, 1, 1)],
    length=[1, 37],
    channels=[False, True],
    state=[False, True],
    qk_l2norm=[False, True],
)


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_gated_linear_attention(row):
    row = dict(row)
    options = {"update": row["update"], "qk_l2norm": row.pop("qk_l2norm")}
    tensors = inputs(dims=(8, 5), **row)
    plain, last = attnjourney.gated_linear_attention(**tensors, scale=0.7, return_state=True, **options)
    query, key, _, gate, beta, before = (by_head(x, plain.shape[1]) for x in tensors.values())
    if options["qk_l2norm"]:
        query, key = unit(query), unit(key)
    expected = weights_in_closed_form(0.7 * query, key, gate, beta)
    for mode in MODES:
        with mode(), attnjourney.capture(None, state_weights=True) as seen:
            out = attnjourney.gated_linear_attention(**tensors, scale=0.7, **options)
            again, state = attnjourney.gated_linear_attention(**tensors, scale=0.7, return_state=True, **options)
        assert torch.equal(out, plain) and torch.equal(again, plain) and torch.equal(state, last)
        assert len(seen) == 0 and seen.states.names == [f"gated_linear_attention.{i}" for i in range(2)]
        for record in seen.states:
            assert torch.equal(record.state, last.repeat_interleave(plain.shape[1] // last.shape[1], 1))
            for name in ("gate", "beta"):
                mine, given = getattr(record, name), tensors[name]
                assert given is None and mine is None or torch.equal(mine.double(), by_head(given, plain.shape[1]))
            assert record.nbytes == last.numel() * last.element_size() and record.normalizer is None
            assert record.settings["update"] == row["update"] and not record.state.requires_grad
            assert record.weights.dtype == torch.float64
            torch.testing.assert_close(record.weights, expected, **CLOSE)

    # the map is the call's: with the values, and what the initial state adds, it gives the output
    exact = record.weights @ by_head(tensors["value"], plain.shape[1])
    nothing = {**tensors, "value": torch.zeros_like(tensors["value"])}
    exact += reference.gated_linear_attention(**{n: double(x) for n, x in nothing.items()}, scale=0.7, **options)
    formula = reference.gated_linear_attention(**tensors, scale=0.7, **options)
    rounding = 16 * torch.finfo(row["dtype"]).eps * exact.abs().amax((-2, -1), keepdim=True).expand(exact.shape)
    assert_close_to_reference(plain, formula, exact, rounding=rounding)

    with attnjourney.capture(None, state_weights=True, rows=[-1, 0], heads=[-1, 0]) as seen:
        attnjourney.gated_linear_attention(**tensors, scale=0.7, **options)
    (part,), last_row = seen.states, row["length"] - 1
    chosen = part.heads.tolist()
    assert chosen == [plain.shape[1] - 1, 0] and part.rows.tolist() == [last_row, 0]
    torch.testing.assert_close(part.weights, record.weights[:, chosen][:, :, [last_row, 0]], **CLOSE)
    assert torch.equal(part.state, record.state[:, chosen]) and part.nbytes == record.nbytes


def double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def test_without_being_asked_no_weights_and_any_length():
    tensors = inputs(torch.float32, length=_states.MAX_ROWS + 1)
    with attnjourney.capture(None) as seen:
        attnjourney.gated_linear_attention(**tensors)
    assert seen.states[0].weights is None and seen.states[0].half_life.shape == (2, 2, _states.MAX_ROWS + 1)
    with pytest.raises(ValueError, match="state_weights: expected at most 512 rows, got 513"):
        with attnjourney.capture(None, state_weights=True):
            attnjourney.gated_linear_attention(**tensors)


def test_packed_sequences_see_their_own_rows():
    tensors = inputs(torch.float64, length=30, batch=1, sequences=3, state=True)
    ends = torch.tensor([0, 7, 7, 28])
    with attnjourney.capture(None, state_weights=True) as seen:
        _, last = attnjourney.gated_linear_attention(**tensors, cu_seqlens=ends, return_state=True)
    (record,) = seen.states
    assert torch.equal(record.state, last) and record.weights.shape == (1, 2, 30, 30)
    own = torch.zeros(30, 30, dtype=torch.bool)
    for a, b in ((0, 7), (7, 28)):
        own[a:b, a:b] = True
        alone = {n: None if n == "initial_state" else x[:, :, a:b] for n, x in tensors.items()}
        expected = weights_in_closed_form(16**-0.5 * alone.pop("query"), **alone)
        torch.testing.assert_close(record.weights[..., a:b, a:b], expected, **CLOSE)
    assert not record.weights[..., ~own].any()


LINEAR = [
    dict(),
    dict(is_causal=False),
    dict(is_causal=False, key_padding_mask=torch.arange(9) >= torch.tensor([[9], [4]])),
    dict(feature_map=None, normalize=False, scale=0.5),
    dict(feature_map="relu", eps=0.1),
]


@pytest.mark.parametrize("options", LINEAR, ids=lambda o: " ".join(o) or "default")
def test_linear_attention(options):
    for dtype in DTYPES:
        shapes = (2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 5)
        q, k, v = (random_tensor(shape, dtype, s, outliers=False) for s, shape in enumerate(shapes))
        plain, (state, normalizer) = attnjourney.linear_attention(q, k, v, return_state=True, **options)
        for mode in MODES:
            with mode(), attnjourney.capture(None, state_weights=True) as seen:
                out = attnjourney.linear_attention(q, k, v, **options)
            (record,) = seen.states
            assert torch.equal(out, plain) and record.operator == "linear_attention"
            assert torch.equal(record.state, state.repeat_interleave(2, 1))
            kept = state.nbytes
            if normalizer is not None:
                assert torch.equal(record.normalizer, normalizer.repeat_interleave(2, 1))
                kept += normalizer.nbytes
            assert record.nbytes == kept and record.half_life is None and record.beta is None
        # a value of 1 in one place: a column of the map
        eye = torch.eye(9, dtype=torch.float64).expand(2, 2, 9, 9)
        expected = reference.linear_attention(q.double(), k.double(), eye, **options)
        torch.testing.assert_close(record.weights, expected, **CLOSE)


# ---------------------------------------------------------------------------------------------------- numbers


def record_of(state, **fields):
    return StateRecord("a", "gated_linear_attention", 0, state, torch.arange(state.shape[1]), torch.arange(0), **fields)


def test_numbers_of_a_state():
    one = torch.outer(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([1.0, 0.0]))
    two = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    uneven = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    broken = torch.full((3, 2), math.nan)
    record = record_of(torch.stack([one, two, uneven, torch.zeros(3, 2), broken])[None])
    expected = torch.tensor([5.0, 8**0.5, 10**0.5, 0.0, math.nan])
    torch.testing.assert_close(record.norm[0], expected, equal_nan=True)
    expected = torch.tensor([[5, 0], [2, 2], [3, 1], [0, 0], [math.nan] * 2], dtype=torch.float64)
    torch.testing.assert_close(record.singular_values[0], expected, equal_nan=True)
    by_shares = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    expected = torch.tensor([1.0, 2.0, by_shares, 0.0, math.nan], dtype=torch.float64)
    torch.testing.assert_close(record.effective_rank[0], expected, equal_nan=True)


def test_half_life_is_where_half_is_left():
    gates = torch.tensor([-math.log(2), -math.log(2) / 50, 0.0, -math.inf, 0.3, math.nan])
    half_life = record_of(torch.zeros(1, 1, 2, 2), gate=gates.view(1, 1, 6)).half_life.flatten()
    expected = torch.tensor([1.0, 50.0, math.inf, 0.0, math.inf, math.nan])
    torch.testing.assert_close(half_life, expected, equal_nan=True)
    # of what is written first, half is there after 50 rows of that gate
    one = torch.ones(1, 1, 51, 1, dtype=torch.float64)
    gate = gates[1].double().expand(1, 1, 51).clone()
    with attnjourney.capture(None, state_weights=True) as seen:
        attnjourney.gated_linear_attention(one, one, one, gate, update="gated")
    torch.testing.assert_close(seen.states[0].weights[0, 0, 50, 0].item(), 0.5)


# ---------------------------------------------------------------------------------------------------- models


class GatedLayer(torch.nn.Module):
    def __init__(self, width=16, heads=2, dtype=None):
        super().__init__()
        self.heads, self.projection = heads, torch.nn.Linear(width, 3 * width + 2 * heads, dtype=dtype)

    def forward(self, x):
        q, k, v, gate, beta = self.projection(x).split([x.shape[-1]] * 3 + [self.heads] * 2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        gate, beta = -torch.nn.functional.softplus(gate).mT, beta.sigmoid().mT
        out = attnjourney.gated_linear_attention(q, k, v, gate, beta, qk_l2norm=True)
        return out.transpose(1, 2).flatten(2)


def hybrid():
    torch.manual_seed(1)
    layers = GatedLayer(), nn.CausalSelfAttention(16, 4), nn.LinearAttention(16, 4, 2)
    return torch.nn.Sequential(*map(Block, layers))


def test_beside_layers_with_weights():
    m, x = hybrid(), torch.randn(2, 6, 16)
    with torch.no_grad(), attnjourney.capture(m, rows=[-1]) as seen:
        expected = m(x)
        m(x[:, :3])
    assert torch.equal(expected, m(x))
    assert seen.names == ["1.attention"] and seen.states.names == ["0.attention", "2.attention"]
    assert [r.step for r in seen.states] == [0, 0, 1, 1] and len(seen.states.of("0.attention")) == 2
    assert seen.states["0.attention"].state.shape == (2, 2, 8, 8) and seen.states["2.attention"].beta is None
    assert seen["1.attention"].weights.shape == (2, 4, 1, 3)
    assert "states: Records(4 records)" in repr(seen)
    for layers, weights, states in (
        ("0", [], ["0.attention"]),
        (0, ["1.attention"], ["0.attention"]),  # the first with weights, the first with a state
        (1, [], ["2.attention"]),
    ):
        with attnjourney.capture(m, layers=layers) as seen:
            m(x)
        assert seen.names == weights and seen.states.names == states
    records = []
    with attnjourney.capture(m, hook=records.append) as seen:
        m(x)
    assert [r.name for r in records] == ["0.attention", "1.attention", "2.attention"]
    assert len(seen) == len(seen.states) == 0
    with attnjourney.capture(m) as seen:
        m(x)
    seen.clear()
    assert len(seen) == len(seen.states) == 0
    with pytest.raises(ValueError, match="heads: expected numbers from -2 to 1, got 2"):
        with attnjourney.capture(m[0], heads=[2]):
            m[0](x)


def test_training_is_not_changed_and_a_record_is_a_copy():
    m, x, results = hybrid(), torch.randn(2, 6, 16), []
    for block in (contextlib.nullcontext, lambda: attnjourney.capture(m, state_weights=True)):
        m.zero_grad()
        with block() as seen:
            out = m(x)
            out.square().sum().backward()
        results.append([out, *(p.grad.clone() for p in m.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(seen.states) == 2
    tensors = inputs(torch.float32)
    with attnjourney.capture(None) as seen:
        _, state = attnjourney.gated_linear_attention(**tensors, return_state=True)
    before = seen.states[0].state.clone(), seen.states[0].gate.clone()
    state.zero_(), tensors["gate"].zero_()
    assert torch.equal(seen.states[0].state, before[0]) and torch.equal(seen.states[0].gate, before[1])


def test_compiled_and_checkpointed_models():
    m, x = hybrid(), torch.randn(2, 6, 16)
    with torch.no_grad(), attnjourney.capture(m) as expected:
        m(x)
    torch._dynamo.reset()
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), attnjourney.capture(compiled) as seen:
        compiled(x)
    for a, b in zip(seen.states, expected.states, strict=True):
        torch.testing.assert_close(a.state, b.state)
    with attnjourney.capture(m) as seen:
        torch.utils.checkpoint.checkpoint(m, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert len(seen) == 1 and len(seen.states) == 2


def test_generation_carries_the_state():
    m = nn.LinearAttention(16, 4, 2, dtype=torch.float64)
    x, state = torch.randn(1, 6, 16, dtype=torch.float64), None
    with torch.no_grad(), attnjourney.capture(m) as seen:
        m(x)
        for i in range(6):
            _, state = m(x[:, i : i + 1], initial_state=state, return_state=True)
    assert len(seen.states) == 7 and len({r.nbytes for r in seen.states}) == 1
    torch.testing.assert_close(seen.states[-1].state, seen.states[0].state)


# ---------------------------------------------------------------------------------------------------- pictures


def drawn(axes):
    return torch.tensor(axes.images[0].get_array().data)


def test_state_figure_shows_weights_and_half_lives(tmp_path):
    pytest.importorskip("matplotlib")
    tensors = inputs(torch.float64, length=20)
    with attnjourney.capture(None, state_weights=True, heads=[1, 0]) as seen:
        attnjourney.gated_linear_attention(**tensors)
        attnjourney.gated_linear_attention(**inputs(torch.float64, "kda", length=20), update="kda")
        attnjourney.gated_linear_attention(**inputs(torch.float64, "linear", length=20), update="linear")
    gated, by_channel, linear = seen.states
    figure = viz.state_figure(gated, tmp_path / "state.png", sequence=1, title="a layer")
    assert (tmp_path / "state.png").read_bytes().startswith(b"\x89PNG")
    above, below = figure.axes[:2], figure.axes[2:4]
    for i, axes in enumerate(above):
        torch.testing.assert_close(drawn(axes), gated.weights[1, i])
        assert axes.images[0].norm.vmax == -axes.images[0].norm.vmin == gated.weights[1].abs().max()
    assert [axes.get_title() for axes in above] == ["head 1", "head 0"]
    for i, axes in enumerate(below):
        line = torch.tensor(axes.lines[0].get_ydata())
        torch.testing.assert_close(line, gated.half_life[1, i].clamp(0.1, 200))
    figure = viz.state_figure(by_channel)
    line = torch.tensor(figure.axes[2].lines[0].get_ydata())
    torch.testing.assert_close(line, by_channel.half_life[0, 0].clamp(0.1, 200).median(1).values)
    assert len(figure.axes[2].collections) == 1  # the band over channels
    assert len(viz.state_figure(linear).axes) == 3  # two heads and the colour bar


def test_state_figure_misuse():
    pytest.importorskip("matplotlib")
    gate = torch.zeros(1, 1, 4)
    gated, bare = record_of(torch.zeros(1, 1, 2, 2), gate=gate), record_of(torch.zeros(1, 1, 2, 2))
    rows = record_of(torch.zeros(1, 1, 2, 2), weights=torch.zeros(1, 1, 1, 4))
    for call, error, pattern in (
        (lambda: viz.state_figure(torch.eye(3)), TypeError, "record: expected a StateRecord.*got Tensor"),
        (lambda: viz.state_figure(bare), ValueError, "record: expected heads, and weights"),
        (lambda: viz.state_figure(gated, sequence=1), ValueError, "sequence: expected one of 1 of 'a', got 1"),
        (lambda: viz.state_figure(rows), ValueError, "record: expected weights of all rows"),
        (lambda: viz.heatmap([gated]), TypeError, "got StateRecord"),
    ):
        with pytest.raises(error, match=pattern):
            call()

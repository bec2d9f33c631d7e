"""attnjourney.viz: maps and summaries against plain formulas in float64, pictures against what they are drawn from."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnjourney
from attnjourney import reference, viz
from attnjourney.seeing.drawing import _blocks
from tests.support.options_cases import make
from tests.support.testing import DTYPES, random_tensor

ROOT = Path(__file__).parents[2]
CASES = [
    ["causal"],
    ["prefix", "row_mask"],
    ["causal", "mask", "softcap"],
    ["alibi", "sinks"],
    ["key_lengths", "bottom_right"],
    ["query_lengths", "window", "bottom_right", "scale"],
]


def pooled(weights, tile_q, tile_k, pool):
    """Tile by tile, by slices of the whole matrix."""
    rows = []
    for i in range(0, weights.shape[-2], tile_q):
        tiles = [weights[..., i : i + tile_q, j : j + tile_k] for j in range(0, weights.shape[-1], tile_k)]
        one = {
            "mean": lambda t: t.mean((-2, -1)),
            "max": lambda t: t.amax((-2, -1)),
            "share": lambda t: t.sum(-1).mean(-1),
        }
        rows.append(torch.stack([one[pool](tile) for tile in tiles], -1))
    return torch.stack(rows, -2)


@pytest.mark.parametrize("names", CASES, ids="+".join)
def test_maps_are_pooled_weights(names, monkeypatch):
    monkeypatch.setattr(_blocks, "BLOCK_ELEMENTS", 2000)  # blocks that begin and end inside tiles
    q, k, _, arguments = make(names, torch.float64, q_len=70, kv_len=150)
    weights = reference.attention_weights(q, k, **arguments)
    for pool, size in (("share", 20), ("mean", 40), ("max", 20), ("share", 150), ("max", 75)):
        maps = viz.attention_maps(q, k, size=size, pool=pool, **arguments)
        assert maps.tile == (math.ceil(70 / size), math.ceil(150 / size))
        torch.testing.assert_close(maps.values, pooled(weights, *maps.tile, pool), atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_maps_of_every_dtype_and_of_chosen_heads(dtype):
    q, k, _, arguments = make(["causal"], dtype, q_len=70, kv_len=70)
    weights = reference.attention_weights(q.double(), k.double(), **arguments)[:, [3, 1]]
    maps = viz.attention_maps(q, k, heads=[3, 1], size=10, **arguments)
    assert maps.heads == (3, 1) and maps.values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # a weight has one rounding, and 7 of them are summed
    eps = torch.finfo(dtype).eps
    bound = 7 * 2 * eps if dtype.itemsize == 2 else 64 * eps
    assert (maps.values.double() - pooled(weights, 7, 7, "share")).abs().max() <= bound


def test_ranks_and_empty_sequences():
    x = random_tensor((9, 4))
    assert viz.attention_maps(x, x, size=3).values.shape == (1, 3, 3)
    assert viz.attention_maps(x[None], x[None], size=3).values.shape == (1, 3, 3)
    assert viz.attention_maps(x.view(1, 1, 1, 9, 4), x.view(1, 1, 1, 9, 4)).values.shape == (1, 1, 1, 9, 9)
    assert viz.attention_maps(x[:0], x).values.shape == (1, 0, 9)
    assert viz.attention_maps(x, x[:0]).values.shape == (1, 9, 0)


MEMORY = """
import sys, torch
from pathlib import Path
from attnjourney import viz
torch.set_num_threads(1)
def run(n):
    q, k = torch.randn(2, 1, 1, n, 16)
    viz.attention_maps(q, k, is_causal=True, size=128)
    viz.head_summary(q, k, is_causal=True)
run(256)
Path("/proc/self/clear_refs").write_text("5")
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
run(int(sys.argv[1]))
print((peak() - before) << 10)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no peak memory that can be reset")
def test_memory_does_not_grow_with_the_square_of_the_length():
    n = 8192
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(n)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < n * n // 2  # bytes; the weights in float32 are 8 times that


# ---------------------------------------------------------------------------------------------------- summaries


def stats_by_loop(weights, shifts, sink_keys):
    """weights (batch, L, S) of one head, the position of each sequence's row 0; the definitions, row by row."""
    found = {name: [] for name in ("entropy", "distance", "sink_mass", "previous_mass", "self_mass")}
    for sequence, shift in zip(weights.tolist(), shifts):
        for i, row in enumerate(sequence):
            p, total = i + shift, sum(row)
            if total == 0:
                continue
            rest = 1 - total if 1 - total > 1e-9 else 0.0
            found["entropy"].append(-sum(w * math.log2(w) for w in [*row, rest] if w > 0))
            found["distance"].append(sum(w * abs(p - j) for j, w in enumerate(row)) / total)
            if p >= sink_keys:
                found["sink_mass"].append(sum(row[:sink_keys]))
            for name, j in (("previous_mass", p - 1), ("self_mass", p)):
                if 0 <= j < len(row):
                    found[name].append(row[j])
    return {name: sum(values) / len(values) for name, values in found.items()}


@pytest.mark.parametrize("names", CASES, ids="+".join)
def test_summary_against_a_loop(names, monkeypatch):
    monkeypatch.setattr(_blocks, "BLOCK_ELEMENTS", 1000)
    q, k, _, arguments = make(names, torch.float64, q_len=40, kv_len=60)
    weights = reference.attention_weights(q, k, **arguments)
    shifts = [0, 0]
    if arguments.get("causal_alignment") == "bottom_right":
        key_lengths = arguments.get("key_lengths", torch.tensor([60, 60]))
        shifts = (key_lengths - arguments.get("query_lengths", torch.tensor([40, 40]))).tolist()
    summary = viz.head_summary(q, k, heads=[2, 0], layer=5, sink_keys=2, **arguments)
    assert [(row.layer, row.head) for row in summary.rows] == [(5, 2), (5, 0)]
    for row in summary.rows:
        for name, value in stats_by_loop(weights[:, row.head], shifts, 2).items():
            assert getattr(row, name) == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_summary_of_heads_that_do_one_thing():
    n = 8
    eye = torch.eye(n)
    first = torch.zeros(n, n)
    first[:, 0] = 1
    previous = eye.roll(-1, 1)
    previous[0] = eye[0]
    weights = torch.stack([eye, first, previous, torch.full((n, n), 1 / n), torch.zeros(n, n)])
    itself, sink, back, even, blind = viz.weights_summary(weights, layers=[3], heads=[[0, 2, 4, 6, 8]]).rows
    assert (itself.entropy, itself.distance, itself.self_mass, itself.sink_mass) == (0, 0, 1, 0)
    assert (sink.sink_mass, sink.distance) == (1, 3.5) and (back.previous_mass, back.distance) == (1, 7 / 8)
    assert even.entropy == pytest.approx(3) and even.previous_mass == pytest.approx(1 / 8)
    assert all(math.isnan(x) for x in (blind.entropy, blind.distance, blind.self_mass))
    assert (blind.layer, blind.head) == (3, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_no_learned_sink(dtype):
    q, k, _, arguments = make(["causal"], dtype, q_len=200, kv_len=200)
    got = viz.head_summary(q, k, **arguments).rows[0].entropy
    weights = reference.attention_weights(q.double(), k.double(), **arguments)
    expected = stats_by_loop(weights[:, 0], [0, 0], 1)["entropy"]
    assert got == pytest.approx(expected, abs=20 * torch.finfo(dtype).eps)


def test_summary_as_table_and_as_dicts():
    summary = viz.weights_summary(torch.eye(4).expand(2, 3, 4, 4))
    lines = str(summary).splitlines()
    assert "entropy (bits)" in str(summary) and len(summary.as_dicts()) == 6
    assert [line.split("│")[1:3] for line in lines if line.startswith("│")][-1] == ["     1 ", "    2 "]
    assert len((summary + summary).rows) == 12


# ---------------------------------------------------------------------------------------------------- pictures


def images(figure):
    return [axes.images[0] for axes in figure.axes if axes.images]


def test_heatmap_shows_the_weights_on_one_scale(tmp_path):
    pytest.importorskip("matplotlib")
    weights = random_tensor((2, 3, 12, 12), torch.float64, outliers=False).softmax(-1)
    figure = viz.heatmap(weights, tmp_path / "maps.png", tokens=list("a$b c^{d}_\\ef"[:12]), title="all of them")
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")
    drawn = images(figure)
    for image, expected in zip(drawn, weights.flatten(0, 1)):
        torch.testing.assert_close(torch.tensor(image.get_array().data), expected, atol=1e-7, rtol=1e-6)
    assert len(drawn) == 6 and {(i.norm.vmin, i.norm.vmax) for i in drawn} == {(0.0, weights.float().max().item())}
    labels = [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()]
    assert labels == ["layer 0", "layer 1", "attention weight"]
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == ["head 0", "head 1", "head 2"]


def test_heatmap_of_maps_of_records_and_of_ragged_layers(tmp_path):
    pytest.importorskip("matplotlib")
    q, k, _, arguments = make(["causal"], torch.float32, q_len=90, kv_len=90)
    maps = viz.attention_maps(q, k, size=30, **arguments)
    with pytest.raises(ValueError, match=r"maps: expected one sequence, got.*\(2, 4, 30, 30\)"):
        viz.heatmap(maps)
    figure = viz.heatmap([maps.sequence(0), maps.sequence(1)], tmp_path / "a.png")
    assert len(images(figure)) == 8 and "tiles of 3 keys" in figure.axes[-1].get_ylabel()
    assert tuple(images(figure)[0].get_extent()) == (0, 90, 90, 0)

    layer = attnjourney.nn.CausalSelfAttention(32, 8)
    with attnjourney.capture(layer, heads=[1, 6]) as seen, torch.no_grad():
        layer(random_tensor((1, 10, 32)))
    figure = viz.heatmap([*seen, torch.eye(10)[None]])
    assert len(images(figure)) == 3
    assert [axes.get_title() for axes in viz.heatmap(seen).axes if axes.get_title()] == ["head 1", "head 6"]


def test_summary_figure(tmp_path):
    pytest.importorskip("matplotlib")
    summary = viz.weights_summary(torch.eye(4).expand(2, 3, 4, 4))
    figure = viz.summary_figure(summary, tmp_path / "few.png", title="few")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][-1] == "layer 1, head 2"
    assert figure.axes[4].collections[-1].get_offsets()[:, 0].tolist() == [1.0] * 6  # itself
    many = viz.weights_summary(torch.eye(4).expand(12, 12, 4, 4))
    assert len(viz.summary_figure(many, tmp_path / "many.png").axes[0].get_yticks()) == 12
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


W = torch.eye(4).expand(2, 3, 4, 4)


@pytest.mark.parametrize(
    "call, error, pattern",
    [
        (lambda: viz.attention_maps(W, W, size=0), ValueError, "size: expected at least 1, got 0"),
        (lambda: viz.attention_maps(W, W, pool="sum"), ValueError, "pool: expected one of.*'max', got 'sum'"),
        (lambda: viz.attention_maps(W, W, rows=[1]), TypeError, "rows"),
        (lambda: viz.attention_maps(W, W[..., :3]), ValueError, "key: expected the head_dim of query, 4"),
        (lambda: viz.attention_maps(W, W, heads=[3]), ValueError, "heads"),
        (lambda: viz.head_summary(W, W, sink_keys=0), ValueError, "sink_keys: expected at least 1, got 0"),
        (lambda: viz.weights_summary(W[0, 0]), ValueError, r"weights: expected .* got shape \(4, 4\)"),
        (lambda: viz.weights_summary(W, heads=[[0], [1]]), ValueError, "heads: expected 3 of them, got 1"),
        (lambda: viz.weights_summary([W[0], "x"]), TypeError, "weights: expected tensors or records.*got str"),
        (lambda: viz.heatmap(W, layers=[1]), ValueError, "layers: expected 2 of them, got 1"),
        (lambda: viz.heatmap(W, tokens="abc"), ValueError, "tokens: expected 4 = 4 of them.*got 3"),
        (lambda: viz.heatmap([W]), ValueError, r"weights: expected.*one sequence.*\(2, 3, 4, 4\)"),
        (lambda: viz.heatmap(W, color_scale="log"), ValueError, "color_scale: expected 'sqrt' or 'linear', got 'log'"),
        (lambda: viz.heatmap([]), ValueError, "maps: expected at least one layer"),
        (lambda: viz.summary_figure(viz.HeadSummary(())), ValueError, "summary: expected at least one head"),
    ],
)
def test_wrong_arguments(call, error, pattern):
    pytest.importorskip("matplotlib")
    with pytest.raises(error, match=pattern):
        call()


def test_optional_packages_are_asked_for_when_needed(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "rich", "rich.table"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"matplotlib: pip install 'attnjourney\[viz\]'"):
        viz.heatmap(W)
    with pytest.raises(ImportError, match=r"rich: pip install 'attnjourney\[viz\]'"):
        str(viz.weights_summary(W))
    code = "import sys, attnjourney.viz; sys.exit(any(name in sys.modules for name in ('matplotlib', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

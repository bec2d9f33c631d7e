"""docs/journey.md: its code runs, its figures are drawn, its links lead somewhere; and tests of its mistakes."""

import ast
import doctest
import re
from pathlib import Path

import pytest
import torch

import attnjourney
from attnjourney import nn
from benchmarks.timing import Clock, Contestant, take_turns
from docs import journey_figures
from tests.support.testing import random_tensor

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/journey.md").read_text()


def test_the_code_of_the_journey():
    """The blocks in their order, one after the other in one namespace."""
    names, failures = {}, []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for match in re.finditer(r"^```python\n(.*?)^```$", TEXT, re.M | re.S):
        line = TEXT[: match.start()].count("\n") + 1
        block = doctest.DocTestParser().get_doctest(match[1], names, "docs/journey.md", "docs/journey.md", line)
        assert block.examples, f"docs/journey.md:{line}: a block without >>>"
        runner.run(block, out=failures.append, clear_globs=False)
        names = block.globs
    assert not failures, "".join(failures)
    assert runner.tries > 50


def test_figures_and_links():
    used = re.findall(r"\(figures/([\w-]+)\.png\)", TEXT)
    assert sorted(used) == sorted(journey_figures.FIGURES)
    for name in used:
        path = ROOT / f"docs/figures/{name}.png"
        assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size < 60_000, name
    headings = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", TEXT, re.M)}
    for anchor in re.findall(r"\]\(#([^)]*)\)", TEXT):
        assert anchor in headings
    for url in re.findall(r"\]\((https?[^)]*)\)", TEXT):
        assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}|https://cdn\.openai\.com/\S+\.pdf", url), url


def test_the_tests_that_it_names_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) >= 6
    for file, function in named:
        tree = ast.parse((ROOT / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{function}"


@pytest.mark.parametrize("name", [n for n in journey_figures.FIGURES if n != "heads"])
def test_figures_are_drawn(name, tmp_path):
    (path,) = journey_figures.draw([name], tmp_path)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_heads_learn_to_repeat(tmp_path):
    """The figure's claim: in the second half every head of layer 2 looks at what followed the same letter before."""
    model = journey_figures.trained_on_repeats(120)
    tokens = journey_figures.repeats(8, torch.Generator().manual_seed(7))
    with torch.no_grad(), attnjourney.capture(model, layers="2.attention") as seen:
        model(tokens)
    rows = torch.arange(12, 24)
    assert seen[0].weights[:, :, rows, rows - 11].mean() > 0.8


# ---------------------------------------------------------------------------------------------------- the mistakes


def test_mixed_rotary_layouts_change_lengths():
    """And scores at one distance; neither layout of ours does, with its own tables."""
    x = random_tensor((1, 1, 1, 32), torch.float64, 3, outliers=False).expand(1, 1, 40, 32)
    mixed = journey_figures.mixed_rotary(x, torch.arange(40, dtype=torch.float64))
    for turned, right in (
        (attnjourney.rope(x), True),
        (attnjourney.rope(x, interleaved=True), True),
        (mixed, False),
    ):
        lengths, scores = turned.norm(dim=-1), (turned[..., 7:, :] * turned[..., :-7, :]).sum(-1)
        for numbers in (lengths, scores):
            spread = (numbers.max() - numbers.min()) / x.norm(dim=-1).max()
            assert (spread < 1e-12) == right and (right or spread > 0.05)


def test_one_rotary_key_for_all_heads():
    """A change of the shared rotary rows of kv_a reaches every head, and the cache holds rank + rope numbers."""
    torch.manual_seed(0)
    layer = nn.MultiheadLatentAttention(
        16, 4, q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=6, v_head_dim=4, rope=1e4,
        dtype=torch.float64,
    )  # fmt: skip
    assert layer.kv_a_proj_with_mqa.out_features == 8 + 6
    x = random_tensor((2, 5, 16), torch.float64, 1, outliers=False)
    before = attnjourney.trace_module(layer, x).weights
    with torch.no_grad():
        layer.kv_a_proj_with_mqa.weight[8:] *= 2
    after = attnjourney.trace_module(layer, x).weights
    assert ((before - after).abs().amax((0, 2, 3)) > 1e-4).all()
    cache = attnjourney.LatentCache(2, 5, 8, 6, dtype=torch.float64)
    with torch.no_grad():
        layer(x, cache=cache)
    assert cache.nbytes == 2 * 5 * (8 + 6) * 8
    assert attnjourney.LatentCache(1, 1, 512, 64).nbytes == 4 * 576  # DeepSeek-V3


def test_no_contestant_pays_the_warm_up(monkeypatch):
    """No time that counts is that of a first call, and all first calls are over before any time counts."""
    calls, measured = [], []

    class Call:
        def __init__(self, name):
            self.name, self.times = name, 0

        def __call__(self):
            calls.append((self.name, self.times))
            self.times += 1

    measure = Clock.measure

    def spy(self, call, count):
        before = len(calls)
        seconds = measure(self, call, count)
        measured.append((seconds / count, calls[before:]))
        return seconds

    monkeypatch.setattr(Clock, "measure", spy)
    contestants = {name: Contestant(Call(name), threads=1) for name in ("ours", "theirs")}
    take_turns(contestants, {}, Clock("wall", 1), budget=0.02)
    counted = [any(seconds in c.times for c in contestants.values()) for seconds, _ in measured]
    first_calls = [any(number == 0 for _, number in made) for _, made in measured]
    assert sum(first_calls) == 2 and any(counted)
    assert not any(a and b for a, b in zip(counted, first_calls))
    assert first_calls[: counted.index(True)].count(True) == 2

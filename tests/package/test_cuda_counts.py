"""tools.cuda_counts: that docs/cuda.md says what it says, and that it counts the kernels which are there."""

import re

import pytest

from tools import cuda_counts, latent_turns
from tools.cuda_record import ROOT


def test_the_document_has_its_table():
    assert cuda_counts.table() in (ROOT / "docs/cuda.md").read_text()


def test_tiles_are_the_kernels():
    source = (ROOT / "csrc/cuda/inst/sm90/forward.h").read_text()
    shapes = re.findall(r"Sm90ForwardShape<T, (\d+), (\d+), (\d+), (\d+), \d+, \d+, \w+, \w+, \d+, (\w+)>", source)
    there = {(int(dqk), int(dv), 64 * int(groups), int(keys)) for dqk, dv, groups, keys, _ in shapes}
    counted = {(*dims, k.rows, k.keys) for dims, *kernels, _ in cuda_counts.FORWARD for k in kernels}
    assert counted == there
    stored = {(int(dqk), int(dv)): store == "true" for dqk, dv, _, _, store in shapes}
    assert all(stored[dims] == k.chained for dims, *kernels, _ in cuda_counts.FORWARD for k in kernels)
    pairs = re.findall(r"go_in_pairs\.template operator\(\)<Sm90ForwardShape<T, (\d+), (\d+)", source)
    assert tuple((int(dqk), int(dv)) for dqk, dv in pairs) == cuda_counts.PAIRED
    sizes = (ROOT / "csrc/cuda/sizes.h").read_text()
    rows = int(re.search(r"backward_rows\(int size\) { return (\d+) / size; }", sizes)[1])
    for dims, kernel, _ in cuda_counts.BACKWARD:
        if max(dims) <= 128:
            assert (kernel.rows, kernel.keys) == (rows // max(dims), 128)
    table = (ROOT / "docs/cuda.md").read_text()
    for dims, kernel, _ in cuda_counts.BACKWARD:
        if kernel.shared:
            about = f"{dims[0]}{' with values of 128' * (dims[1] == 128)}"
            row = re.search(
                rf"backward, {about} \| {kernel.rows} rows x {kernel.keys} keys \| \d+ \| ([\d +]+) \|", table
            )
            assert sum(map(int, row[1].split("+"))) == kernel.shared


def test_clocks_of_a_small_call():
    """By hand: 132 heads of one tile each, and one more, which waits for the first to end."""
    kernel = cuda_counts.Forward(128, 128)
    tile = 2 * 128 * 128 * 256 / 4096 + 128 * 128 / 16 / 2 + cuda_counts.CHAINED
    for heads, waves in ((132, 1), (133, 2)):
        seconds = kernel.seconds(cuda_counts.Heads(heads, 128, 128, 128))
        assert seconds == pytest.approx(waves * tile / cuda_counts.CLOCK + cuda_counts.LAUNCH)
    causal = cuda_counts.Heads(1, 256, 128, 128, causal=True)
    assert kernel.row_tile(causal, 128) - kernel.row_tile(causal, 0) == kernel.tile(128, 128)


def test_blocks_of_a_fixed_order_wait():
    """Two blocks of keys: the later one is first at every tile of queries, the other one behind it."""
    kernel = cuda_counts.Backward(64, 128, deterministic=True)
    two, one = (cuda_counts.Heads(1, n, 128, 128) for n in (256, 128))
    waits = kernel.seconds(two) - kernel.seconds(one)
    clocks = 2 * kernel.tile(128, 128) + cuda_counts.TURN
    moved = (256 - 128) * (4 * 128 + 8 * 128) / cuda_counts.MEMORY
    assert waits == pytest.approx(clocks / cuda_counts.CLOCK + moved)


def test_warpgroups_in_turn(monkeypatch):
    """By hand: a tile of latents takes as long as what bounds it."""
    for name in ("LATENCY", "BARRIER", "SOFTMAX"):
        monkeypatch.setattr(latent_turns, name, 0)
    assert latent_turns.PRODUCTS == 2176 and latent_turns.SHARED_CLOCKS == 2368
    assert latent_turns.clocks_of_a_tile(1e9) == pytest.approx(2368)
    assert latent_turns.clocks_of_a_tile(16) == pytest.approx(latent_turns.BYTES / 16)
    monkeypatch.setattr(latent_turns, "SOFTMAX", 10000)  # one tile's after the other's: each needs the maximum so far
    assert latent_turns.clocks_of_a_tile(1e9) == pytest.approx(10000)

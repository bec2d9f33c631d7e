"""float32 attention on a CUDA device, at lengths for which Hopper has kernels of its own: as the emulator's tests."""

import math

import pytest
import torch
from test_cuda_emulator import causal, inputs_of
from test_cuda_emulator_split import SCALES, SIZES, check, scaled_inputs
from testing import random_tensor

import attnjourney  # noqa: F401  (registers the operators)

pytestmark = pytest.mark.cuda
CALLS = [  # as test_cuda_emulator.SHAPES, and the options that say the same
    ((2, 4, 2, 300, 300, 0, causal()), {"is_causal": True}),
    ((1, 6, 1, 130, 517, 28, causal(387)), {"is_causal": True, "causal_alignment": 1}),
    ((1, 2, 1, 700, 150, 0, causal(-550)), {"is_causal": True, "causal_alignment": 1}),
    ((1, 3, 3, 257, 1000, 0, {"left": 100, "right": 30}), {"window_size": (100, 30)}),
    (
        (2, 2, 2, 200, 400, 8, {"lengths": ((200, 90), (133, 400))}),
        {"query_lengths": (200, 90), "key_lengths": (133, 400)},
    ),
    ((1, 2, 1, 600, 600, 4, {"left": 20, "right": 3, "prefix": 140}), {"window_size": (20, 3), "prefix_length": 140}),
    ((1, 2, 2, 128, 5000, 0, {}), {}),
]


def forward(tensors, options):
    options = {n: torch.tensor(x, device="cuda") if n.endswith("lengths") else x for n, x in options.items()}
    device = [x.cuda() for x in tensors]
    out, lse = torch.ops.attnjourney.attention_forward(*device, enable_gqa=True, **options)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("call", CALLS)
def test_values(call, size):
    inputs, mask = inputs_of(call[0], torch.float32, size, size)
    check(forward(inputs, call[1]), inputs, mask)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCALES)
def test_scales(name, size):
    inputs, mask, _ = scaled_inputs(name, size, 130, 460)
    check(forward(inputs, {"is_causal": True, "causal_alignment": 1}), inputs, mask)


@pytest.mark.parametrize("size", SIZES)
def test_sums_do_not_drift(size):
    query, key = torch.zeros(1, 1, 128, size), torch.zeros(1, 1, 6000, size)
    value = random_tensor((1, 1, 6000, size), torch.float32, 3, outliers=False).abs()
    exact = value.double().mean(2, keepdim=True)
    assert ((forward((query, key, value), {})[0] - exact) / exact).abs().max() < 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("which,bad", [(0, math.nan), (1, math.inf), (2, math.nan)])
def test_what_is_not_finite(which, bad):
    inputs, mask = inputs_of((1, 2, 1, 300, 300, 0, causal()), torch.float32, 64, 64, False)
    clean = forward(inputs, {"is_causal": True})[0]
    inputs[which][:, :, 150] = bad
    out = forward(inputs, {"is_causal": True})[0]
    seen = torch.arange(300) == 150 if which == 0 else mask[0, 0, :, 150]
    torch.testing.assert_close(out[:, :, ~seen], clean[:, :, ~seen], rtol=1e-5, atol=1e-5)
    assert not out[:, :, seen].isfinite().all(-1).any()


def test_streams_and_graph():
    """Calls side by side have planes and counters of their own, with and without numbers that do not split."""
    inputs = [random_tensor((2, 4, 600, 64), torch.float32, seed).cuda() for seed in range(3)]
    bad = [inputs[0], inputs[1], inputs[2].clone()]
    bad[2][:, :, 599] = math.nan
    run = torch.ops.attnjourney.attention_forward
    expected, expected_bad = run(*inputs, is_causal=True)[0], run(*bad, is_causal=True)[0]
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    torch.cuda.synchronize()
    for stream in streams * 6:
        with torch.cuda.stream(stream):
            results.append((run(*inputs, is_causal=True)[0], run(*bad, is_causal=True)[0]))
    torch.cuda.synchronize()
    for good, other in results:
        assert torch.equal(good, expected) and torch.equal(other.nan_to_num(), expected_bad.nan_to_num())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*inputs, is_causal=True)[0]
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)

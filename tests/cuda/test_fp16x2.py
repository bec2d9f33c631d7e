"""float32 attention on a CUDA device, at lengths for which there are kernels on halves: as the emulator's tests."""

import math

import pytest
import torch

import attnjourney  # noqa: F401  (registers the operators)
from tests.emulator import test_fp16x2_backward as backward
from tests.emulator.test_attention import causal, inputs_of
from tests.emulator.test_fp16x2 import SCALES, SIZES, check, scaled_inputs
from tests.support.cuda_checks import check_streams_and_graph
from tests.support.testing import random_tensor

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
    out, lse, stats = torch.ops.attnjourney.attention_forward(*device, enable_gqa=True, **options)
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


def gradients(tensors, out, lse, grad_out, grad_lse, options, deterministic=False):
    options = {n: torch.tensor(x, device="cuda") if n.endswith("lengths") else x for n, x in options.items()}
    q, k, v, o, row, g, grad_row = [x.cuda() for x in (*tensors, out, lse, grad_out, grad_lse)]
    stats = torch.stack([row / math.log(2), torch.ones_like(row)], -1)
    torch.use_deterministic_algorithms(deterministic)
    try:
        grads = torch.ops.attnjourney.attention_backward(
            g, grad_row, q, k, v, None, o, row, stats, need=7, enable_gqa=True, **options
        )[:3]
    finally:
        torch.use_deterministic_algorithms(False)
    return [x.cpu() for x in grads]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("call", CALLS)
def test_gradients(call, size, deterministic):
    inputs, mask = inputs_of(call[0], torch.float32, size, size, outliers=False)
    grad_out = random_tensor((*inputs[0].shape[:3], inputs[2].shape[3]), torch.float32, 4, outliers=False)
    grad_lse = random_tensor(inputs[0].shape[:3], torch.float32, 5, outliers=False)
    (out, lse), *rest = backward.gradients_of(inputs, grad_out, grad_lse, mask)
    got = gradients(inputs, out, lse, grad_out, grad_lse, call[1], deterministic)
    backward.check(got, *rest)
    if deterministic:
        again = gradients(inputs, out, lse, grad_out, grad_lse, call[1], True)
        assert all(torch.equal(x, y) for x, y in zip(got, again))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", backward.SCALES)
def test_scales_of_gradients(name, size):
    inputs, grad_out, mask, _ = backward.scaled_inputs(name, size, 130, 210)
    grad_lse = torch.zeros(grad_out.shape[:3])
    (out, lse), *rest = backward.gradients_of(inputs, grad_out, grad_lse, mask)
    options = {"is_causal": True, "causal_alignment": 1}
    backward.check_scaled(gradients(inputs, out, lse, grad_out, grad_lse, options), rest)


@pytest.mark.parametrize("bad", [False, True])
def test_streams_and_graph(bad):
    """Calls side by side have planes and counters of their own, with and without numbers that do not split."""
    inputs = [random_tensor((2, 4, 600, 64), torch.float32, seed).cuda() for seed in range(4)]
    if bad:
        inputs[2][:, :, 599] = math.nan
    ops = torch.ops.attnjourney

    def run():
        out, lse, stats = ops.attention_forward(*inputs[:3], is_causal=True)
        torch.use_deterministic_algorithms(True)
        try:
            grads = ops.attention_backward(inputs[3], None, *inputs[:3], None, out, lse, stats, is_causal=True, need=7)
        finally:
            torch.use_deterministic_algorithms(False)
        return [out, *grads[:3]]

    check_streams_and_graph(run, 6)

"""Masks of blocks and attention_weights on a CUDA device: the cases of the emulator's tests, against float64."""

import pytest
import torch

import attnjourney
from tests.emulator.test_blocks import CASES, block_call
from tests.emulator.test_options import expected_of
from tests.emulator.test_weights import CASES as WEIGHTS
from tests.emulator.test_weights import TYPES, expected_weights, weights_bound
from tests.support.testing import GRADIENT_FACTOR, LSE_DTYPE, assert_close_to_reference, random_tensor

pytestmark = pytest.mark.cuda


def on_device(arguments):
    return {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_blocks(case, head_dim, dtype, deterministic):
    tensors, arguments, _, options = block_call(case, dtype, head_dim, head_dim)
    grad_out = random_tensor(tensors[0].shape, dtype, 4, outliers=False)
    grad_lse = random_tensor(tensors[0].shape[:3], LSE_DTYPE.get(dtype, torch.float32), 5, outliers=False)
    (plain, rounding), exact = expected_of(tensors, arguments, grad_out, grad_lse)
    given, device = on_device(arguments), [x.cuda().requires_grad_() for x in tensors]
    mask = options["attn_mask"].to("cuda")
    trained = [given[n].requires_grad_() for n in ("sinks", "alibi_slopes") if n in given]
    torch.use_deterministic_algorithms(deterministic)
    try:
        out, lse = attnjourney.attention(*device, return_lse=True, **{**given, "attn_mask": mask})
        grads = torch.autograd.grad((out, lse), (*device, *trained), (grad_out.cuda(), grad_lse.cuda()))
    finally:
        torch.use_deterministic_algorithms(False)
    for i, (got, values, width) in enumerate(zip((out, lse, *grads), exact, rounding, strict=True)):
        factor = {} if i < 2 else {"factor": GRADIENT_FACTOR}
        assert_close_to_reference(got.detach().cpu(), plain[i], values, rounding=width, **factor)


def test_blocks_in_a_graph():
    """Nothing waits for the device: the call can be captured."""
    tensors, arguments, _, options = block_call(CASES[0], torch.bfloat16, 64, 64)
    given = on_device(arguments) | {"attn_mask": options["attn_mask"].to("cuda")}
    device = [x.cuda() for x in tensors]
    expected = attnjourney.attention(*device, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnjourney.attention(*device, **given)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", WEIGHTS, ids=lambda case: "-".join(case[0]) or "none")
def test_weights(case, dtype):
    rows, heads = case[4], case[5]
    tensors, arguments, options, lse, expected = expected_weights(case, dtype)
    given = on_device(arguments)
    if "attn_mask" in options:
        given["attn_mask"] = options["attn_mask"].to("cuda")
    weights = attnjourney.attention_weights(
        tensors[0].cuda(), tensors[1].cuda(), lse=lse.cuda(), rows=list(rows), heads=list(heads), **given
    )
    assert not weights.cpu()[expected == 0].any()
    assert not expected.numel() or (weights.cpu().double() - expected).abs().max() <= weights_bound(dtype)


def test_a_captured_model_is_read_on_the_fused_path():
    layer = attnjourney.nn.GroupedQueryAttention(64, 4, 2).to("cuda", torch.bfloat16)
    x = torch.randn(2, 70, 64, device="cuda", dtype=torch.bfloat16)
    with attnjourney.capture(layer, rows=[-1]) as seen:
        layer(x)
    weights = seen.records[0].weights
    assert weights.is_cuda and torch.allclose(
        weights.float().sum(-1), torch.ones_like(weights[..., 0].float()), atol=2e-2
    )

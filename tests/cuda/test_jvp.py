"""The derivative of attention in a direction on a CUDA device: values against float64."""

import pytest
import torch

import attnjourney  # noqa: F401  (registers the operators)
from tests.emulator.test_jvp import CASES, formula_arguments, in_directions, moving_of
from tests.emulator.test_options import call
from tests.support.cuda_checks import check_streams_and_graph
from tests.support.derivative_checks import compare
from tests.support.testing import DTYPES, OUTPUT_FACTOR, random_tensor

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[0]))
def test_options(case, dtype):
    names, q_len, kv_len, moving = case
    head_dim = (64, 128, 256)[(CASES.index(case) + DTYPES.index(dtype)) % 3]
    tensors, arguments = call(names, dtype, q_len, kv_len, head_dim, head_dim)
    plainly = formula_arguments(tensors, arguments)
    given = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    mask = given.pop("attn_mask", None)
    if "causal_alignment" in given:
        given["causal_alignment"] = 1
    tangents = {f"{n}_tangent": x.cuda() for n, x in moving_of(tensors, plainly, moving).items()}
    ops, device = torch.ops.attnjourney, [x.cuda() for x in tensors]
    results = ops.attention_forward(*device, mask, **given)
    changes = ops.attention_jvp(*device, mask, *results, **tangents, **given)
    outputs = ("out_tangent", "lse_tangent")
    actual = dict(zip(outputs, (x.cpu() for x in changes)))
    compare(in_directions(moving, outputs), actual, tensors, plainly, "", OUTPUT_FACTOR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_is_as_dense(dtype):
    """Sequences of equal length: the bits of a batch."""
    dense = [random_tensor((2, 50, 4, 64), dtype, seed, outliers=False).cuda() for seed in range(6)]
    ops, packed = torch.ops.attnjourney, [x.flatten(0, 1) for x in dense]
    batch = [x.transpose(1, 2) for x in dense]
    results = ops.attention_forward(*batch[:3], is_causal=True)
    expected = ops.attention_jvp(*batch[:3], None, *results, *batch[3:], is_causal=True)
    offsets = [torch.tensor([0, 50, 100], device="cuda")] * 2
    results = ops.varlen_attention_forward(*packed[:3], *offsets, is_causal=True)
    changes = ops.varlen_attention_jvp(*packed[:3], *offsets, *results, *packed[3:], is_causal=True)
    assert torch.equal(changes[0].view(2, 50, 4, 64).transpose(1, 2), expected[0])
    assert torch.equal(changes[1].view(4, 2, 50).transpose(0, 1), expected[1])


def test_streams_and_graph():
    inputs = [random_tensor((2, 4, 300, 64), torch.bfloat16, seed).cuda() for seed in range(6)]
    results = torch.ops.attnjourney.attention_forward(*inputs[:3], is_causal=True)
    jvp = torch.ops.attnjourney.attention_jvp
    check_streams_and_graph(lambda: list(jvp(*inputs[:3], None, *results, *inputs[3:], is_causal=True)))

"""The derivative of attention's backward in a direction on a CUDA device: values against float64, second derivatives
through the public functions, layouts, graphs."""

import pytest
import torch

import attnjourney
from tests.emulator.test_backward_jvp import CASES, EACH, given_of, gradients_in_directions, only
from tests.emulator.test_jvp import formula_arguments
from tests.emulator.test_options import call
from tests.support.cuda_checks import check_streams_and_graph
from tests.support.derivative_checks import compare, double_backward
from tests.support.testing import DTYPES, random_tensor

pytestmark = pytest.mark.cuda
NEED = {"query": 1, "key": 2, "value": 4, "attn_mask": 8, "sinks": 16, "alibi_slopes": 32}


DIMS = [(64, 40), (128, 128), (256, 136)]  # of query and value, in turns


@pytest.mark.parametrize("number", range(2 * len(CASES)))
def test_options(number):
    """Each case in two dtypes."""
    case, dtype = CASES[number // 2], DTYPES[(number // 2 + 2 * number) % len(DTYPES)]
    names, q_len, kv_len, _, moving = case
    dims = DIMS[number % len(DIMS)]
    tensors, arguments = call(names, dtype, q_len, kv_len, *dims)
    plainly = formula_arguments(tensors, arguments)
    given = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    mask = given.pop("attn_mask", None)
    if "causal_alignment" in given:
        given["causal_alignment"] = 1
    _, changes, grads, directions = given_of(tensors, plainly, moving)
    ops, device = torch.ops.attnjourney, [x.cuda() for x in tensors]
    results = ops.attention_forward(*device, mask, **given)
    tangents = {f"{n}_tangent": x.cuda() for n, x in directions.items()}
    found = ops.attention_backward_jvp(
        *(x.cuda() for x in grads), *device, mask, *results, *(x.cuda() for x in changes), need=63, **tangents, **given
    )
    actual = {n: x.cpu() for n, x in zip(NEED, found) if x.numel() or n in ("key", "value")}
    compare(only(gradients_in_directions(moving), actual), actual, tensors, plainly)


@pytest.mark.parametrize("dtype", DTYPES)
def test_double_backward(dtype):
    """Through autograd, with key and value heads that queries share."""
    tensors, arguments = call(("causal", "softcap", "sinks"), dtype, 150, 170, 64, 64)
    device = [x.cuda() for x in tensors]
    given = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}

    def on_device(function, tensors, arguments, dtype=None):
        if function is not attnjourney.attention:
            return double_backward(function, tensors, arguments, dtype)
        return {n: x.cpu() for n, x in double_backward(function, device, given).items()}

    actual = on_device(attnjourney.attention, tensors, arguments)
    compare(double_backward, actual, tensors, arguments)


@pytest.mark.parametrize("need", NEED.values())
def test_one_gradient_alone_has_the_same_bits(need):
    tensors, arguments = call(("mask", "sinks", "alibi"), torch.bfloat16, 90, 100, 72, 72)
    plainly = formula_arguments(tensors, arguments)
    given = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    mask = given.pop("attn_mask")
    _, changes, grads, directions = given_of(tensors, plainly, EACH)
    device = [x.cuda() for x in tensors]
    results = torch.ops.attnjourney.attention_forward(*device, mask, **given)
    tangents = {f"{n}_tangent": x.cuda() for n, x in directions.items()}
    saved = [*(x.cuda() for x in grads), *device, mask, *results, *(x.cuda() for x in changes)]
    both = [torch.ops.attnjourney.attention_backward_jvp(*saved, need=n, **tangents, **given) for n in (63, need)]
    for i, (every, alone) in enumerate(zip(*both)):
        assert torch.equal(every, alone) if need >> i & 1 else alone.numel() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_is_as_dense(dtype):
    """Sequences of equal length: the bits of a batch."""
    dense = [random_tensor((2, 50, 4, 64), dtype, seed, outliers=False).cuda() for seed in range(8)]
    ops, packed = torch.ops.attnjourney, [x.flatten(0, 1) for x in dense]
    batch = [x.transpose(1, 2) for x in dense]
    results = ops.attention_forward(*batch[:3], is_causal=True)
    changes = ops.attention_jvp(*batch[:3], None, *results, *batch[3:6], is_causal=True)
    expected = ops.attention_backward_jvp(
        batch[6], None, *batch[:3], None, *results, *changes, batch[7], None, *batch[3:6], is_causal=True, need=7
    )
    offsets = [torch.tensor([0, 50, 100], device="cuda")] * 2
    results = ops.varlen_attention_forward(*packed[:3], *offsets, is_causal=True)
    changes = ops.varlen_attention_jvp(*packed[:3], *offsets, *results, *packed[3:6], is_causal=True)
    found = ops.varlen_attention_backward_jvp(
        packed[6],
        None,
        *packed[:3],
        *offsets,
        *results,
        *changes,
        packed[7],
        None,
        *packed[3:6],
        is_causal=True,
        need=7,
    )
    for x, y in zip(found[:3], expected[:3]):
        assert torch.equal(x.view(2, 50, 4, 64).transpose(1, 2), y)


def test_streams_and_graph():
    inputs = [random_tensor((2, 4, 300, 64), torch.bfloat16, seed).cuda() for seed in range(8)]
    ops = torch.ops.attnjourney
    results = ops.attention_forward(*inputs[:3], is_causal=True)
    changes = ops.attention_jvp(*inputs[:3], None, *results, *inputs[3:6], is_causal=True)
    given = (inputs[6], None, *inputs[:3], None, *results, *changes, inputs[7], None, *inputs[3:6])
    check_streams_and_graph(lambda: list(ops.attention_backward_jvp(*given, is_causal=True, need=7))[:3])

"""Packed rows over a paged cache on a CUDA device: values against float64, prefill beside decoding, graphs."""

import math

import pytest
import torch

import attnjourney
from tests.attention.test_varlen import OPTIONS
from tests.cache.test_paged_attention import assert_right, make
from tests.cuda.test_decode import to_device
from tests.support.testing import DTYPES

pytestmark = pytest.mark.cuda
ROWS, KEYS = (1, 0, 170, 3, 1, 20, 16, 17), (1300, 5, 290, 0, 33, 150, 700, 40)
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (40, 24), (33, 17))


def on_device(tensors, arguments):
    return [to_device(x) for x in tensors], {n: to_device(x) for n, x in arguments.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "dropout"])
def test_values(option, dims, dtype):
    size = (16, 7, 64, 256)[len(option) % 4]
    tensors, arguments = make(dtype, size, ROWS, KEYS, dims=dims, extra=2)
    arguments |= OPTIONS[option]
    device, given = on_device(tensors, arguments)
    out, lse = (x.cpu() for x in attnjourney.varlen_attention(*device, **given, return_lse=True))
    assert_right((out, lse), tensors, arguments, f"{option} {dims}")
    assert not out[sum(ROWS) :].any() and (lse[:, sum(ROWS) :] == -math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [(1,) * 6, (40, 1, 1, 1), (300,), (16, 2)], ids=str)
def test_steps_of_generation(rows, dtype):
    """Decoding alone, a piece of a prompt beside it, a prompt alone, drafted tokens; the same bits every time."""
    keys = [n + 900 - 130 * i for i, n in enumerate(rows)]
    tensors, arguments = make(dtype, 16, rows, keys, heads=(8, 2), dims=(128, 128))
    arguments |= dict(is_causal=True, causal_alignment="bottom_right")
    device, given = on_device(tensors, arguments)
    first = attnjourney.varlen_attention(*device, **given, return_lse=True)
    assert_right([x.cpu() for x in first], tensors, arguments, str(rows))
    for _ in range(3):
        again = attnjourney.varlen_attention(*device, **given, return_lse=True)
        assert all(map(torch.equal, again, first))


def test_nothing_waits_and_a_graph_equals_the_call():
    tensors, arguments = make(torch.bfloat16, 16, ROWS, KEYS, dims=(64, 64))
    device, given = on_device(tensors, arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = attnjourney.varlen_attention(*device, **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnjourney.varlen_attention(*device, **given)
    graph.replay()
    assert torch.equal(out, expected)

"""Attention over numbers in e4m3 on a CUDA device: Hopper's kernel within what weights in e4m3 and the sums of its
tensor cores may bring, a refusal elsewhere."""

import math

import pytest
import torch

from attnjourney import attention_fp8
from attnjourney.reference._visibility import visibility
from attnjourney.reference.attention_fp8 import dequantize_fp8
from tests.attention.test_attention_fp8 import CASES, OUT_DTYPES, SIZES, make, options_of
from tests.support.fp8 import assert_close_to_fp8_reference
from tests.support.testing import pairs, row_id

pytestmark = pytest.mark.cuda
RANGES = ("is_causal", "causal_alignment", "window_size", "prefix_length", "key_lengths")


def is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def on_device(x):
    return x.cuda() if isinstance(x, torch.Tensor) else x


def check(tensors, out_dtype=torch.bfloat16, **options):
    given = {name: on_device(x) for name, x in options.items()}
    out, lse = attention_fp8(*map(on_device, tensors), enable_gqa=True, return_lse=True, out_dtype=out_dtype, **given)
    q, k, v = (dequantize_fp8(x, s, torch.float64) for x, s in zip(tensors[:3], tensors[3:]))
    ranges = {"is_causal": False, "causal_alignment": "top_left", "window_size": (-1, -1), "prefix_length": 0}
    ranges |= {"key_lengths": None, **{n: x for n, x in options.items() if n in RANGES}}
    wide = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    seen, _ = visibility(q, wide, None, *(ranges[n] for n in RANGES), None)
    seen = seen.expand(*q.shape[:3], k.shape[2])
    others = {n: x for n, x in options.items() if n not in RANGES}
    assert_close_to_fp8_reference(out.cpu(), lse.cpu(), q, k, v, seen, cut=True, **others)


@pytest.mark.skipif(not is_hopper(), reason="Hopper's kernel")
@pytest.mark.parametrize(
    "row",
    pairs(
        option=list(CASES),
        out_dtype=OUT_DTYPES,
        size=list(SIZES),
        per=("block", "head", "tensor"),
        layout=("contiguous", "transposed", "packed", "stepped_rows", "columns"),
    ),
    ids=row_id,
)
def test_values(row):
    tensors = make(row["size"], row["per"], row["layout"])
    check(tensors, row["out_dtype"], **options_of(row["option"], tensors))


@pytest.mark.skipif(not is_hopper(), reason="Hopper's kernel")
def test_without_keys_the_sinks_are_left():
    tensors = [x.cuda() for x in make((2, 2, 1, 3, 0, 16, 16))]
    sinks = torch.tensor([0.5, -1.0])
    out, lse = attention_fp8(*tensors, enable_gqa=True, sinks=sinks.cuda(), return_lse=True)
    assert not out.any() and torch.equal(lse.cpu(), sinks[:, None].expand(2, 2, 3))
    out, lse = attention_fp8(*tensors, enable_gqa=True, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.skipif(is_hopper(), reason="where Hopper's kernel does not run")
def test_other_gpus_are_named():
    with pytest.raises(RuntimeError, match="query: expected a GPU of compute capability 9.0 for dtype torch.float8"):
        attention_fp8(*(x.cuda() for x in make()), enable_gqa=True)

"""attention on a CUDA device: values against float64, layouts, streams, graphs, and what is refused."""

import os
import subprocess
import sys

import pytest
import torch

import attnjourney  # noqa: F401  (registers the operators)
from tests.emulator.test_options import CASES, PACKED, call, expected_of, packed_call, packed_expected
from tests.support.cuda_checks import check_streams_and_graph
from tests.support.testing import (
    DTYPES,
    GRADIENT_FACTOR,
    LSE_DTYPE,
    assert_close_to_reference,
    plain_run,
    random_tensor,
    reference_run,
)

pytestmark = pytest.mark.cuda
SHAPES = [  # batch, query heads, key heads, q_len, kv_len, head_dim, v_head_dim, causal
    (2, 4, 2, 300, 300, 64, 64, True),
    (1, 4, 4, 130, 517, 128, 128, False),
    (2, 6, 1, 257, 129, 80, 72, True),
    (1, 2, 2, 77, 65, 33, 20, False),
    (1, 2, 2, 1, 1, 8, 8, True),
    (1, 2, 1, 90, 150, 192, 128, True),
    (1, 2, 2, 100, 70, 256, 200, True),
    (1, 4, 2, 200, 300, 256, 256, False),
    (2, 2, 2, 5, 0, 64, 64, False),
    (1, 2, 2, 2200, 140, 64, 64, True),  # Hopper's backward: dQ by a pass of its own
]

PAIRS = [(256, head_dim, dtype) for head_dim in (128, 192) for dtype in (torch.bfloat16, torch.float16)]
PAIRS += [(256, 256, torch.bfloat16)]
WIDE = [  # dtype, head_dim, deterministic: the kernels for float32 and float64
    *((dtype, head_dim, False) for dtype in (torch.float32, torch.float64) for head_dim in (64, 128, 256)),
    (torch.float32, 64, True),
]


def operands(shape, dtype, layout="contiguous"):
    batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, _ = shape
    sizes = [(q_heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, v_head_dim)]
    return [random_tensor((batch, *size), dtype, seed, layout) for seed, size in enumerate(sizes)]


def on_device(x):
    """x on the device with the strides it has."""
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return y.copy_(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset", "stepped_rows"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape, layout, dtype):
    inputs = operands(shape, dtype, layout)
    options = {"is_causal": shape[-1], "enable_gqa": True}
    grad_out = random_tensor((*inputs[0].shape[:3], inputs[2].shape[3]), dtype, 4)
    grad_lse = random_tensor(inputs[0].shape[:3], LSE_DTYPE.get(dtype, torch.float32), 5)
    expected = reference_run((*inputs, None), grad_out, grad_lse, **options)
    plain, rounding = plain_run((*inputs, None), grad_out, grad_lse, **options)
    device = [on_device(x) for x in inputs]
    out, lse, stats = torch.ops.attnjourney.attention_forward(*device, **options)
    backward = torch.ops.attnjourney.attention_backward
    grads = backward(grad_out.cuda(), grad_lse.cuda(), *device, None, out, lse, need=7, **options)[:3]
    for i, got in enumerate((out, lse, *grads)):
        factor = {} if i < 2 else {"factor": GRADIENT_FACTOR}
        assert_close_to_reference(got.cpu(), plain[i], expected[i], rounding=rounding[i], **factor)


@pytest.mark.parametrize("q_len,head_dim,dtype", [*PAIRS, (257, 128, torch.bfloat16)])
def test_blocks_in_clusters(q_len, head_dim, dtype):
    """Two tiles of rows a head run in pairs on Hopper, three do not."""
    shape = (1, 72, 72, q_len, 600, head_dim, 128, False)
    inputs = operands(shape, dtype)
    grad_out = torch.zeros(1, 72, q_len, 128, dtype=dtype)
    expected = reference_run((*inputs, None), grad_out)
    plain, rounding = plain_run((*inputs, None), grad_out)
    device = [x.cuda() for x in inputs]
    torch.ops.attnjourney.attention_forward(*device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        out, lse, _ = torch.ops.attnjourney.attention_forward(*device)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if "forward" in event.name]
    if names and torch.cuda.get_device_capability() == (9, 0):
        assert any("Sm90ClusterShape" in name for name in names) == (q_len == 256), names
    for i, got in enumerate((out, lse)):
        assert_close_to_reference(got.cpu(), plain[i], expected[i], rounding=rounding[i])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[0]))
def test_options(case, head_dim, deterministic):
    """The cases of the emulator's tests, with all gradients."""
    check_options(case, torch.bfloat16, head_dim, deterministic)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[0]))
def test_more_than_256_columns(case, deterministic, dtype):
    check_options(case, dtype, 512, deterministic)


@pytest.mark.parametrize("dtype,head_dim,deterministic", WIDE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[0]))
def test_wide_options(case, dtype, head_dim, deterministic):
    check_options(case, dtype, head_dim, deterministic)


def check_options(case, dtype, head_dim, deterministic):
    names, q_len, kv_len = case
    tensors, arguments = call(names, dtype, q_len, kv_len, head_dim, head_dim)
    grad_out = random_tensor((2, 4, q_len, head_dim), dtype, 4, outliers=False)
    grad_lse = random_tensor((2, 4, q_len), LSE_DTYPE.get(dtype, torch.float32), 5, outliers=False)
    (plain, rounding), exact = expected_of(tensors, arguments, grad_out, grad_lse)
    given = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    mask = given.pop("attn_mask", None)
    if "causal_alignment" in given:
        given["causal_alignment"] = 1
    ops, device = torch.ops.attnjourney, [x.cuda() for x in tensors]
    torch.use_deterministic_algorithms(deterministic)
    try:
        out, lse, stats = ops.attention_forward(*device, mask, **given)
        grads = ops.attention_backward(grad_out.cuda(), grad_lse.cuda(), *device, mask, out, lse, stats, **given)
    finally:
        torch.use_deterministic_algorithms(False)
    trained = [mask, given.get("sinks"), given.get("alibi_slopes")]
    results = [out, lse, *grads[:3]]
    results += [g for g, x in zip(grads[3:], trained) if x is not None and x.is_floating_point()]
    for i, (got, values, width) in enumerate(zip(results, exact, rounding, strict=True)):
        factor = {} if i < 2 else {"factor": GRADIENT_FACTOR}
        assert_close_to_reference(got.cpu(), plain[i], values, rounding=width, **factor)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("case", PACKED)
def test_packed(case, head_dim):
    check_packed(case, torch.bfloat16, head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", PACKED)
def test_wide_packed(case, dtype):
    check_packed(case, dtype, 64)


def check_packed(case, dtype, head_dim):
    tensors, arguments, *_ = packed_call(case, dtype, head_dim, head_dim)
    grad_out = random_tensor(tensors[0].shape, dtype, 4, outliers=False)
    grad_lse = random_tensor(tensors[0].shape[:3], LSE_DTYPE.get(dtype, torch.float32), 5, outliers=False)
    plain, rounding, exact = packed_expected(tensors, arguments, case, grad_out, grad_lse)
    given = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments.items() if n != "enable_gqa"}
    if "causal_alignment" in given:
        given["causal_alignment"] = 1
    ops, rows_first = torch.ops.attnjourney, [x[0].transpose(0, 1).cuda() for x in (*tensors, grad_out)]
    offsets = [torch.tensor(x, device="cuda") for x in case[1:3]]
    out, lse, stats = ops.varlen_attention_forward(*rows_first[:3], *offsets, **given)
    grads = ops.varlen_attention_backward(
        rows_first[3], grad_lse[0].cuda(), *rows_first[:3], *offsets, out, lse, stats, **given
    )
    results = [out.transpose(0, 1)[None], lse[None], *(g.transpose(0, 1)[None] for g in grads[:3])]
    results += [g for g, name in zip(grads[3:], ("sinks", "alibi_slopes")) if name in given]
    for i, (got, values, width) in enumerate(zip(results, exact, rounding, strict=True)):
        factor = {} if i < 2 else {"factor": GRADIENT_FACTOR}
        assert_close_to_reference(got.cpu(), plain[i], values, rounding=width, **factor)


def test_192_128_forward():
    shape = (1, 4, 4, 200, 300, 192, 128, True)
    inputs = operands(shape, torch.bfloat16)
    out, lse, stats = torch.ops.attnjourney.attention_forward(*[x.cuda() for x in inputs], is_causal=True)
    grad_out = torch.zeros(out.shape, dtype=out.dtype)
    expected = reference_run((*inputs, None), grad_out, is_causal=True)
    plain, rounding = plain_run((*inputs, None), grad_out, is_causal=True)
    for i, got in enumerate((out, lse)):
        assert_close_to_reference(got.cpu(), plain[i], expected[i], rounding=rounding[i])


@pytest.mark.parametrize("shape", [*SHAPES[:2], *SHAPES[5:7]])
def test_deterministic_backward(shape):
    inputs = [x.cuda() for x in operands(shape, torch.bfloat16)]
    options = {"is_causal": shape[-1], "enable_gqa": True}
    out, lse, stats = torch.ops.attnjourney.attention_forward(*inputs, **options)
    grad_out = torch.randn_like(out)

    def gradients():
        saved = out, lse, stats
        return torch.ops.attnjourney.attention_backward(grad_out, None, *inputs, None, *saved, need=7, **options)[:3]

    usual = gradients()
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients()
        assert all(all(torch.equal(a, b) for a, b in zip(gradients(), first)) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, usual):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("arch,error", [("80", ""), ("90", "ATTNJOURNEY_CUDA_ARCH: expected 80 or nothing, got '90'")])
def test_the_kernels_of_every_gpu_on_this_one(arch, error):
    program = """
import torch, attnjourney
x = torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
torch.testing.assert_close(attnjourney.attention(x, x, x), expected, rtol=2e-2, atol=2e-2)
"""
    environment = {**os.environ, "ATTNJOURNEY_CUDA_ARCH": arch}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert error in done.stderr and (done.returncode != 0) == bool(error), done.stderr


def test_streams_and_graph():
    shape = (2, 4, 4, 600, 600, 64, 64, True)
    inputs = [x.cuda() for x in operands(shape, torch.bfloat16)]
    check_streams_and_graph(lambda: [torch.ops.attnjourney.attention_forward(*inputs, is_causal=True)[0]])


@pytest.mark.parametrize(
    "change,message",
    [
        ({"dim": 520}, "query: expected head dimensions of at most 512 on CUDA, got 520"),
        ({"dim": 264, "dtype": torch.float32}, "query: expected head dimensions of at most 256 on CUDA, got 264"),
    ],
)
def test_what_is_not_served_raises(change, message):
    x = torch.zeros(1, 1, 4, change.get("dim", 8), device="cuda", dtype=change.get("dtype", torch.bfloat16))
    with pytest.raises((RuntimeError, ValueError), match=message):
        torch.ops.attnjourney.attention_forward(x, x, x)

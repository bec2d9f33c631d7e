"""mla_decode on CUDA. Without a GPU: the CUDA library's own operator on CPU tensors, with the checks of a CUDA call and
the CPU's decode in place of kernels; with one, its values."""

import subprocess
import sys

import pytest
import torch

import attnjourney
from attnjourney import reference
from tests.cache.test_mla_decode import paged_latents
from tests.cuda.test_build import LIBRARIES, built  # noqa: F401  (a fixture)
from tests.support.testing import DTYPES, assert_close_to_reference, random_tensor

OPTIONS = [
    {},
    {"is_causal": False, "scale": 0.2},
    {"window_size": (9, -1), "prefix_length": 4},
    {"softcap": 2.0, "sinks": (2,), "alibi_slopes": (3, 2)},
    {"attn_mask": torch.bool},
    {"attn_mask": torch.float32},
]
# heads, q_len, nope, rope, kv_lora, v, lengths, capacity
SIZES = [
    (2, 1, 16, 8, 32, 12, (50, 3, 0), 54),
    (2, 3, 16, 8, 32, 12, (50, 30, 2), 54),
    (2, 40, 16, 8, 32, 12, (50, 3, 0), 54),  # expanded
    (2, 2, 13, 6, 31, 11, (9, 20, 4), 20),
    (2, 30, 260, 8, 32, 12, (40, 3, 0), 40),  # too wide to be expanded
]
LARGE = [
    (128, 1, 128, 64, 512, 128, (300, 1000, 17), 1000),
    (40, 2, 128, 64, 512, 128, (130, 70, 300), 300),
    (16, 1, 128, 64, 512, 128, (4000, 70, 3), 4096),
]


def call_of(size, options, dtype, block_size=0):
    """Arguments of mla_decode by name; latents are NaN beyond the lengths."""
    heads, q_len, nope, rope, kv_lora, v, lengths, capacity = size
    batch = len(lengths)
    query = random_tensor((batch, heads, q_len, nope + rope), dtype, outliers=False)
    latent = random_tensor((batch, capacity, kv_lora + rope), dtype, 1, outliers=False)
    for b, length in enumerate(lengths):
        latent[b, length:] = torch.nan
    weight = random_tensor((heads * (nope + v), kv_lora), torch.float64, 2, outliers=False) / kv_lora**0.5
    call = dict(query=query, latent=latent, lengths=torch.tensor(lengths), kv_b_weight=weight.to(dtype)) | options
    if block_size:
        call["latent"], call["block_table"] = paged_latents(latent, call["lengths"], block_size)
    for i, name in enumerate(("sinks", "alibi_slopes")):
        if name in options:
            per_head = random_tensor(tuple(heads if n == 2 else n for n in options[name]), dtype, 3 + i, outliers=False)
            call[name] = per_head.abs() / 8
    if "attn_mask" in options:
        mask = random_tensor((batch, heads, q_len, max(lengths)), torch.float32, 5, outliers=False)
        call["attn_mask"] = mask > -1 if options["attn_mask"] == torch.bool else mask
    return call


PROGRAM = f"""
import sys, torch
for name in ("_C_cpu.so", "_C_cuda.so"):
    torch.ops.load_library("{LIBRARIES}/" + name)
library = torch.library.Library("attnjourney", "FRAGMENT")
library.define("_cuda_" + str(torch._C._get_schema("attnjourney::mla_decode", "")).split("::", 1)[1])
results = []
for arguments in torch.load(sys.argv[1]):
    try:
        ours, own = (getattr(torch.ops.attnjourney, name)(**arguments) for name in ("_cuda_mla_decode", "mla_decode"))
        results.append([[a, b] for a, b in zip(ours, own, strict=True)])
    except Exception as error:
        results.append(f"{{type(error).__name__}}: {{str(error).splitlines()[0]}}")
torch.save(results, sys.argv[2])
"""


def run(calls, path):
    torch.save(calls, path / "calls")
    command = [sys.executable, "-c", PROGRAM, str(path / "calls"), str(path / "results")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(path / "results")


def test_the_operator_of_the_cuda_library(built, tmp_path):  # noqa: F811
    """Its products, views, pieces of heads: what the CPU's operator gives."""
    cases = [(size, options, block) for size in SIZES for options in OPTIONS for block in (0, 8)]
    calls = [call_of(size, options, torch.float64, block) for size, options, block in cases]
    for case, results in zip(cases, run(calls, tmp_path), strict=True):
        assert not isinstance(results, str), f"{case}: {results}"
        for got, expected in results:
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=lambda m, case=case: f"{case}: {m}")


def test_what_is_not_served_is_refused_by_name(built, tmp_path):  # noqa: F811
    wide = call_of((2, 1, 16, 8, 520, 12, (5,), 6), {}, torch.bfloat16)
    rotary = call_of((2, 1, 16, 80, 512, 12, (5,), 6), {}, torch.bfloat16)
    mask = call_of(SIZES[0], {"attn_mask": torch.bool}, torch.bfloat16, 8)
    mask["attn_mask"] = torch.ones(1, 1, 1, 57, dtype=torch.bool)  # blocks hold 56 keys
    said = run([wide, rotary, mask], tmp_path)
    most = "latent: expected at most 512 numbers of a latent and 576 with the rotary key on CUDA, got"
    assert f"{most} 520 and 528" in said[0] and f"{most} 512 and 592" in said[1], said
    assert "attn_mask: expected a last dimension of at most the capacity, 56, got shape (1, 1, 1, 57)" in said[2], said


# ---------------------------------------------------------------------------------------------------- on a GPU


def check_on_gpu(call):
    def to(x, kind):
        return x.to(kind) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    dtype = call["query"].dtype
    results = attnjourney.mla_decode(
        **{n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in call.items()}, return_lse=True
    )
    clean = call | {"latent": call["latent"].nan_to_num()}
    exact = reference.mla_decode(**{n: to(x, torch.float64) for n, x in clean.items()}, return_lse=True)
    plain = reference.mla_decode(**{n: to(x, dtype) for n, x in clean.items()}, return_lse=True)
    for name, got, p, e in zip(("out", "lse"), results, plain, exact):
        assert_close_to_reference(got.cpu(), p, e, name=name)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [0, 8])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values(size, options, block_size, dtype):
    check_on_gpu(call_of(size, options, dtype, block_size))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [0, 64])
@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
@pytest.mark.parametrize("size", LARGE, ids=str)
def test_sizes_of_deepseek_v3(size, options, block_size, dtype):
    check_on_gpu(call_of(size, options, dtype, block_size))


@pytest.mark.cuda
def test_graph():
    """Lengths may change between replays: nothing of a call is decided on the host."""
    call = {n: x.cuda() for n, x in call_of(LARGE[0], {}, torch.bfloat16).items()}
    call["latent"] = call["latent"].nan_to_num()
    attnjourney.mla_decode(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnjourney.mla_decode(**call)
    for lengths in ((1000, 5, 400), (0, 64, 65)):
        call["lengths"].copy_(torch.tensor(lengths))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, attnjourney.mla_decode(**call))

"""Token-sparse attention's CUDA kernels, run on the CPU by tests/emulator: as tests/emulator/test_attention.py."""

from functools import partial

import pytest
import torch

from tests.emulator.faults import sparse as faults_sparse
from tests.emulator.host import build, run, sparse
from tests.emulator.host.noticed import is_noticed
from tests.support.sparse_cases import SHAPES, Case, make, times_seen
from tests.support.testing import random_tensor

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# the kernels' size: dtype, head_dim, v_head_dim
PROGRAMS = {
    "64-bf16": ("64", BF16, 64, 64),
    "64-many-fp16": ("64-many", FP16, 64, 64),
    "128-fp16": ("128", FP16, 128, 128),
    "128-many-bf16": ("128-many", BF16, 128, 128),
    "256-bf16": ("256", BF16, 256, 256),
    "256-many-bf16": ("256-many", BF16, 256, 256),
    "latent-bf16": ("latent", BF16, 576, 512),
    "latent-small-fp16": ("latent-small", FP16, 576, 512),
    "fma-bf16": ("fma", BF16, 33, 20),
    "fma-fp32": ("fma", FP32, 61, 45),
    "fma-fp64": ("fma", FP64, 40, 33),
    "fma-latent-fp32": ("fma-latent", FP32, 576, 512),
    "fma-latent-fp64": ("fma-latent", FP64, 320, 260),
}
FAULT_SHAPES = [SHAPES[i] for i in (2, 4, 1, 6, 3, 7)]
FAULTS = [(name, *fault) for name, faults in faults_sparse.SPARSE.items() for fault in faults]


@pytest.fixture(scope="module")
def programs():
    of = {name: (dtype, size) for name, (size, dtype, *_) in PROGRAMS.items()}
    requests = [sparse.request(*of[name]) for name in PROGRAMS]
    requests += [sparse.request(*of[name], build.Fault(*edit)) for name, _, *edit in FAULTS]
    build.build_all(requests)


def check(program, name, shape, order="forward"):
    """All results of one shape."""
    size, dtype, *dims = PROGRAMS[name]
    latent = "latent" in size
    case = make(shape, dtype, *dims, latent)
    case.compare(sparse.call(program, case, latent, order)[0])


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(programs, name):
    """Every shape, in every order once over the programs."""
    size, dtype, *_ = PROGRAMS[name]
    program, first = build.program(*sparse.request(dtype, size)), list(PROGRAMS).index(name)
    shapes = SHAPES if "latent" not in name else [SHAPES[i] for i in (0, 2, 4, 6)]
    for i, shape in enumerate(shapes):
        order = run.ORDER_NAMES[(i + first) % len(run.ORDER_NAMES)]
        with run.named(f"{shape}, order {order}"):
            check(program, name, shape, order)


def check_nan(program, name):
    """A NaN shows where a row sees it and nowhere else; rows of a block see different keys."""
    size, dtype, dim, v_dim = PROGRAMS[name]
    q_len, kv_len, row, key, unnamed = 6, 40, 4, 38, 35
    indices = torch.rand(1, 2, 32, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :24].int()
    indices[:, :, :2] = torch.tensor([[key, 36], [key, 39]])  # rows 0 and 1 do not see 36, row 3 not 38, row 4 not 39
    rows = dict(query_block_size=3, is_causal=True, causal_alignment="bottom_right", key_lengths=None)
    for bad in ("key", "value", "query", "grad_out", "nothing"):
        q, k, grad_out = (random_tensor((1, 1, n, dim), dtype, seed=n) for n in (q_len, kv_len, q_len + 1))
        v, grad_out = random_tensor((1, 1, kv_len, v_dim), dtype, seed=3), grad_out[:, :, :q_len, :v_dim].contiguous()
        k[:, :, unnamed] = torch.nan
        v[:, :, unnamed] = torch.inf
        place = row if bad in ("query", "grad_out") else key
        if bad != "nothing":
            {"key": k, "value": v, "query": q, "grad_out": grad_out}[bad][0, 0, place, 3] = torch.nan
        times = times_seen(indices, q, k, **rows)[0, 0]
        case = Case(q, k, v, indices, grad_out, None, None, rows, dict(scale=0.3, softcap=0.0), {}, repeats=False)
        results, _ = sparse.call(program, case)
        names = ("out", "grad_query", "grad_key", "grad_value")
        shown = [(~results[name][0, 0].isfinite()).any(-1) for name in names]
        of_row = times[row] > 0
        bad_rows = times[:, key] > 0 if bad in ("key", "value") else torch.arange(q_len) == row
        assert bad_rows.any() and not bad_rows.all() and of_row.any()
        none, no_key, keys = torch.zeros(q_len), torch.zeros(kv_len), times[bad_rows].sum(0) > 0
        expected = {
            "nothing": (none, none, no_key, no_key),
            "grad_out": (none, bad_rows, keys, keys),
            "value": (bad_rows, bad_rows, keys, no_key),
        }
        for got, want in zip(shown, expected.get(bad, (bad_rows, bad_rows, keys, keys)), strict=True):
            assert torch.equal(got, want.bool()), (bad, got.nonzero(), want.nonzero())


@pytest.mark.parametrize("name", ["64-bf16", "128-many-bf16", "fma-fp32"])
def test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other(programs, name):
    size, dtype, *_ = PROGRAMS[name]
    check_nan(build.program(*sparse.request(dtype, size)), name)


@pytest.mark.parametrize("name, what, file, old, new", FAULTS, ids=[f"{name}-{what}" for name, what, *_ in FAULTS])
def test_a_fault_is_found(programs, name, what, file, old, new):
    size, dtype, *_ = PROGRAMS[name]
    program = build.program(*sparse.request(dtype, size, build.Fault(file, old, new)))
    calls = [(shape, order) for order in ("forward", "reverse", "starve") for shape in FAULT_SHAPES]
    checks = [partial(check, program, name, *call) for call in calls]
    assert is_noticed([*checks, partial(check_nan, program, name)], what)

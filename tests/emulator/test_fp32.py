"""The kernels for float32 and float64, run on the CPU by tests/emulator: as tests/emulator/test_options.py."""

from functools import partial

import pytest
import torch

from tests.emulator import test_options as options
from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.test_attention import causal
from tests.support.testing import random_tensor

TYPES = {torch.float32: "float", torch.float64: "double"}


def kernel(program, dtype, size):
    name = {"forward": "fp32_forward", "backward": "fp32_backward"}[program]
    return (name, (f"KERNEL=Fp32{program.capitalize()}Of<{TYPES[dtype]},{size}>",))


def forward_kernel(dtype, size, head_dim, v_head_dim):
    return kernel("forward", dtype, size), dtype, head_dim, v_head_dim


def backward_kernel(dtype, size, head_dim, deterministic=False):
    return kernel("backward", dtype, size), dtype, head_dim, deterministic


FORWARD = {
    "64-fp32": forward_kernel(torch.float32, 64, 64, 36),
    "128-fp32": forward_kernel(torch.float32, 128, 72, 128),
    "256-fp32": forward_kernel(torch.float32, 256, 256, 132),
    "64-fp64": forward_kernel(torch.float64, 64, 34, 64),
    "128-fp64": forward_kernel(torch.float64, 128, 128, 18),
    "256-fp64": forward_kernel(torch.float64, 256, 130, 256),
}
BACKWARD = {
    "64-fp32": backward_kernel(torch.float32, 64, 64),
    "128-fp32": backward_kernel(torch.float32, 128, 100),
    "256-fp32": backward_kernel(torch.float32, 256, 256),
    "64-fp64": backward_kernel(torch.float64, 64, 64),
    "128-fp64": backward_kernel(torch.float64, 128, 128),
    "256-fp64": backward_kernel(torch.float64, 256, 140),
    "64-fp32-deterministic": backward_kernel(torch.float32, 64, 60, True),
    "128-fp64-deterministic": backward_kernel(torch.float64, 128, 96, True),
}
CASES = [*options.CASES, ((), 140, 200), (("causal",), 200, 200), (("causal", "bottom_right"), 1, 40)]


def part_of(cases, kernels, name):
    return options.part_of(cases, kernels, name, 6)


FAULTY_FORWARD = [("64-fp32", *fault) for fault in faults.FP32_FORWARD]
FAULTY_BACKWARD = [("64-fp32", *fault) for fault in faults.FP32_BACKWARD]


@pytest.fixture(scope="module")
def programs():
    """Everything built, side by side."""
    requests = [entry[0] for entry in (*FORWARD.values(), *BACKWARD.values())]
    requests += [(*FORWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY_FORWARD]
    requests += [(*BACKWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY_BACKWARD]
    build.build_all(requests)


@pytest.mark.parametrize("name", FORWARD)
def test_forward(programs, name):
    options.check_all(options.check_forward, FORWARD, name, part_of(CASES, FORWARD, name))
    options.check_all(options.check_packed_forward, FORWARD, name, part_of(options.PACKED, FORWARD, name))


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(programs, name):
    options.check_all(options.check_backward, BACKWARD, name, part_of(CASES, BACKWARD, name))
    options.check_all(options.check_packed_backward, BACKWARD, name, part_of(options.PACKED, BACKWARD, name))


@pytest.mark.parametrize("name", ["64-fp32", "128-fp64"])
def test_nan_forward(programs, name):
    options.check_nan_forward(build.program(*FORWARD[name][0]), FORWARD[name], "random")


@pytest.mark.parametrize("name", ["64-fp32", "128-fp64"])
def test_nan_backward(programs, name):
    options.check_nan_backward(build.program(*BACKWARD[name][0]), BACKWARD[name], "random")


def test_long_sums_do_not_drift(programs):
    """Tensor cores cut sums off instead of rounding them: 2,000 keys of equal weight, values of one sign, which in one
    sum on such a unit would lose 1e-5."""
    query, key = torch.zeros(1, 1, 16, 64), torch.zeros(1, 1, 2000, 64)
    value = random_tensor((1, 1, 2000, 64), torch.float32, 3, outliers=False).abs()
    out = run.forward(build.program(*FORWARD["64-fp32"][0]), query, key, value, {}, "forward")[0][0]
    exact = value.double().mean(2, keepdim=True)
    assert ((out - exact) / exact).abs().max() < 8 * torch.finfo(torch.float32).eps


def test_tiles_that_no_row_sees_are_skipped(programs):
    program = build.program(*FORWARD["64-fp32"][0])
    x = [random_tensor((1, 1, 384, 64), torch.float32, seed) for seed in range(3)]
    full, half, window = (
        run.forward(program, *x, ranges)[1]["mma"] for ranges in ({}, causal(), {"left": 63, "right": 0})
    )
    assert half * 72 == full * 42  # 64 rows by 32 keys
    assert window * 72 == full * 22


def attempts(program, kernel, check, check_packed, check_nan):
    """What may notice a fault, the quick ones first."""
    for order in ("random", "forward", "reverse", "starve"):
        yield partial(check_nan, program, kernel, order)
        yield partial(check, program, kernel, (("mask", "left", "sinks"), 90, 100), order)
    yield from options.attempts(check, check_packed, check_nan, program, kernel)


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_FORWARD, ids=[f[1] for f in FAULTY_FORWARD])
def test_faulty_forward_is_found(programs, name, what, file, old, new):
    program = build.program(*FORWARD[name][0], build.Fault(file, old, new))
    checks = (options.check_forward, options.check_packed_forward, options.check_nan_forward)
    assert is_noticed(attempts(program, FORWARD[name], *checks), what)


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_BACKWARD, ids=[f[1] for f in FAULTY_BACKWARD])
def test_faulty_backward_is_found(programs, name, what, file, old, new):
    program = build.program(*BACKWARD[name][0], build.Fault(file, old, new))
    checks = (options.check_backward, options.check_packed_backward, options.check_nan_backward)
    assert is_noticed(attempts(program, BACKWARD[name], *checks), what)

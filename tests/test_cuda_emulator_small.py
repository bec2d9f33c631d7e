"""The backward kernels for GPUs whose blocks have 99 KB of shared memory, run on the CPU by tests/emulator: as
tests/test_cuda_emulator_options.py."""

import pytest
import test_cuda_emulator_options as options
import torch
from emulator import build, faults, run

pytestmark = pytest.mark.skipif(build.unsupported() is not None, reason=str(build.unsupported()))


def sm80(*shape):
    return options.kernel("backward", *shape, "true", 1)


def wide(dtype, size):
    return ("wide_backward", (f"KERNEL=WideBackwardSmall<{dtype},{size}>",))


BACKWARD = {  # kernel: (program, dtype, head_dim, deterministic)
    "64-fp16": (sm80("Half", 64, 128, 64, "false"), torch.float16, 64, False),
    "128-bf16-deterministic": (sm80("Bf16", 128, 64, 64, "true"), torch.bfloat16, 104, True),
    "128-fp32": (wide("float", 128), torch.float32, 100, False),
    "256-fp32": (wide("float", 256), torch.float32, 256, False),
    "64-fp64": (wide("double", 64), torch.float64, 64, False),
}
CASES = [*options.CASES[::4], ((), 140, 200), (("causal",), 200, 200)]
FEW = [(("mask", "left", "sinks"), 90, 100), (("causal", "bottom_right"), 40, 70)]  # for the tiles' other dtypes
FAULTY = [("64-fp16", *fault) for fault in faults.SMALL_BACKWARD]


@pytest.fixture(scope="module")
def programs():
    requests = [entry[0] for entry in BACKWARD.values()]
    build.build_all(requests + [(*BACKWARD[k][0], build.faulty_sources(*edit)) for k, _, *edit in FAULTY])


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(programs, name):
    of_16_bits = BACKWARD[name][1].itemsize == 2
    options.check_all(options.check_backward, BACKWARD, name, CASES if of_16_bits else FEW)
    options.check_all(options.check_packed_backward, BACKWARD, name, options.PACKED[:1] if of_16_bits else [])
    options.check_nan_backward(build.program(*BACKWARD[name][0]), BACKWARD[name], "random")


@pytest.mark.parametrize("name,what,file,old,new", FAULTY, ids=[f[1] for f in FAULTY])
def test_faulty_backward_is_found(programs, name, what, file, old, new):
    program = build.program(*BACKWARD[name][0], build.faulty_sources(file, old, new))
    for order in run.ORDER_NAMES:
        try:
            options.check_backward(program, BACKWARD[name], ((), 140, 200), order)
        except (AssertionError, run.EmulatorError):
            return
    pytest.fail(f"nothing noticed: {what}")

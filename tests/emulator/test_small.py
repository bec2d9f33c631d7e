"""The kernels for GPUs whose blocks have 99 KB of shared memory, run on the CPU by tests/emulator: as
tests/emulator/test_options.py."""

from functools import partial

import pytest
import torch

from tests.emulator import test_blocks as blocks
from tests.emulator import test_options as options
from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed


def sm80(dtype, size, deterministic=False):
    return ("attention_backward", (f"KERNEL=Sm80BackwardSmall<{dtype},{size},{str(deterministic).lower()}>", "RANGED"))


def fp32(dtype, size):
    return ("fp32_backward", (f"KERNEL=Fp32BackwardSmall<{dtype},{size}>",))


FORWARD = {  # as in tests/emulator/test_options.py
    "256-fp64": (("fp32_forward", ("KERNEL=Fp32ForwardSmall<double,256>",)), torch.float64, 130, 256)
}
BACKWARD = {  # kernel: (program, dtype, head_dim, deterministic)
    "64-fp16": (sm80("Half", 64), torch.float16, 64, False),
    "128-bf16-deterministic": (sm80("Bf16", 128, True), torch.bfloat16, 104, True),
    "256-fp16": (sm80("Half", 256), torch.float16, 256, False),
    "256-bf16-deterministic": (sm80("Bf16", 256, True), torch.bfloat16, 136, True),
    "128-fp32": (fp32("float", 128), torch.float32, 100, False),
    "256-fp32": (fp32("float", 256), torch.float32, 256, False),
    "64-fp64": (fp32("double", 64), torch.float64, 64, False),
    "128-fp64": (fp32("double", 128), torch.float64, 128, False),
    "256-fp64": (fp32("double", 256), torch.float64, 140, True),
}
CASES = [*options.CASES[::4], ((), 140, 200), (("causal",), 200, 200)]
FEW = [(("mask", "left", "sinks"), 90, 100), (("causal", "bottom_right"), 40, 70)]  # for the tiles' other dtypes
EIGHT = [(("dropout", "mask", "prefix"), 70, 72), (("bool_mask", "causal"), 25, 25)]  # for tiles of 8 rows or keys
BLOCKS = [("ragged", 16, (2, 4), ("softcap", "sinks"), 50, 70), ("document", 48, (2, 1), ("dropout",), 40, 70)]


@pytest.fixture(scope="module")
def programs():
    requests = [entry[0] for entry in (*FORWARD.values(), *BACKWARD.values())]
    requests += [(*BACKWARD[k][0], build.Fault(*edit)) for k, _, *edit in faults.SMALL_BACKWARD]
    build.build_all(requests)


def test_forward(programs):
    name = "256-fp64"
    options.check_all(options.check_forward, FORWARD, name, [*FEW, *EIGHT])
    options.check_all(options.check_packed_forward, FORWARD, name, options.PACKED[1:3])
    options.check_all(blocks.check_forward, FORWARD, name, BLOCKS)
    options.check_nan_forward(build.program(*FORWARD[name][0]), FORWARD[name], "random")


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(programs, name):
    _, dtype, head_dim, deterministic = BACKWARD[name]
    of_16_bits, large = dtype.itemsize == 2, head_dim > 128
    cases = CASES[deterministic :: 1 + large] if of_16_bits else FEW
    if dtype == torch.float64 and head_dim > 64:
        cases = [*EIGHT, FEW[0]]
        options.check_all(blocks.check_backward, BACKWARD, name, BLOCKS)
    options.check_all(options.check_backward, BACKWARD, name, cases)
    options.check_all(options.check_packed_backward, BACKWARD, name, options.PACKED[large : 2 if large else 1])
    options.check_nan_backward(build.program(*BACKWARD[name][0]), BACKWARD[name], "random")


def attempts(program, name):
    """What may notice a fault."""
    call = program, BACKWARD[name]
    orders = run.ORDER_NAMES if name == "64-fp16" else ()  # whose faults are races
    return [
        *(partial(options.check_backward, *call, ((), 140, 200), order) for order in orders),
        *(partial(options.check_backward, *call, case, "random") for case in (EIGHT[0], FEW[0])),
        partial(options.check_packed_backward, *call, options.PACKED[1], "random"),
        partial(blocks.check_backward, *call, BLOCKS[0], "random"),
    ]


@pytest.mark.parametrize(
    "name,what,file,old,new", faults.SMALL_BACKWARD, ids=[fault[1] for fault in faults.SMALL_BACKWARD]
)
def test_faulty_backward_is_found(programs, name, what, file, old, new):
    program = build.program(*BACKWARD[name][0], build.Fault(file, old, new))
    assert is_noticed(attempts(program, name), what)

"""Heads of more than 256 columns in the kernels on mma.sync, run on the CPU by tests/emulator: as test_options.py."""

from functools import partial

import pytest
import torch

from tests.emulator import test_blocks as blocks
from tests.emulator import test_options as options
from tests.emulator.faults import wide as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed


def forward_kernel(dtype, name, head_dim, v_head_dim):
    return ("wide_forward", (f"KERNEL=Sm80Forward512<{name}>",)), dtype, head_dim, v_head_dim


def backward_kernel(dtype, name, head_dim, deterministic=False):
    kernel = f"KERNEL=Sm80Backward512<{name},{str(deterministic).lower()}>"
    return ("attention_backward", (kernel, "WIDE", "RANGED")), dtype, head_dim, deterministic


FORWARD = {
    "bf16": forward_kernel(torch.bfloat16, "Bf16", 512, 456),
    "fp16": forward_kernel(torch.float16, "Half", 320, 512),
}
BACKWARD = {
    "fp16": backward_kernel(torch.float16, "Half", 512),
    "bf16-deterministic": backward_kernel(torch.bfloat16, "Bf16", 264, True),
}
CASES = [  # options, q_len, kv_len
    ((), 40, 50),
    (("causal",), 50, 50),
    (("mask", "left", "sinks"), 40, 50),
    (("dropout", "part_of_whole"), 35, 40),
    (("documents", "sinks"), 70, 90),
    (("bottom_right", "alibi", "softcap"), 33, 70),
    (("padding", "query_lengths"), 20, 70),
    (("row_mask", "key_lengths"), 33, 40),
    (("alibi_per_item", "window", "large_cap"), 40, 35),
    (("fp32_mask", "prefix"), 34, 40),
    (("column_mask", "scale"), 20, 30),
    (("sinks",), 20, 0),
]
BLOCKS = [  # as in test_blocks.py
    ("ragged", 16, (2, 4), ("softcap", "sinks"), 50, 70),
    ("document", 48, (2, 1), ("dropout",), 40, 90),
]
PACKED = [  # options, offsets of the queries' and the keys' sequences, rows and keys in all
    (("bottom_right", "alibi_per_sequence", "dropout"), (0, 20, 20, 25, 60), (0, 16, 30, 50, 50), 63, 51),
    (("causal", "sinks", "softcap"), (0, 35, 50), (0, 40, 45), 50, 45),
]
FAULTY_FORWARD = [("bf16", *fault) for fault in faults.FORWARD]
FAULTY_BACKWARD = [("fp16", *fault) for fault in faults.BACKWARD]
FAULTY_BACKWARD += [("bf16-deterministic", *fault) for fault in faults.DETERMINISTIC]


@pytest.fixture(scope="module")
def programs():
    """Everything built, side by side."""
    requests = [entry[0] for entry in (*FORWARD.values(), *BACKWARD.values())]
    requests += [(*FORWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY_FORWARD]
    requests += [(*BACKWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY_BACKWARD]
    build.build_all(requests)


def part_of(cases, kernels, name):
    return options.part_of(cases, kernels, name, 3)


@pytest.mark.parametrize("name", FORWARD)
def test_forward(programs, name):
    options.check_all(options.check_forward, FORWARD, name, part_of(CASES, FORWARD, name))
    options.check_all(options.check_packed_forward, FORWARD, name, part_of(PACKED, FORWARD, name))
    options.check_all(blocks.check_forward, FORWARD, name, part_of(BLOCKS, FORWARD, name))


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(programs, name):
    options.check_all(options.check_backward, BACKWARD, name, part_of(CASES, BACKWARD, name))
    options.check_all(options.check_packed_backward, BACKWARD, name, part_of(PACKED, BACKWARD, name))
    options.check_all(blocks.check_backward, BACKWARD, name, part_of(BLOCKS, BACKWARD, name))


def test_nan(programs):
    options.check_nan_forward(build.program(*FORWARD["bf16"][0]), FORWARD["bf16"], "random")
    options.check_nan_backward(build.program(*BACKWARD["fp16"][0]), BACKWARD["fp16"], "random")


def attempts(check, check_packed, check_nan, program, kernel):
    """What may notice a fault, the quick ones first."""
    for i, case in enumerate((*CASES, *PACKED)):
        order = run.ORDER_NAMES[i % len(run.ORDER_NAMES)]
        yield partial(check_packed if case in PACKED else check, program, kernel, case, order)
    for order in run.ORDER_NAMES:
        yield partial(check_nan, program, kernel, order)
        yield from [partial(check, program, kernel, case, order) for case in CASES[:2]]


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_FORWARD, ids=[f[1] for f in FAULTY_FORWARD])
def test_faulty_forward_is_found(programs, name, what, file, old, new):
    program = build.program(*FORWARD[name][0], build.Fault(file, old, new))
    checks = (options.check_forward, options.check_packed_forward, options.check_nan_forward)
    assert is_noticed(attempts(*checks, program, FORWARD[name]), what)


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_BACKWARD, ids=[f"{f[0]}: {f[1]}" for f in FAULTY_BACKWARD])
def test_faulty_backward_is_found(programs, name, what, file, old, new):
    program = build.program(*BACKWARD[name][0], build.Fault(file, old, new))
    checks = (options.check_backward, options.check_packed_backward, options.check_nan_backward)
    assert is_noticed(attempts(*checks, program, BACKWARD[name]), what)

"""Masks of blocks in the kernels for float32 and float64, run on the CPU by tests/emulator: the calls of
tests/emulator/test_blocks.py in the programs of tests/emulator/test_fp32.py."""

import pytest

from attnjourney import BlockMask
from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.test_blocks import CASES, FAR, attempts, check_backward, check_forward
from tests.emulator.test_fp32 import BACKWARD, FORWARD, part_of
from tests.emulator.test_options import call, check_all

FAULTY_FORWARD = [("64-fp32", *fault) for fault in faults.FP32_FORWARD_BLOCKS]
FAULTY_BACKWARD = [("64-fp32-deterministic", *fault) for fault in faults.FP32_BACKWARD_BLOCKS]


@pytest.fixture(scope="module")
def programs():
    """Everything built, side by side."""
    requests = [entry[0] for entry in (*FORWARD.values(), *BACKWARD.values())]
    requests += [(*FORWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY_FORWARD]
    requests += [(*BACKWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY_BACKWARD]
    build.build_all(requests)


@pytest.mark.parametrize("name", FORWARD)
def test_forward(programs, name):
    check_all(check_forward, FORWARD, name, part_of(CASES, FORWARD, name))


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(programs, name):
    check_all(check_backward, BACKWARD, name, part_of(CASES, BACKWARD, name))


def test_many_tiles(programs):
    check_forward(build.program(*FORWARD["64-fp32"][0]), FORWARD["64-fp32"], FAR, "random")


@pytest.mark.parametrize("name,rows", [("64-fp32", 64), ("256-fp64", 32)])
def test_blocks_that_hide_everything_are_skipped(programs, name, rows):
    """Blocks on the diagonal alone: the share of the products that they make."""
    _, dtype, head_dim, v_head_dim = FORWARD[name]
    program = build.program(*FORWARD[name][0])
    tensors = call((), dtype, 4 * rows, 4 * rows, head_dim, v_head_dim)[0]

    def products(seen):
        mask = BlockMask.from_function(seen, 1, 1, 4 * rows, 4 * rows, 32)
        return run.forward(program, *tensors, {"left": -1}, options={"attn_mask": mask})[1]["mma"]

    full = products(lambda b, h, i, j: (i >= 0) & (j >= 0))
    assert products(lambda b, h, i, j: i // rows == j // rows) * 4 == full


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_FORWARD, ids=[f[1] for f in FAULTY_FORWARD])
def test_faulty_forward_is_found(programs, name, what, file, old, new):
    program = build.program(*FORWARD[name][0], build.Fault(file, old, new))
    assert is_noticed(attempts(check_forward, program, FORWARD[name]), what)


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_BACKWARD, ids=[f[1] for f in FAULTY_BACKWARD])
def test_faulty_backward_is_found(programs, name, what, file, old, new):
    program = build.program(*BACKWARD[name][0], build.Fault(file, old, new))
    assert is_noticed(attempts(check_backward, program, BACKWARD[name]), what)

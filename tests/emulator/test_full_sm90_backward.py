"""attention's options in the Hopper backward, run on the CPU by tests/emulator: the cases of
tests/emulator/test_options.py and tests/emulator/test_blocks.py, whose checks these are, and more."""

from functools import partial

import pytest
import torch

from attnjourney import BlockMask
from tests.emulator.faults import full_backward as faults_full_backward
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.test_blocks import CASES as BLOCKS
from tests.emulator.test_blocks import check_backward as check_blocks
from tests.emulator.test_nan import check_backward as check_nan
from tests.emulator.test_options import CASES as OPTIONS
from tests.emulator.test_options import PACKED, call, check_all
from tests.emulator.test_options import check_backward as check_options
from tests.emulator.test_options import check_nan_backward as check_nan_options
from tests.emulator.test_options import check_packed_backward as check_packed


def kernel(*shape):
    entry = "ENTRY=sm90_full_columns_backward" if shape[1] == 256 else "ENTRY=sm90_full_backward"
    shape = f"SHAPE=Sm90FullBackwardShape<{','.join(map(str, shape))}>"
    return ("attention_backward", (shape, entry, "OPTIONS", "RANGED"))


BACKWARD = {  # kernel: (program, dtype, head_dim, deterministic)
    "64-fp16": (kernel("Half", 64, 128, "false"), torch.float16, 64, False),
    "128-bf16": (kernel("Bf16", 128, 64, "false"), torch.bfloat16, 128, False),
    "64-deterministic": (kernel("Bf16", 64, 128, "true"), torch.bfloat16, 64, True),
    "128-deterministic": (kernel("Half", 128, 64, "true"), torch.float16, 128, True),
    "256-bf16": (kernel("Bf16", 256, 64, "false"), torch.bfloat16, 256, False),
    "256-deterministic": (kernel("Half", 256, 64, "true"), torch.float16, 256, True),
}
TILES = [  # the mask's tiles come by TMA; of "own_mask" the kernel writes the gradient itself
    (("own_mask",), 150, 264),
    (("own_mask", "causal", "sinks"), 140, 136),
    (("own_mask", "dropout", "alibi", "query_lengths"), 70, 144),
    (("mask", "softcap"), 70, 136),
]
FAULTY = [("64-fp16", *fault) for fault in faults_full_backward.BACKWARD]
FAULTY += [("128-bf16", *fault) for fault in faults_full_backward.TURNS]
FAULTY += [("64-deterministic", *fault) for fault in faults_full_backward.DETERMINISTIC]
FAULTY += [("256-bf16", *fault) for fault in faults_full_backward.COLUMNS]
FAULTY += [("256-deterministic", *fault) for fault in faults_full_backward.DETERMINISTIC_COLUMNS]


@pytest.fixture(scope="module")
def programs():
    """Everything built, side by side."""
    requests = [entry[0] for entry in BACKWARD.values()]
    requests += [(*BACKWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY]
    build.build_all(requests)


def some(name, cases):
    """Of the deterministic kernel, which differs in how dQ is added, every other case."""
    return cases[::2] if BACKWARD[name][3] else cases


@pytest.mark.parametrize("name", BACKWARD)
def test_options(programs, name):
    check_all(check_options, BACKWARD, name, some(name, [case for case in OPTIONS if case[2]] + TILES))


@pytest.mark.parametrize("name", BACKWARD)
def test_packed(programs, name):
    check_all(check_packed, BACKWARD, name, PACKED)


@pytest.mark.parametrize("name", BACKWARD)
def test_blocks(programs, name):
    check_all(check_blocks, BACKWARD, name, some(name, BLOCKS))


@pytest.mark.parametrize("name", BACKWARD)
def test_nan(programs, name):
    program = build.program(*BACKWARD[name][0])
    check_nan(program, BACKWARD[name], "random", forward_lse=True)
    check_nan_options(program, BACKWARD[name], "reverse")


def test_hidden_tiles_are_skipped(programs, monkeypatch):
    """Half of the tiles hidden: half of the products, but for those at the ends of a key tile that count for nothing
    (kernels/sm90/full_backward.cuh): scores, dP and dQ, three quarters of a tile's."""
    counts, plain_run = [], run.run

    def counted(*arguments):
        results = plain_run(*arguments)
        counts.append(results[1]["mma"])
        return results

    monkeypatch.setattr(run, "run", counted)
    program, dtype, head_dim, _ = BACKWARD["128-bf16"]
    for case in ((("documents",), 256, 256), (("bool_mask",), 256, 256)):
        check_options(build.program(*program), BACKWARD["128-bf16"], case, "forward")
    tensors = call((), dtype, 256, 256, head_dim, head_dim)[0]
    given = (tensors[0], torch.zeros(2, 4, 256), tensors[0], torch.zeros(2, 4, 256))
    for seen in (lambda b, h, i, j: i // 128 == j // 128, lambda b, h, i, j: (i >= 0) & (j >= 0)):
        mask = BlockMask.from_function(seen, 1, 1, 256, 256, 64)
        run.backward(build.program(*program), tensors, *given, {"left": -1}, options={"attn_mask": mask})
    for half, full in (counts[:2], counts[2:]):  # two key tiles, of each two tiles of rows and four
        tile = (full - half) / 4
        assert half == (4 + 2 * 0.75) * tile > 0


FIND = [  # what faults show in, the quickest first
    (check_options, (("own_mask",), 150, 264)),
    (check_packed, PACKED[0]),
    (check_packed, PACKED[1]),
    (check_options, (("alibi", "dropout"), 140, 75)),
    (check_options, (("documents",), 260, 260)),
    (check_blocks, BLOCKS[0]),
]


def attempts(program, kernel):
    """What may notice a fault."""
    for order in ("random", "starve", "starve1", "forward"):
        yield from [partial(check, program, kernel, case, order) for check, case in FIND]
        yield partial(check_nan, program, kernel, order, forward_lse=True)


@pytest.mark.parametrize("name,what,file,old,new", FAULTY, ids=[f[1] for f in FAULTY])
def test_fault_is_found(programs, name, what, file, old, new):
    program = build.program(*BACKWARD[name][0], build.Fault(file, old, new))
    assert is_noticed(attempts(program, BACKWARD[name]), what)

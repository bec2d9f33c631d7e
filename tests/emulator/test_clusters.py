"""The Hopper forward in clusters of two blocks, which share the copies of keys and values, on the CPU by
tests/emulator. When a call runs so: tests/cuda/test_architectures.py."""

import itertools
from functools import partial

import pytest
import torch

from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.test_attention import FORWARD, check_forward, inputs_of, sm90_forward


def plain(kernel):
    """Its program without the kernel that looks at ranges."""
    source, defines = kernel[0]
    return source, (*defines, "PLAIN")


def in_pairs(kernel):
    (source, (define, alone)), *rest = plain(kernel), *kernel[1:]
    name, shape = define.split("=", 1)
    return (source, (f"{name}=Sm90ClusterShape<{shape}>", alone)), *rest


SMALL = sm90_forward("Bf16", 64, 64, 2, 128, 2, 2, 1, 4, 1), torch.bfloat16, 64, 64
KERNELS = {"64-bf16": in_pairs(SMALL)}  # as test_attention.FORWARD; a small one, and what is built
KERNELS |= {name: in_pairs(FORWARD[f"sm90-{name}"]) for name in ("128-bf16", "128-fp16", "192-bf16", "256-fp16")}
KERNELS["192-fp16"] = in_pairs((sm90_forward("Half", 192, 128, 2, 128, 2, 1, 1, 4, 0), torch.float16, 192, 128))
SHAPES = [  # as test_attention.SHAPES; blocks of the grid. Tiles of 128 rows
    ((1, 2, 1, 200, 330, 8, {}), 2),  # two rounds of a pair; the last tile of keys is not whole
    ((2, 1, 1, 256, 65, 0, {}), 4),  # the second half of the only tile of keys is nearly empty
    ((1, 1, 1, 400, 600, 0, {}), 3),  # 2: a block without the other is none
    ((1, 4, 2, 90, 200, 0, {}), 2),  # a pair of one tile each of two heads, which share their keys
]
ONE_TILE_MORE = (1, 1, 1, 300, 200, 0, {})  # than pairs
FAULTS = [("64-bf16", *fault) for fault in faults.SM90_CLUSTERS]


def faulty(name, *edit):
    return (*KERNELS[name][0], build.Fault(*edit))


@pytest.fixture(scope="module")
def programs():
    requests = [plain(SMALL), *(entry[0] for entry in KERNELS.values())]
    build.build_all(requests + [faulty(name, *edit) for name, _, *edit in FAULTS])


@pytest.mark.parametrize("name", KERNELS)
def test_forward(programs, name):
    program, first = build.program(*KERNELS[name][0]), list(KERNELS).index(name)
    for i, (shape, grid) in enumerate(SHAPES if name == "64-bf16" else SHAPES[:1]):
        for order in run.ORDER_NAMES[(i + first) % 2 :: 2]:
            with run.named(f"{shape}, order {order}"):
                check_forward(program, KERNELS[name], shape, order, i % 2 == 1, grid=grid)


def test_keys_and_values_are_read_once_for_both(programs):
    """Bytes that copies read; blocks alone, which say the same of results, bit by bit."""
    shape = (1, 1, 1, 256, 384, 0, {})
    inputs, _ = inputs_of(shape, torch.bfloat16, 64, 64)
    calls = {"pair": KERNELS["64-bf16"][0], "alone": plain(SMALL)}
    calls = {k: run.forward(build.program(*p), *inputs, {}, "forward", grid=2) for k, p in calls.items()}
    (pair, pair_counts), (alone, alone_counts) = calls["pair"], calls["alone"]
    queries, keys = 2 * 256 * 64, 2 * 2 * 384 * 64
    assert alone_counts["copied"] == queries + 2 * keys and pair_counts["copied"] == queries + keys
    assert pair_counts["mma"] == alone_counts["mma"]
    assert all(map(torch.equal, pair, alone))


def test_what_pairs_cannot_do(programs):
    """Tiles of which one would be alone with its keys, and tiles handed out one by one."""
    program = build.program(*KERNELS["64-bf16"][0])
    for shape, extra in ((ONE_TILE_MORE, {}), (SHAPES[0][0], {"counter": 1})):
        inputs, _ = inputs_of(shape, torch.bfloat16, 64, 64)
        with pytest.raises(run.EmulatorError, match="no call for clusters"):
            run.forward(program, *inputs, {}, "forward", grid=2, **extra)
    check_forward(build.program(*plain(SMALL)), KERNELS["64-bf16"], ONE_TILE_MORE, "forward", grid=2)


@pytest.mark.parametrize("name,what,file,old,new", FAULTS, ids=[f[1] for f in FAULTS])
def test_faulty_forward_is_found(programs, name, what, file, old, new):
    program = build.program(*faulty(name, file, old, new))
    calls = itertools.product(SHAPES[:1], run.ORDER_NAMES)
    checks = [partial(check_forward, program, KERNELS[name], shape, o, grid=grid) for (shape, grid), o in calls]
    assert is_noticed(checks, what)

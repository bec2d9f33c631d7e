"""Offsets of packed sequences as the CUDA kernels take them, their order, and the rows past the last of them, on the
CPU by tests/emulator."""

import itertools
from functools import partial

import pytest
import torch

from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed

CASES = [  # offsets, how many rows there are
    ([0, 70, 70, 75, 140], 143),
    ([0], 10),
    ([5, 3, -1, 40, 12, 1 << 30, 7], 30),
    (list(range(0, 3000, 3)), 2000),
    ([(i * 7919) % 1000 for i in range(700)], 900),
    ([(i * i + i) // 2 for i in range(513)], 1 << 30),
]


@pytest.fixture(scope="module")
def programs():
    requests = [("offsets",), *(("offsets", (), build.Fault(*fault[1:])) for fault in faults.OFFSETS)]
    requests += [("clear_tails",), *(("clear_tails", (), build.Fault(*fault[1:])) for fault in faults.TAILS)]
    build.build_all(requests)


def check(program, dtype, case, order):
    given, total = case
    expected = torch.tensor([0, *given[1:]]).clamp(0, total).cummax(0).values.int()
    tensor = torch.tensor(given, dtype=dtype)
    arguments = {"count": len(given), "total": total, "int32": dtype == torch.int32, **run.order_arguments(order)}
    items = len(given) - 1
    outputs = [((n,), torch.int32) for n in (items + 1, items, items + 1)]
    out, order, offsets = run.run(program, [tensor], outputs, arguments)[0]
    assert torch.equal(out, expected)
    rows = out.diff()
    as_they_lie = torch.arange(items)
    assert torch.equal(order.long(), rows.argsort(descending=True, stable=True) if items <= 512 else as_they_lie)
    assert torch.equal(offsets, torch.cat([rows.new_zeros(1), rows[order.long()].cumsum(0).int()]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_fit_the_tensors(programs, dtype):
    """What falls, is negative or past the end counts as the nearest number that fits."""
    for i, case in enumerate(CASES):
        check(build.program("offsets"), dtype, case, run.ORDER_NAMES[i % len(run.ORDER_NAMES)])
    if dtype == torch.int64:
        check(build.program("offsets"), dtype, ([0, 5, 1 << 40, 7, -(1 << 40)], 9), "random")


@pytest.mark.parametrize("what,file,old,new", faults.OFFSETS, ids=[f[0] for f in faults.OFFSETS])
def test_faulty_offsets_are_found(programs, what, file, old, new):
    program = build.program("offsets", (), build.Fault(file, old, new))
    calls = itertools.product(CASES, run.ORDER_NAMES)
    assert is_noticed([partial(check, program, torch.int32, *call) for call in calls], what)


def check_tails(program, begin, order):
    rows, heads, words = 300, 3, 34
    x = torch.randint(1, 100, (rows, heads, words), dtype=torch.int32)
    y = torch.randint(1, 100, (heads, rows, 2), dtype=torch.int32)
    arguments = {"rows": rows, "heads": heads, "words": words, "even": 7, "odd": 8, **run.order_arguments(order)}
    given = [x, y, torch.tensor([begin], dtype=torch.int32)]
    out, statistic = run.run(program, given, [(x.shape, x.dtype), (y.shape, y.dtype)], arguments)[0]
    x[begin:] = torch.tensor([7, 8], dtype=torch.int32).repeat(words // 2)
    y[:, begin:] = 0
    assert torch.equal(out, x) and torch.equal(statistic, y)


def test_tails_alone_are_cleared(programs):
    for begin, order in zip((0, 1, 299, 300), run.ORDER_NAMES):
        check_tails(build.program("clear_tails"), begin, order)


@pytest.mark.parametrize("what,file,old,new", faults.TAILS, ids=[f[0] for f in faults.TAILS])
def test_faulty_tails_are_found(programs, what, file, old, new):
    program = build.program("clear_tails", (), build.Fault(file, old, new))
    assert is_noticed([partial(check_tails, program, begin, "random") for begin in (0, 299, 300)], what)

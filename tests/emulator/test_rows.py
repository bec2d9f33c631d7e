"""The CUDA kernels that work row by row (rotation, RMS norm), run on the CPU by tests/emulator: values against float64,
and faults that must be found."""

from functools import partial

import pytest
import torch

from attnjourney.reference.rotary import rotate_half_split, rotate_interleaved
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.support.testing import DTYPES, GRADIENT_FACTOR, assert_close_to_reference, random_tensor

NUMBERS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
ROTARY = [  # batch, heads, seq, dim, half, 16 bytes at once
    (2, 3, 5, 48, 16, True),
    (2, 3, 5, 11, 3, False),
    (1, 40, 3, 64, 32, True),
    (3, 1, 37, 16, 8, True),
    (1, 150, 2, 7, 1, False),
    (1, 2, 3, 8, 0, False),
]
NORM = [(5, 64, 80, True), (3, 1000, 1000, True), (9, 7, 9, False), (130, 33, 33, False)]  # rows, width, x_row
FAULTS = [
    (
        "rows past the end are turned",
        "rows/rotary.cuh",
        "slot >= at_once || position >= task.positions",
        "slot >= at_once",
    ),
    ("the first sequence's table for all", "rows/rotary.cuh", "every  + batch * task.table_batch", ""),
    ("what does not turn is left out", "rows/rotary.cuh", "(dim - 2 * half) / v : 0", "0 : 0"),
    ("always forward", "rows/rotary.cuh", "task.inverse ? -s[i] : s[i]", "s[i]"),
    (
        "a lane's own sum",
        "common/numbers.cuh",
        "x += ptx::shfl_xor(x, mask)",
        "x += mask > 8 ? C(0) : ptx::shfl_xor(x, mask)",
    ),
    ("rstd that is given left aside", "rows/rms_norm.cuh", "if (task.given) {", "if (false) {"),
    ("rows past the end", "rows/rms_norm.cuh", "every   if (row >= task.rows) return;\n", ""),
    (
        "the sum in place of the mean",
        "rows/rms_norm.cuh",
        "warp_sum(sum) * static_cast<Real>(task.inverse_width)",
        "warp_sum(sum)",
    ),
    ("the mean left out", "rows/rms_norm.cuh", "grads[i] - values[i] * mean", "grads[i]"),
    ("the last part forgotten", "rows/rms_norm.cuh", "s < task.spans", "s + 1 < task.spans"),
]


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_rotary(program, row, dtype, interleaved, inverse, in_place, own, rows_first, order):
    batch, heads, seq, dim, half, vectors = row
    x = random_tensor((batch, heads, seq, dim), dtype)
    angle = 3 * random_tensor((batch if own else 1, seq, half), torch.float64, 1, outliers=False)
    cos, sin = angle.cos().to(wide(dtype)), angle.sin().to(wide(dtype))
    arguments = dict(kernel=0, batch=batch, heads=heads, seq=seq, dim=dim, half=half, vectors=vectors, own=own)
    arguments |= dict(dtype=NUMBERS[dtype], interleaved=interleaved, inverse=inverse, in_place=in_place)
    outputs = [(tuple(x.shape), dtype)]
    (out,), _ = run.run(program, [x, cos, sin], outputs, arguments | run.order_arguments(order), rows_first)
    turn = rotate_interleaved if interleaved else rotate_half_split
    tables = [t.double() if own else t[0].double() for t in (cos, -sin if inverse else sin)]
    expected = turn(x.double(), *tables)
    size = expected.abs().amax(-1, keepdim=True).expand_as(expected)  # a rounding of a sum of two products
    rounding = 4 * torch.finfo(dtype).eps * size
    assert_close_to_reference(out, expected.to(dtype), expected, rounding=rounding)
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])


def check_norm(program, row, dtype, order):
    rows, width, x_row, vectors = row
    double = torch.float64
    storage = random_tensor((rows, x_row), dtype, 2, outliers=False)
    weight = random_tensor((width,), dtype, 3, outliers=False)
    grad_y = random_tensor((rows, width), dtype, 4, outliers=False)
    arguments = dict(rows=rows, width=width, x_row=x_row, vectors=vectors, dtype=NUMBERS[dtype], eps=20, given=0)
    arguments |= run.order_arguments(order)

    def formula(kind):
        x, w = storage[:, :width].to(kind).requires_grad_(), weight.to(kind).requires_grad_()
        r = (x.to(wide(kind)).square().mean(-1) + 0.02).rsqrt()
        y = (x.to(wide(kind)) * r[:, None] * w.to(wide(kind))).to(kind)
        return [y.detach(), r.detach(), *torch.autograd.grad(y, (x, w), grad_y.to(kind))]

    expected, plain = formula(double), formula(dtype)
    shapes = [((rows, width), dtype), ((rows,), wide(dtype))]
    y, rstd = run.run(program, [storage, weight], shapes, arguments | {"kernel": 1})[0]
    again = run.run(program, [storage, weight, rstd], shapes, arguments | {"kernel": 1, "given": 1})[0][0]
    assert torch.equal(again, y)
    doubled = run.run(program, [storage, weight, 2 * rstd], shapes, arguments | {"kernel": 1, "given": 1})[0][0]
    assert dtype.itemsize == 2 or torch.equal(doubled, 2 * y)
    shapes = [((rows, width), dtype), ((width,), dtype)]
    inputs = [storage, weight, grad_y, rstd]
    grads = run.run(program, inputs, shapes, arguments | {"kernel": 2, "span": 16})[0]
    names = ("y", "rstd", "grad_x", "grad_weight")
    for i, (name, got) in enumerate(zip(names, (y, rstd, *grads), strict=True)):
        # sums of up to 1000 terms, in float32 or better whatever the dtype
        terms = expected[i].abs().amax().expand_as(expected[i])
        rounding = 8 * torch.finfo(got.dtype).eps * terms
        factor = {} if i < 2 else {"factor": GRADIENT_FACTOR}
        assert_close_to_reference(got, plain[i], expected[i], name=name, rounding=rounding, **factor)


def check_rotary_rows(program, dtypes=DTYPES):
    for i, row in enumerate(ROTARY):
        for j, dtype in enumerate(dtypes):
            n = i + j
            interleaved, inverse, rows_first = n % 2 == 1, (n // 2 + i) % 2 == 1, n // 2 % 2 == 1
            in_place, own = (i + n // 3) % 2 == 1 and row[4] > 0, n % 3 != 0
            order = run.ORDER_NAMES[n % len(run.ORDER_NAMES)]
            check_rotary(program, row, dtype, interleaved, inverse, in_place, own, rows_first, order)


def check_norm_rows(program, dtypes=DTYPES):
    for i, row in enumerate(NORM):
        for j, dtype in enumerate(dtypes):
            check_norm(program, row, dtype, run.ORDER_NAMES[(i + j) % len(run.ORDER_NAMES)])


def faulty(edit):
    return "rows", ("FLOAT_ALONE",), build.Fault(*edit)


@pytest.fixture(scope="module")
def programs():
    build.build_all([("rows",), *[faulty(edit) for _, *edit in FAULTS]])


def test_rotary(programs):
    check_rotary_rows(build.program("rows"))


def test_rms_norm(programs):
    check_norm_rows(build.program("rows"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_faults_are_found(programs, fault):
    program = build.program(*faulty(fault[1:]))
    checks = [partial(check, program, [torch.float32]) for check in (check_rotary_rows, check_norm_rows)]
    assert is_noticed(checks, fault[0])

"""The backward of float32 on planes of halves, run on the CPU by tests/emulator, and what is left to Fp32Backward.
Tensor cores are those that cut sums off after every four products."""

import math
from functools import partial

import pytest
import torch

from tests.emulator import test_fp16x2
from tests.emulator.faults import fp16x2_backward as faults_fp16x2_backward
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.test_attention import causal, inputs_of, with_nan
from tests.support.testing import GRADIENT_FACTOR, assert_close_to_reference, plain_run, random_tensor, reference_run

SIZES = (64, 128)
SHAPES = [
    (1, 2, 1, 150, 130, 0, {}),
    (2, 4, 2, 65, 150, 8, causal(85)),
    (1, 2, 1, 150, 65, 16, causal(-85)),  # the first 85 rows see no key
    (1, 1, 1, 3, 7, 56, {}),
    (1, 2, 1, 200, 200, 0, {"left": 70, "right": 0}),
    (
        2,
        2,
        2,
        70,
        420,
        8,
        {"left": 30, "right": 25, "prefix": 70, "bottom_right": 1, "lengths": ((70, 59), (420, 165))},
    ),
    (2, 1, 1, 70, 200, 0, {"lengths": ((70, 0), (0, 133))}),
]


SMALL = ("fp16x2_backward", ("DIM=128", "SMALL", "ALONE"))  # where blocks may have 99 KB of shared memory


def program(size, *edit):
    if not edit:
        return "fp16x2_backward", (f"DIM={size}",)
    alone = () if edit[0] == "fp32/backward.cuh" else ("ALONE",)
    return "fp16x2_backward", (f"DIM={size}", *alone), build.Fault(*edit)


def call(made, inputs, out, lse, grad_out, grad_lse, ranges, order="forward", rows_first=False, **extra):
    """Gradients of the three inputs, and whether the call was left to Fp32Backward."""
    arguments, lengths = run._arguments(*inputs, ranges, order)
    options, _ = run._options(inputs[0], {}, len(inputs[0]))
    arguments |= {**options, "span": 0, "deterministic": 0, "cut": 1, **extra}
    outputs = [*((tuple(t.shape), torch.float32) for t in inputs), ((1,), torch.int32)]
    tensors = [*inputs, out, grad_out, lse if lse.dim() == 1 else run.stats_of(lse), grad_lse, *lengths]
    results, counts = run.run(made, tensors, outputs, arguments, rows_first)
    return results[:3], results[3].item() > 0, counts


def gradients_of(inputs, grad_out, grad_lse, mask):
    """What the backward is given beside inputs, the reference's gradients, and plain ones with their rounding."""
    out, lse, *expected = reference_run((*inputs, mask), grad_out, grad_lse, enable_gqa=True)
    plain, rounding = plain_run((*inputs, mask), grad_out, grad_lse, enable_gqa=True)
    return (out.detach().float(), lse.detach().float()), expected, plain[2:], rounding[2:]


def check(results, expected, plain, rounding, part=...):
    for i, name in enumerate(("grad_query", "grad_key", "grad_value")):
        assert_close_to_reference(
            results[i][part], plain[i][part], expected[i][part], GRADIENT_FACTOR, name, rounding[i][part]
        )


def check_shape(made, size, shape, order, rows_first=False, **extra):
    inputs, mask = inputs_of(shape, torch.float32, size, size, outliers=False)
    grad_out = random_tensor((*inputs[0].shape[:3], inputs[2].shape[3]), torch.float32, 4, outliers=False)
    grad_lse = random_tensor(inputs[0].shape[:3], torch.float32, 5, outliers=False)
    (out, lse), *rest = gradients_of(inputs, grad_out, grad_lse, mask)
    out, grad_out, *inputs = with_nan(shape, (out, grad_out, *inputs), (1, 1, 1, 0, 0))
    results, rare, counts = call(made, inputs, out, lse, grad_out, grad_lse, shape[-1], order, rows_first, **extra)
    assert not rare
    check(results, *rest)
    return counts


@pytest.fixture(scope="module")
def programs():
    build.build_all(
        [SMALL] + [program(size) for size in SIZES] + [program(64, *f[1:]) for f in faults_fp16x2_backward.ALL]
    )


@pytest.mark.parametrize(
    "made,size", [(program(64), 64), (program(128), 128), (SMALL, 128)], ids=["64", "128", "small"]
)
def test_backward(programs, made, size):
    for i, shape in enumerate(SHAPES[:4] if made == SMALL else SHAPES):
        order = run.ORDER_NAMES[(i + size // 64) % len(run.ORDER_NAMES)]
        extra = {"deterministic": (i + size // 64) % 2, "span": i % 3}
        with run.named(f"{shape}, order {order}"):
            counts = check_shape(build.program(*made), size, shape, order, i % 2 == 1, **extra)
        assert counts["phases"] == counts["ldmatrix"], "bank conflicts in ldmatrix"


@pytest.mark.parametrize("size,head_dim,v_head_dim", [(64, 8, 52), (128, 72, 36), (128, 64, 128)])
def test_values_of_another_size(programs, size, head_dim, v_head_dim):
    made, ranges = build.program(*program(size)), causal(20)
    inputs, mask = inputs_of((1, 2, 1, 70, 90, 0, ranges), torch.float32, head_dim, v_head_dim, False)
    grad_out = random_tensor((1, 2, 70, v_head_dim), torch.float32, 4, outliers=False)
    grad_lse = random_tensor((1, 2, 70), torch.float32, 5, outliers=False)
    (out, lse), *rest = gradients_of(inputs, grad_out, grad_lse, mask)
    results, rare, _ = call(made, inputs, out, lse, grad_out, grad_lse, ranges, "random", True)
    assert not rare
    check(results, *rest)


@pytest.mark.parametrize("size", SIZES)
def test_long_rows(programs, size):
    """1024 keys and rows, with what the forward leaves of its rows: the error is that of plain PyTorch; sums over rows
    of one sign do not drift, and with sums that are rounded nothing does (what is cut off dO V of one sign is the same
    as in Fp32Backward)."""
    made = build.program(*program(size))
    check_shape(made, size, (1, 1, 1, 64, 1024, 0, {}), "forward")
    inputs = [random_tensor((1, 1, n, size), torch.float32, n, outliers=False).abs() for n in (1000, 64, 64)]
    inputs[0] *= 0.02
    grad_out = random_tensor((1, 1, 1000, size), torch.float32, 4, outliers=False).abs()
    _, *rest = gradients_of(inputs, grad_out, torch.zeros(1, 1, 1000), None)
    found = []
    for cut in (False, True):
        out, _, stats, *_ = test_fp16x2.call(
            build.program(*test_fp16x2.program(size)), *inputs, {}, stats=True, cut=cut
        )
        found.append(call(made, inputs, out, stats, grad_out, torch.zeros(1, 1, 1000), {}, cut=cut)[0])
    rounded, cut = found
    check(rounded, *rest)
    check([*rounded[:2], cut[2]], *rest)


# what is multiplied: rows of queries, keys, values, grad_out, columns of queries and grad_out; is it rare?
SCALES = {
    "small and large": (1e-7, 1e7, 1e-6, 1e5, 1.0, False),
    "large and small": (1e7, 1e-7, 1e6, 1e-12, 1.0, False),
    "small gradients": (1.0, 1.0, 1.0, 1e-20, 1.0, False),
    "all large": (1e-8, 1e8, 1e8, 1e8, 1.0, False),
    "rows": ("rows", "rows", "rows", "rows", 1.0, False),
    "columns": (1.0, 1.0, 1.0, 1.0, "rows", False),
    "outlier": (1.0, 1.0, 1.0, "outlier", 1.0, False),
    "tiles": (1.0, 1.0, "tiles", "tiles", 1.0, False),
    "small row of queries": ("row", 1.0, 1.0, 1.0, 1.0, True),
    "small row of values": (1.0, 1.0, "row", 1.0, 1.0, True),
    "small row of gradients": (1.0, 1.0, 1.0, "row", 1.0, True),
    "small columns": (1.0, 1.0, 1.0, 1.0, "row", True),
    "huge": (1e-12, 1e12, 1.0, 1.0, 1.0, True),
    "tiny": (1.0, 1.0, 1e-20, 1.0, 1.0, True),
}


def factors(kind, n):
    i = torch.arange(n)[:, None]
    kinds = {
        "row": lambda: torch.where(i == 3, 1e-9, 1.0),
        "outlier": lambda: torch.where(i == 3, 2.0**20, 1.0),
        "rows": lambda: 2.0 ** -(i % 14),
        "tiles": lambda: 2.0 ** (i // 128 % 3 * 20 - 20),
    }
    return kinds[kind]() if isinstance(kind, str) else torch.full((n, 1), kind)


def scaled_inputs(name, size, q_len=70, kv_len=150):
    """Inputs, grad_out, the mask and whether they are rare; causal, the last row sees the last key."""
    inputs, mask = inputs_of(
        (1, 2, 1, q_len, kv_len, 0, causal(kv_len - q_len)), torch.float32, size, size, outliers=False
    )
    grad_out = random_tensor(inputs[0].shape, torch.float32, 4, outliers=False)
    *rows, columns, rare = SCALES[name]
    columns = factors(columns, size).T
    tensors = [x * factors(f, x.shape[2]) for x, f in zip((*inputs, grad_out), rows)]
    return [tensors[0] * columns, *tensors[1:3]], tensors[3] * columns, mask, rare


def check_scaled(results, rest):
    """Rows and columns have the error of plain PyTorch: what is small beside others is not lost."""
    check(results, *rest)
    for part in ((..., slice(4, 64), slice(None)), (..., slice(13, 14)), (..., slice(3, 4))):
        check(results, *rest, part)


def check_scales(made, size, name, order="forward", alone=False):
    inputs, grad_out, mask, expected_rare = scaled_inputs(name, size)
    grad_lse = torch.zeros(grad_out.shape[:3])
    (out, lse), *rest = gradients_of(inputs, grad_out, grad_lse, mask)
    results, rare, _ = call(made, inputs, out, lse, grad_out, grad_lse, causal(80), order)
    assert rare == expected_rare
    if not (rare and alone):
        check_scaled(results, rest)


@pytest.mark.parametrize("name", SCALES)
def test_scales(programs, name):
    size = SIZES[list(SCALES).index(name) % 2]
    check_scales(build.program(*program(size)), size, name)


def check_nan(made, size, order="forward", alone=False):
    """Numbers that are not finite show in the gradients that they reach and nowhere else."""
    shape = (1, 2, 1, 70, 150, 0, causal(60))
    for which, bad in ((0, math.nan), (1, math.inf), (2, math.nan), (3, -math.inf), (4, math.inf)):
        inputs, mask = inputs_of(shape, torch.float32, size, size, False)
        grad_out = random_tensor(inputs[0].shape, torch.float32, 4, outliers=False)
        grad_lse = torch.zeros(1, 2, 70)
        (out, lse), *rest = gradients_of(inputs, grad_out, grad_lse, mask)
        tensors = [*inputs, grad_out, grad_lse]
        tensors[which][:, :, 40] = bad
        if which == 0:  # of the other rows, out stays as it was
            out[:, :, 40] = lse[:, :, 40] = bad
        elif which in (1, 2):
            seen = mask[0, 0, :, 40]
            out[:, :, seen] = math.nan
            if which == 1:
                lse[:, :, seen] = math.nan
        results, rare, _ = call(made, inputs, out, lse, *tensors[3:], shape[-1], order)
        assert rare
        if alone:
            continue
        rows = torch.arange(70) == 40 if which in (0, 3, 4) else mask[0, 0, :, 40]
        assert not results[0][:, :, rows].isfinite().all(-1).any()
        for grads, good in ((results[0], ~rows), (results[1], ~mask[0, 0, rows].any(0))):
            assert grads[:, :, good].isfinite().all()


@pytest.mark.parametrize("size", SIZES)
def test_nan(programs, size):
    check_nan(build.program(*program(size)), size, "random" if size == 64 else "starve")


def test_tiles_that_no_row_sees_are_skipped(programs):
    made = build.program(*program(64))
    full, half, window = (
        check_shape(made, 64, (1, 1, 1, 256, 256, 0, ranges), "forward", cut=0)["mma"]
        for ranges in ({}, causal(), {"left": 63, "right": 0})
    )
    assert half * 16 == full * 10 and window * 16 == full * 7


def attempts(made, passes, alone):
    """What may notice a fault, the likely ones first; alone: there is no Fp32Backward."""
    few = [SHAPES[0], SHAPES[5], (1, 4, 2, 130, 90, 8, causal(-40))]
    for order in ("forward", "random", "starve", "reverse", "eager", "starve1"):
        calls = [partial(check_shape, made, 64, s, order, cut=0, deterministic=d) for d in (0, 1) for s in few]
        scales = [partial(check_scales, made, 64, name, order, alone) for name in reversed(SCALES)]
        yield from [partial(check_nan, made, 64, order, alone), *scales, *calls] if passes or not alone else calls
        if not passes and alone and order == "forward":
            yield from scales


@pytest.mark.parametrize(
    "what,file,old,new", faults_fp16x2_backward.ALL, ids=[f[0] for f in faults_fp16x2_backward.ALL]
)
def test_faulty_backward_is_found(programs, what, file, old, new):
    made = build.program(*program(64, file, old, new))
    passes, alone = file == faults_fp16x2_backward.PASSES, file != "fp32/backward.cuh"
    assert is_noticed(attempts(made, passes, alone), what)

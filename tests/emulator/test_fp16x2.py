"""float32 on Hopper, run on the CPU by tests/emulator: planes of halves, their products, and what is left to
Fp32Forward. Tensor cores are those that cut sums off after every four products."""

import math
from functools import partial

import pytest
import torch

from tests.emulator.faults import fp16x2 as faults_fp16x2
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.test_attention import FAULT_SHAPES, WITH_KEYS, causal, inputs_of, with_nan
from tests.support.testing import assert_close_to_reference, plain_run, random_tensor, reference_run

SIZES = (64, 128)
MORE = [(1, 3, 1, 260, 300, 28, causal(40)), (1, 2, 1, 80, 700, 4, {"left": 100, "right": 50, "offset": 300})]
FAULTS = [*faults_fp16x2.PREPARE, *faults_fp16x2.FORWARD]


def program(size, *edit):
    if not edit:
        return "fp16x2_forward", (f"DIM={size}",)
    alone = () if edit[0] == "fp32/forward.cuh" else ("ALONE",)
    return "fp16x2_forward", (f"DIM={size}", *alone), build.Fault(*edit)


def size_of(what):
    return 128 if what in ("second slice left out", "scale of the first rows for all") else 64


@pytest.fixture(scope="module")
def programs():
    build.build_all([program(size) for size in SIZES] + [program(size_of(f[0]), *f[1:]) for f in FAULTS])


def call(made, query, key, value, ranges, order="forward", rows_first=False, *, stats=False, **extra):
    """out, lse, with `stats` those too, and whether the call was left to Fp32Forward."""
    arguments, lengths = run._arguments(query, key, value, ranges, order)
    options, _ = run._options(query, {}, len(query))
    arguments |= {**options, "section": 0, "counter": 1, "grid": 2, "cut": 1, **extra}
    out = (*query.shape[:3], value.shape[3])
    of_rows = ((2 * math.prod(out[:3]),), torch.float32)
    outputs = [(out, torch.float32), (out[:3], torch.float32), of_rows, ((1,), torch.int32)]
    results, counts = run.run(made, [query, key, value, *lengths], outputs, arguments, rows_first)
    return *results[: 3 if stats else 2], results[3].item() > 0, counts


def check(results, inputs, mask):
    grad_out = torch.zeros_like(results[0])
    expected = reference_run((*inputs, mask), grad_out, enable_gqa=True)
    plain, rounding = plain_run((*inputs, mask), grad_out, enable_gqa=True)
    for i, name in enumerate(("out", "lse")):
        assert_close_to_reference(results[i], plain[i], expected[i], name=name, rounding=rounding[i])


def check_shape(made, size, shape, order, rows_first=False, outliers=True, **extra):
    inputs, mask = inputs_of(shape, torch.float32, size, size, outliers)
    given = with_nan(shape, inputs, (True, False, False))
    *results, rare, counts = call(made, *given, shape[-1], order, rows_first, **extra)
    assert not rare
    check(results, inputs, mask)
    return counts


@pytest.mark.parametrize("size", SIZES)
def test_forward(programs, size):
    for i, shape in enumerate([*WITH_KEYS, *MORE]):
        order = run.ORDER_NAMES[(i + size // 64) % len(run.ORDER_NAMES)]
        with run.named(f"{shape}, order {order}"):
            check_shape(build.program(*program(size)), size, shape, order, i % 2 == 1, counter=i % 2, section=i % 3)


@pytest.mark.parametrize("size,head_dim,v_head_dim", [(64, 8, 52), (128, 72, 36), (128, 64, 128)])
def test_values_of_another_size(programs, size, head_dim, v_head_dim):
    inputs, mask = inputs_of((1, 2, 1, 100, 150, 0, causal(50)), torch.float32, head_dim, v_head_dim)
    *results, rare, _ = call(build.program(*program(size)), *inputs, causal(50), "random", True)
    assert not rare
    check(results, inputs, mask)


@pytest.mark.parametrize("size", SIZES)
def test_long_rows(programs, size):
    """4096 keys: the error is that of plain PyTorch, and values of one sign do not drift (test_cuda_emulator_wide)."""
    made = build.program(*program(size))
    check_shape(made, size, (1, 1, 1, 64, 4096, 0, {}), "forward", outliers=False)
    query, key = torch.zeros(1, 1, 16, size), torch.zeros(1, 1, 2000, size)
    value = random_tensor((1, 1, 2000, size), torch.float32, 3, outliers=False).abs()
    out = call(made, query, key, value, {})[0]
    exact = value.double().mean(2, keepdim=True)
    assert ((out - exact) / exact).abs().max() < 8 * torch.finfo(torch.float32).eps


# what is multiplied: queries, rows of keys, rows of values, columns of values; is it rare?
SCALES = {
    "small-large": (1e-7, 1e7, 1.0, 1.0, False),
    "large-small": (1e7, 1e-7, 1e-6, 1.0, False),
    "tiles": (1.0, 1.0, "tiles", 1.0, False),
    "rows": (1.0, 1.0, "rows", 1.0, False),
    "small row of values": (1.0, 1.0, "row", 1.0, True),
    "small row of keys": (1.0, "row", 1.0, 1.0, True),
    "small row of queries": ("row", 1.0, 1.0, 1.0, True),
    "columns": (1.0, 1.0, 1.0, "rows", False),
    "small column of values": (1.0, 1.0, 1.0, "row", True),
    "huge": (1e-12, 1e12, 1.0, 1.0, True),
    "tiny": (1e12, 1e-12, 1e-20, 1.0, True),
}


def factors(kind, n):
    if not isinstance(kind, str):
        return torch.full((n, 1), kind)
    i = torch.arange(n)[:, None]
    if kind == "row":
        return torch.where(i == 3, 1e-9, 1.0)
    return 2.0 ** (i // 128 % 3 * 25 - 25) if kind == "tiles" else 2.0 ** -(i % 14)


def scaled_inputs(name, size, q_len=70, kv_len=400):
    (query, key, value), mask = inputs_of((1, 2, 1, q_len, kv_len, 0, causal(330)), torch.float32, size, size, False)
    of_query, of_key, of_value, of_column, rare = SCALES[name]
    query, key = query * factors(of_query, q_len), key * factors(of_key, kv_len)
    return [query, key, value * factors(of_value, kv_len) * factors(of_column, size).T], mask, rare


def check_scales(made, size, name, order="forward", alone=False):
    """Each column's error is that of plain PyTorch: what is small beside others is not lost."""
    inputs, mask, expected_rare = scaled_inputs(name, size)
    *results, rare, _ = call(made, *inputs, causal(330), order)
    assert rare == expected_rare
    if rare and alone:
        return
    check(results, inputs, mask)
    for c in (0, 3, 13):
        check((results[0][..., c : c + 1], results[1]), [*inputs[:2], inputs[2][..., c : c + 1]], mask)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("size", SIZES)
def test_scales(programs, size, name):
    check_scales(build.program(*program(size)), size, name)


def check_nan(made, size, order="forward", alone=False):
    """Numbers that are not finite show in the rows that see them and nowhere else."""
    for which, bad in ((0, math.inf), (1, math.nan), (2, -math.inf)):
        shape = (1, 2, 1, 140, 200, 0, causal(60))
        inputs, mask = inputs_of(shape, torch.float32, size, size, False)
        clean = call(made, *inputs, shape[-1], order)[0]
        inputs[which][:, :, 100] = bad
        out, _, rare, _ = call(made, *inputs, shape[-1], order)
        assert rare
        if alone:
            continue
        seen = torch.arange(140) == 100 if which == 0 else mask[0, 0, :, 100]
        torch.testing.assert_close(out[:, :, ~seen], clean[:, :, ~seen], rtol=1e-5, atol=1e-5)
        assert not out[:, :, seen].isfinite().any()


@pytest.mark.parametrize("size", SIZES)
def test_nan(programs, size):
    for order in ("random", "starve") if size == 64 else ("reverse",):
        check_nan(build.program(*program(size)), size, order)


def test_tiles_that_no_row_sees_are_skipped(programs):
    made = build.program(*program(64))
    full, half, window = (
        check_shape(made, 64, (1, 1, 1, 384, 384, 0, ranges), "forward", cut=0)["mma"]
        for ranges in ({}, causal(), {"left": 63, "right": 0})
    )
    assert half * 6 == full * 4 and window * 3 <= full * 2


def attempts(made, size, alone):
    """What may notice a fault, the quick ones first; alone: there is no Fp32Forward."""
    for order in ("forward", "random", "starve", "reverse", "eager", "starve1"):
        yield from [partial(check_shape, made, size, shape, order, cut=0) for shape in FAULT_SHAPES]
        if order == "forward":
            yield from [partial(check_scales, made, size, name, alone=alone) for name in SCALES]
            yield partial(check_nan, made, size, alone=alone)


@pytest.mark.parametrize("what,file,old,new", FAULTS, ids=[f[0] for f in FAULTS])
def test_faulty_forward_is_found(programs, what, file, old, new):
    made = build.program(*program(size_of(what), file, old, new))
    assert is_noticed(attempts(made, size_of(what), file != "fp32/forward.cuh"), what)

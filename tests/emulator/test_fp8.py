"""The Hopper forward over e4m3, run on the CPU by tests/emulator: values against fp64 of the numbers that the bytes
stand for, with the error that weights in e4m3 bring, and faults that must be found."""

import math
from functools import partial

import pytest
import torch

from attnjourney import quantize_fp8
from attnjourney.reference.attention_fp8 import dequantize_fp8
from tests.emulator.faults import fp8 as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.support.fp8 import assert_close_to_fp8_reference, exact
from tests.support.testing import random_tensor

SIZES = {64: "64,128,3", 128: "128,128,3", 256: "256,64,3"}
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOTTOM = {"right": 0, "bottom_right": 1}

# batch, query heads, key heads, q_len, kv_len, columns less than the kernel's, which keys are seen, options
CASES = [
    (1, 1, 1, 200, 200, 0, {"right": 0}, {}),
    (2, 4, 2, 65, 150, 16, {"right": 0, "offset": 85}, {"scale": 0.3}),
    (1, 2, 1, 150, 65, 32, {"right": 0, "offset": -85}, {}),  # the first 85 rows see no key
    (1, 2, 2, 129, 520, 0, {}, {}),
    (1, 1, 1, 1, 7, 48, {}, {"softcap": 1.5}),
    (1, 2, 1, 300, 700, 0, {"left": 70, "right": 0, "offset": 400}, {}),
    (1, 1, 1, 300, 900, 0, {"left": 20, "right": 30, "offset": 500, "prefix": 140}, {"sinks": 1}),
    (2, 2, 1, 140, 260, 16, {**BOTTOM, "lengths": ([140, 140], [201, 0])}, {}),
    (2, 1, 1, 70, 400, 0, {"lengths": ([70, 70], [400, 130])}, {"sinks": 1, "softcap": 3.0}),
    (1, 2, 1, 128, 384, 0, {}, {"scale": -0.2}),
    (1, 1, 1, 130, 256, 0, {"right": 0, "offset": 126}, {"scale": -0.1, "softcap": 2.0, "sinks": 1}),
]
FAULT_CASES = [CASES[i] for i in (1, 3, 6, 8, 10, 9)]


def program(size, *edit):
    request = ("fp8_forward", (f"SHAPE=Sm90Fp8Shape<{SIZES[size]}>",))
    return (*request, build.Fault(*edit)) if edit else request


FAULT_SIZE = 64


@pytest.fixture(scope="module")
def programs():
    build.build_all([program(size) for size in SIZES])


@pytest.fixture(scope="module")
def faulty_programs():
    build.build_all([program(FAULT_SIZE, *f[1:]) for f in faults.FORWARD])


def numbers(shape, seed):
    """Normal numbers with outliers, whose blocks of rows have scales of their own."""
    x = random_tensor(shape, torch.float32, seed)
    return x * 2.0 ** ((torch.arange(shape[2]) // 128 * 5 + seed) % 4)[:, None]


def inputs_of(case, size):
    batch, q_heads, kv_heads, q_len, kv_len, less, _, _ = case
    shapes = [(batch, heads, n, size - less) for heads, n in ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))]
    return [numbers(shape, i + 1) for i, shape in enumerate(shapes)]


def call(made, quantized, ranges, order="forward", rows_first=False, options=None, *, out=0, cut=0, **extra):
    """out, lse, counts; quantized: (bytes, scales) of query, key and value."""
    (query, _), (key, _), (value, _) = quantized
    arguments, lengths = run._arguments(query, key, value, ranges, order)
    options = dict(options or {})
    if options.get("sinks"):
        options["sinks"] = sinks_of(query)
    more, given = run._options(query.float(), options, len(query))
    one = quantized[0][1].shape[2] == 1 and quantized[1][1].shape[2] == 1
    arguments |= {**more, "section": 0, "out_type": out, "one_scale": one, "cut": cut, **extra}
    shape = (*query.shape[:3], value.shape[3])
    outputs = [(shape, OUT_DTYPES[out]), (shape[:3], torch.float32), ((2 * math.prod(shape[:3]),), torch.float32)]
    tensors = [x.view(torch.uint8) for x, _ in quantized] + [*lengths, *given] + [scale for _, scale in quantized]
    results, counts = run.run(made, tensors, outputs, arguments, rows_first)
    return results[0], results[1], counts


def sinks_of(query):
    return torch.linspace(-1, 2, query.shape[1])


def seen_of(ranges, batch, q_len, kv_len):
    """(batch, 1, q_len, kv_len): the mask rule written out."""
    lengths = ranges.get("lengths", ([q_len] * batch, [kv_len] * batch))[1]
    seen = torch.zeros(batch, 1, q_len, kv_len, dtype=torch.bool)
    for b, length in enumerate(lengths):
        offset = length - q_len if ranges.get("bottom_right") else ranges.get("offset", 0)
        p, j = torch.arange(q_len)[:, None] + offset, torch.arange(kv_len)
        left, right = ranges.get("left", -1), ranges.get("right", -1)
        window = (j >= p - left if left >= 0 else True) & (j <= p + right if right >= 0 else True)
        seen[b, 0] = (window | (j < ranges.get("prefix", 0))) & (j < length)
    return seen


def check_values(made, quantized, case, order="forward", rows_first=False, out=0, cut=0, shown=None):
    """shown: where a NaN must show, everything else being what it is with 0 in its place."""
    batch, _, _, q_len, kv_len, _, ranges, options = case
    got, lse, counts = call(made, quantized, ranges, order, rows_first, options, out=out, cut=cut)
    wide = [dequantize_fp8(x, scale, torch.float64).nan_to_num(0.0) for x, scale in quantized]
    seen = seen_of(ranges, batch, q_len, kv_len)
    given = {name: x for name, x in options.items() if name != "sinks"}
    given["sinks"] = sinks_of(quantized[0][0]) if options.get("sinks") else None
    if shown is not None:
        assert torch.equal(got.isnan(), shown), "a NaN shows where it should not, or does not where it should"
        got = torch.where(shown, exact(*wide, seen, **given)[0].to(got.dtype), got)
    assert_close_to_fp8_reference(got, lse, *wide, seen, cut=cut, **given)
    return counts


def check(made, case, size, order="forward", rows_first=False, per="block", out=0, cut=0):
    quantized = [quantize_fp8(x, per) for x in inputs_of(case, size)]
    return check_values(made, quantized, case, order, rows_first, out, cut)


def check_scales(made, size, order="forward"):
    """Scales of any sign, of a zero, and values whose scales are far apart."""
    case = (1, 2, 1, 200, 600, 0, {"right": 0, "offset": 400}, {})
    query, key, value = (list(quantize_fp8(x)) for x in inputs_of(case, size))
    query[1] *= torch.tensor([1.0, -0.5])
    key[1] *= torch.tensor([0.25, -1.0, 0.0, 0.5, 1.0])
    for factors in ([1.0, -1.0, 0.0, 8.0, -0.5], [2.0**60, 1.0, -(2.0**-10), 2.0**30, 0.0], [1e-36, 1, 1e-36, -1, 1]):
        given = (value[0], value[1] * torch.tensor(factors))
        check_values(made, (query, key, given), case, order, out=2)


def check_nan(made, size, order="forward", scale=None):
    """A NaN in one value shows in its column, in the rows that see its key; scale: of the scores, that most weights
    become 0 in e4m3."""
    for ranges, places in (({"left": 40}, ((150, 5), (171, 16), (255, 33))), ({}, ((100, 5), (140, 63)))):
        case = (1, 1, 1, 200, 300, 0, {**ranges, "right": 0, "offset": 100}, {"scale": scale} if scale else {})
        query, key, value = (quantize_fp8(x) for x in inputs_of(case, size))
        shown = torch.zeros(1, 1, 200, size, dtype=torch.bool)
        for bad, column in places:
            value[0].view(torch.uint8)[0, 0, bad, column] = 0x7F + 0x80 * (bad % 2)
            shown[..., column] = seen_of(case[6], 1, 200, 300)[..., bad]
        check_values(made, (query, key, value), case, order, shown=shown)


def check_scale_of_nan(made, size, order="forward"):
    """Of values: it shows in the rows that see one of them."""
    case = (1, 1, 1, 200, 300, 0, {"left": 40, "right": 0, "offset": 100}, {})
    query, key, value = (quantize_fp8(x) for x in inputs_of(case, size))
    shown = seen_of(case[6], 1, 200, 300)[..., 128:256].any(-1)[..., None].expand(1, 1, 200, size)
    for bad in (math.nan, math.inf):
        bytes_, scale = value[0].clone(), value[1].clone()
        bytes_[:, :, 128:256] = 1.0  # inf * 0 would be a NaN of its own
        scale[0, 0, 1] = bad
        got, lse, _ = call(made, (query, key, (bytes_, scale)), case[6], order)
        assert torch.equal(~got.isfinite(), shown) and lse.isfinite().all()
        scale[0, 0, 1] = 1.0
        clean, _, _ = call(made, (query, key, (bytes_, scale)), case[6], order)
        assert torch.equal(got[~shown], clean[~shown])


@pytest.mark.parametrize("size", SIZES)
def test_forward(programs, size):
    made = build.program(*program(size))
    for i, case in enumerate(CASES if size == 128 else CASES[size // 128 % 2 :: 2]):
        order = run.ORDER_NAMES[(i + size // 64) % len(run.ORDER_NAMES)]
        with run.named(f"{case}, order {order}"):
            check(made, case, size, order, i % 2 == 1, ("block", "head")[i % 3 == 2], i % 3)


def test_sums_that_are_cut_off(programs):
    """As Hopper's tensor cores add: about 14 bits of a sum's largest term."""
    for size in (64, 128):
        check(build.program(*program(size)), CASES[3], size, cut=1)


@pytest.mark.parametrize("size", SIZES)
def test_numbers_that_are_not_ordinary(programs, size):
    made = build.program(*program(size))
    check_scales(made, size, run.ORDER_NAMES[size // 64])
    check_nan(made, size, "random")
    check_nan(made, size, "reverse", scale=2.0)
    check_scale_of_nan(made, size)


def attempts(made):
    """What may notice a fault, the quick ones first."""
    for order in ("forward", "random", "starve", "reverse", "eager", "starve1"):
        yield from [partial(check, made, case, FAULT_SIZE, order, i % 2 == 1) for i, case in enumerate(FAULT_CASES)]
        yield partial(check_scales, made, FAULT_SIZE, order)
        yield partial(check_nan, made, FAULT_SIZE, order)
        yield partial(check_nan, made, FAULT_SIZE, order, 2.0)
        yield partial(check_scale_of_nan, made, FAULT_SIZE, order)


@pytest.mark.parametrize("what,file,old,new", faults.FORWARD, ids=[f[0] for f in faults.FORWARD])
def test_faulty_forward_is_found(faulty_programs, what, file, old, new):
    assert is_noticed(attempts(build.program(*program(FAULT_SIZE, file, old, new))), what)

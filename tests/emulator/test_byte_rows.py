"""Caches of bytes on CUDA, run on the CPU by tests/emulator: what is stored, to the bit, and what is read back."""

import math
from functools import partial

import pytest
import torch

from attnjourney import reference
from tests.emulator.faults import decode as faults_decode
from tests.emulator.host import build, run
from tests.emulator.host.decode import NUMBERS
from tests.emulator.host.noticed import is_noticed
from tests.support.testing import random_tensor

KINDS, DTYPES = (torch.int8, torch.float8_e4m3fn), (torch.float32, torch.bfloat16, torch.float16)
HEADS = 2
bits = torch.uint8


def program(dtype, fault=None):
    return ("byte_rows", (f"NUMBER={NUMBERS[dtype]}",), fault)[: 2 + (fault is not None)]


def call(executable, operator, lengths, cache, scale, tokens, kind, table=None, ring=False, parts=1, order="forward"):
    dim = cache.shape[3]
    table = torch.zeros(len(lengths), 0, dtype=torch.int32) if table is None else table
    arguments = {
        "operator": operator, "batch": len(lengths), "heads": HEADS, "dim": dim, "tokens": tokens.shape[2],
        "slots": cache.shape[2], "blocks": len(cache) if table.numel() else 0, "max_blocks": table.shape[1],
        "kind": 1 + KINDS.index(kind), "ring": ring, "parts": parts,
    }  # fmt: skip
    given = [torch.tensor(lengths), table, cache.view(bits), scale, tokens]
    if operator == 0:
        outputs = [(tuple(cache.shape), bits), (tuple(scale.shape), torch.float32), ((len(lengths),), torch.int64)]
    elif operator == 1:
        capacity = cache.shape[2] * (table.shape[1] or 1)
        outputs = [((len(lengths), HEADS, capacity, dim), tokens.dtype)]
    else:
        outputs = [(tuple(cache.shape), tokens.dtype)]
    return run.run(executable, given, outputs, arguments | run.order_arguments(order))[0]


def tokens_of(dtype, n, dim):
    """Outliers, a row of zeros, the smallest and the largest numbers, NaN and inf."""
    x = random_tensor((3, HEADS, n, dim), dtype, 1)
    info = torch.finfo(dtype)
    x[0, 0, 1], x[0, 1, 2, 5], x[1, 0, 3, 7], x[0, 0, 4, 3] = 0.0, math.nan, math.inf, -math.inf
    x[1, 0, 4], x[1, 1, 2, 3], x[1, 1, 2, 4] = info.tiny, info.max, info.min
    x[2, 0, 0] = info.smallest_normal / 2
    return x


def check_append(executable, dtype, order):
    for kind, where, parts in zip(KINDS * 3, ("dense", "paged", "ring", "dense", "paged", "ring"), (1, 1, 1, 2, 3, 2)):
        dim, n, ring = 41, 7, where == "ring"
        lengths, slots = [2, 6, 0], 4 if where == "paged" else 9
        table = torch.tensor([[5, 0, 7], [1, 3, -1], [9, 4, 2]], dtype=torch.int32) if where == "paged" else None
        outer = 8 if table is not None else 3
        cache = torch.full((outer, HEADS, slots, dim), 77, dtype=bits).view(kind)
        scale = torch.full((outer, HEADS, slots), -1.0)
        new = tokens_of(dtype, n, dim)
        stored, factors, after = call(executable, 0, lengths, cache, scale, new, kind, table, ring, parts, order)
        expected, want = cache.view(bits).clone(), scale.clone()
        rows, steps = reference.quantize(new, kind)
        for b, length in enumerate(lengths):
            for t in range(n):
                at = length + t
                place = (b, at % slots) if ring else (b, at)
                if table is not None:
                    place = (int(table[b, at // slots]) if at < 12 else -1, at % slots)
                if not (0 <= place[0] < outer and place[1] < slots):
                    continue
                expected[place[0], :, place[1]] = rows.view(bits)[b, :, t]
                want[place[0], :, place[1]] = steps[b, :, t]
        label = f"{kind} {where} {parts}"
        torch.testing.assert_close(factors, want, rtol=0, atol=0, equal_nan=True, msg=label)
        assert torch.equal(stored, expected), label
        if parts == 1 and table is None:
            assert after.tolist() == [length + n for length in lengths]


def check_read(executable, dtype, order):
    every = torch.arange(256, dtype=bits).view(1, 1, 1, 256)
    none = torch.zeros(1, HEADS, 0, 256, dtype=dtype)
    for kind in KINDS:
        cache = torch.cat([every, every.flip(3)], 1).repeat(1, 1, 3, 1).contiguous().view(kind)
        scale = torch.tensor([[[0.5, 3.0, 1e-3], [1.0, math.nan, 0.25]]])
        expected = reference.dequantize(cache, scale, dtype)
        (out,) = call(executable, 2, [3], cache, scale, none, kind, parts=2, order=order)
        assert torch.equal(out.nan_to_num(99.0), expected.nan_to_num(99.0)), kind
        (out,) = call(executable, 1, [3], cache, scale, none, kind, parts=2, order=order)
        assert torch.equal(out.nan_to_num(99.0), expected.nan_to_num(99.0)), kind
        table = torch.tensor([[-1, 0]], dtype=torch.int32)
        (out,) = call(executable, 1, [6], cache, scale, none, kind, table, order=order)
        assert not out[:, :, :3].any() and torch.equal(out[:, :, 3:].nan_to_num(99.0), expected.nan_to_num(99.0))


FAULTS = [build.Fault(*edit) for _, *edit in faults_decode.BYTE_ROWS]


@pytest.fixture(scope="module")
def programs():
    requests = [program(dtype) for dtype in DTYPES]
    build.build_all([*requests, *(program(torch.float32, fault) for fault in FAULTS)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(programs, dtype):
    executable = build.program(*program(dtype))
    for order in ("random", "reverse"):
        check_append(executable, dtype, order)
        check_read(executable, dtype, order)


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[what for what, *_ in faults_decode.BYTE_ROWS])
def test_faults_are_found(programs, number):
    executable = build.program(*program(torch.float32, FAULTS[number]))
    checks = [partial(check, executable, torch.float32, order) for order in run.ORDER_NAMES
              for check in (check_append, check_read)]  # fmt: skip
    assert is_noticed(checks, faults_decode.BYTE_ROWS[number][0])

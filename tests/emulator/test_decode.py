"""Decoding on CUDA, run on the CPU by tests/emulator: as tests/emulator/test_attention.py."""

import math
from functools import partial

import pytest
import torch

from tests.cache.test_decode_options import OPTIONS, check, make, noise
from tests.cache.test_quantized_cache import BYTES, quantized
from tests.emulator.faults import decode as faults_decode
from tests.emulator.host import build, decode, run
from tests.emulator.host.noticed import is_noticed
from tests.support.decode_checks import dense_cache, paged

KERNELS = {  # kernel: (program, dtype, head_dim and v_head_dim, whole chunks)
    "64-bf16": (decode.mma(torch.bfloat16, 64, 4, 4), torch.bfloat16, (64, 40), True),
    "128-fp16": (decode.mma(torch.float16, 128, 4, 3), torch.float16, (120, 128), True),
    "256-bf16": (decode.mma(torch.bfloat16, 256, 2, 3), torch.bfloat16, (192, 136), True),
    "128-bf16-64rows": (decode.mma(torch.bfloat16, 128, 4, 8, True), torch.bfloat16, (128, 72), True),
    "64-bf16-bytes": (decode.mma(torch.bfloat16, 64, 4, 5, bytes=True), torch.bfloat16, (64, 48), True),
    "128-fp16-bytes": (decode.mma(torch.float16, 128, 4, 4, bytes=True), torch.float16, (112, 128), True),
    "256-bf16-bytes": (decode.mma(torch.bfloat16, 256, 2, 3, bytes=True), torch.bfloat16, (192, 144), True),
    "128-bf16-64rows-bytes": (decode.mma(torch.bfloat16, 128, 4, 8, True, True), torch.bfloat16, (128, 80), True),
    "fp32-bytes": (decode.fma(torch.float32, True), torch.float32, (48, 144), True),
    "fp16-loose-bytes": (decode.fma(torch.float16, True), torch.float16, (33, 17), False),
    "fp32": (decode.fma(torch.float32), torch.float32, (20, 136), True),
    "fp64": (decode.fma(torch.float64), torch.float64, (34, 18), True),
    "fp16-loose": (decode.fma(torch.float16), torch.float16, (33, 17), False),
}
CASES = [  # where keys lie, options, query rows, lengths, query heads, key heads, splits
    ("dense", (), 1, [300, 7, 0], 4, 1, 11),
    ("dense", (), 3, [150], 8, 2, 1),  # a warp has several tiles of 12 rows
    ("rows_first", ("window",), 3, [90, 33, 2], 6, 2, 2),
    ("paged", ("softcap",), 2, [77, 0, 130], 4, 2, 2),
    ("ring", ("window", "sinks"), 3, [13, 40, 200], 4, 2, 1),
    ("dense", ("prefix",), 5, [70, 3], 4, 1, 2),
    ("paged", ("long_prefix", "alibi"), 4, [64, 20], 4, 2, 1),
    ("dense", ("mask", "sinks_per_item"), 2, [100, 60], 4, 2, 4),
    ("dense", ("bool_mask", "alibi_per_item"), 3, [65, 80], 4, 2, 1),
    ("paged", ("row_mask", "softcap"), 1, [200, 9], 4, 2, 3),
    ("dense", ("mask_float32", "window"), 18, [50, 90], 4, 1, 2),
    ("ring", ("window", "bool_mask"), 1, [70, 20], 2, 1, 2),
    ("ring", ("whole_ring",), 1, [95, 40, 41], 4, 2, 2),
    ("dense", ("prefix",), 12, [70], 4, 1, 1),  # a tile with the prefix's end and keys that not all rows see
    ("dense", ("window",), 2, [100], 4, 2, 1),  # a tile that begins one key before those that all rows see
]
MORE = {"whole_ring": dict(window_size=(39, -1))}  # every key that a ring of 40 has


def place(kind, key, value, lengths):
    """key and value where `kind` keeps them, and the arguments that say so; NaN wherever nobody may read."""
    if kind == "paged":
        *pools, table = paged(key, value, lengths.tolist(), 24)
        return *pools, {"block_table": table}
    if kind == "rows_first":
        return *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value)), {}
    if kind == "dense":
        return key, value, {}
    capacity = 40
    rings = [x.new_full((*x.shape[:2], capacity, x.shape[3]), math.nan) for x in (key, value)]
    for b, n in enumerate(lengths.tolist()):
        for j in range(max(0, n - capacity), n):
            for ring, x in zip(rings, (key, value)):
                ring[b, :, j % capacity] = x[b, :, j]
    return *rings, {"ring": True}


def stored(kernel, kind, key, value):
    """key, value and the arguments of their scales, as the kernel's caches have them. kind: of bytes"""
    return quantized(key, value, kind) if kernel.endswith("-bytes") else (key, value, {})


def check_case(program, kernel, case, order):
    _, dtype, (dim, v_dim), chunked = KERNELS[kernel]
    kind, names, q_len, lengths, heads, kv_heads, splits = case
    own = [n for n in names if n not in MORE]
    query, key, value, lengths, options = make(own, q_len, lengths, dtype, heads, kv_heads, dim, v_dim)
    options["scale"] = 0.125
    for name in set(names) & MORE.keys():
        options |= MORE[name]
    *cache, where = place(kind, key, value, lengths)
    number = BYTES[CASES.index(case) % 2]
    *cache, scales = stored(kernel, number, *cache)
    given = {**options, **where, **scales, "order": order, "splits": splits, "chunked": chunked}
    given["joins"] = kernel.startswith(("64-", "128-")) and CASES.index(case) % 2 == 0  # no merge but by the last block
    key, value, scales = stored(kernel, number, key, value)
    actual = decode.decode(program, query, *cache, lengths, **given)
    check(actual, query, key, value, lengths, options | scales, str(case))


def check_hidden_nan(program, name, order, kind=BYTES[0]):
    """A NaN in a value shows in the rows that see it alone; in a block that no table holds nowhere."""
    _, dtype, (dim, v_dim), chunked = KERNELS[name]

    def run_decode(key, value, **options):
        key, value, scales = stored(name, kind, key, value)
        return decode.decode(program, query, key, value, torch.tensor([length]), **options, **scales)

    length, q_len = 70, 4
    key, value = dense_cache([length], 1, length, dim, v_dim, dtype)
    query = noise(1, 2, q_len, dim, dtype=dtype, seed=3)
    for what in (key, value):
        saved = what.clone()
        what[0, 0, -2] = math.nan  # seen by the last two rows, or by one
        for left, seeing in ((-1, [2, 3]), (0, [2])):
            given = dict(window_size=(left, -1), order=order, chunked=chunked)
            out = run_decode(key, value, **given)[0]
            assert [i for i in range(q_len) if out[0, :, i].isnan().any()] == seeing
        mask = torch.zeros(length, dtype=dtype)
        mask[-2] = -math.inf
        given = dict(attn_mask=mask, order=order, chunked=chunked)
        out = run_decode(key, value, **given)[0]
        assert out.isfinite().all(), "a hidden key leaks"
        what.copy_(saved)
    *pools, table = paged(key, value, [length], 24)
    mask = (torch.arange(length) < 24) | (torch.arange(length) >= 48)
    options = dict(attn_mask=mask, order=order, chunked=chunked)
    masked = run_decode(key, value, **options)[0]
    for no_block in (-1, len(pools[0])):
        table[0, 1] = no_block
        options = dict(block_table=table, order=order, chunked=chunked)
        out = run_decode(*pools, **options)[0]
        assert torch.equal(out, masked)


def check_clamped_lengths(program, name):
    """Lengths below 0 and past the cache."""
    _, dtype, (dim, v_dim), chunked = KERNELS[name]
    key, value = dense_cache([40, 40], 2, 40, dim, v_dim, dtype)
    query = noise(2, 4, 1, dim, dtype=dtype, seed=3)
    key, value, scales = stored(name, BYTES[0], key, value)
    out, lse = decode.decode(program, query, key, value, torch.tensor([-3, 1 << 40]), chunked=chunked, **scales)
    whole = decode.decode(program, query, key, value, torch.tensor([40, 40]), chunked=chunked, **scales)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()
    assert torch.equal(out[1], whole[0][1]) and torch.equal(lse[1], whole[1][1])


def check_extremes(program, name):
    """The lowest finite numbers of a mask hide nothing, -inf does; sinks of rows that see nothing, and sinks beside
    which everything else all but vanishes."""
    _, dtype, (dim, v_dim), chunked = KERNELS[name]
    wide = torch.promote_types(dtype, torch.float32)
    key, value = dense_cache([70, 70], 2, 70, dim, v_dim, dtype)
    query, lengths = noise(2, 4, 1, dim, dtype=dtype, seed=3), torch.tensor([70, 0])
    key, value, scales = stored(name, BYTES[0], key.nan_to_num(), value.nan_to_num())

    def run_decode(query, **options):
        return decode.decode(program, query, key, value, lengths, chunked=chunked, **options, **scales)

    lowest, hidden = (torch.full((1, 1, 1, 70), x, dtype=wide) for x in (torch.finfo(wide).min, -math.inf))
    assert torch.equal(run_decode(query, attn_mask=lowest)[0], run_decode(0 * query)[0])
    some = torch.arange(70) % 3 == 1
    for low, high in ((-1, -0.6), (-0.6, 0.9), (-1, 0.9)):  # of the largest number: weights of `some` alone
        mask = torch.where(some, high, low).to(torch.float64).mul(torch.finfo(wide).max).to(wide)
        for splits in (1, 3):
            out = run_decode(query, attn_mask=mask[None, None, None], splits=splits)[0]
            assert torch.equal(out, run_decode(0 * query, attn_mask=some[None, None, None], splits=splits)[0])
    out, lse = run_decode(query, attn_mask=hidden)
    assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = run_decode(query)
    sinks = torch.where(lse.isfinite(), lse + 45, 3.0).flatten(1)
    sunk, all_lse = run_decode(query, sinks=sinks)
    torch.testing.assert_close(all_lse.flatten(1), sinks)
    expected = out.double() * (lse - all_lse).double().exp().unsqueeze(-1)
    torch.testing.assert_close(sunk.double(), expected, rtol=1e-4, atol=1e-25 if wide == dtype else 1e-7)


FAULTY = [(kernel, *fault) for kernel, list_ in faults_decode.DECODE.items() for fault in list_]


@pytest.fixture(scope="module")
def programs():
    """Everything built, side by side."""
    requests = [entry[0] for entry in KERNELS.values()]
    requests += [(*KERNELS[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY]
    build.build_all(requests)


@pytest.mark.parametrize("name", KERNELS)
def test_values(programs, name):
    """Every case once, each in another order of threads."""
    for i, case in enumerate(CASES, list(KERNELS).index(name)):
        order = run.ORDER_NAMES[i % len(run.ORDER_NAMES)]
        with run.named(f"{case}, order {order}"):
            check_case(build.program(*KERNELS[name][0]), name, case, order)


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_hidden(programs, name):
    program = build.program(*KERNELS[name][0])
    for kind in BYTES[: 1 + name.endswith("-bytes")]:
        check_hidden_nan(program, name, "random", kind)
    check_clamped_lengths(program, name)
    check_extremes(program, name)


def test_every_option_is_tried():
    assert {name for _, names, *_ in CASES for name in names} >= OPTIONS.keys() - {"column_mask"}


def attempts(program, name):
    """What may notice a fault."""
    for i, case in enumerate(CASES):
        yield partial(check_case, program, name, case, run.ORDER_NAMES[i % len(run.ORDER_NAMES)])
    yield partial(check_extremes, program, name)
    yield partial(check_clamped_lengths, program, name)
    for order in run.ORDER_NAMES:
        yield partial(check_hidden_nan, program, name, order)
        yield partial(check_hidden_nan, program, name, order, BYTES[1])
        yield partial(check_case, program, name, CASES[0], order)


@pytest.mark.parametrize("name,what,file,old,new", FAULTY, ids=[f"{f[0]} {f[1]}" for f in FAULTY])
def test_faulty_kernel_is_found(programs, name, what, file, old, new):
    program = build.program(*KERNELS[name][0], build.Fault(file, old, new))
    assert is_noticed(attempts(program, name), what)

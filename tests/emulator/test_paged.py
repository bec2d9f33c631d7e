"""Packed rows over a paged cache on CUDA, run on the CPU by tests/emulator: as tests/emulator/test_attention.py."""

import math
from functools import partial

import pytest
import torch

from tests.attention.test_varlen import OPTIONS
from tests.cache.test_paged_attention import assert_right, make
from tests.emulator.faults import paged as faults
from tests.emulator.host import build, paged, run
from tests.emulator.host.noticed import is_noticed

KERNELS = {  # kernel: (program, dtype, head_dim and v_head_dim, whole chunks)
    "64-bf16": (paged.sm80(torch.bfloat16, 64, 64, 64, "64,4,4"), torch.bfloat16, (64, 40), True),
    "128-fp16": (paged.sm80(torch.float16, 128, 128, 32, "128,4,8,true"), torch.float16, (120, 128), True),
    "192-bf16-loose": (paged.sm80(torch.bfloat16, 192, 128, 32), torch.bfloat16, (131, 117), False),
    "256-fp16": (paged.sm80(torch.float16, 256, 256, 16, "256,2,3"), torch.float16, (256, 136), True),
    "fp32": (paged.fp32(torch.float32, 64), torch.float32, (64, 36), True),
    "fp32-loose": (paged.fp32(torch.float32, 128), torch.float32, (65, 17), False),
    "fp64": (paged.fp32(torch.float64, 256), torch.float64, (130, 18), True),
}
ROWS, KEYS = (1, 0, 70, 3, 1, 20), (130, 5, 90, 0, 33, 150)  # of the sequences
CASES = [  # option, block size, query heads, key heads, few_rows, splits, tiles numbered through, rows of no sequence
    ("plain", 16, 4, 2, 16, 1, True, 0),
    ("bottom_right", 7, 4, 2, 16, 3, True, 2),
    ("bottom_right", 64, 4, 2, 200, 2, False, 0),  # decoding alone
    ("bottom_right", 24, 4, 2, 0, 1, True, 1),  # the forward alone
    ("causal", 24, 4, 1, 3, 2, False, 3),
    ("window", 5, 6, 2, 16, 2, True, 0),
    ("prefix", 32, 2, 2, 16, 1, True, 0),
    ("softcap", 128, 4, 2, 16, 2, False, 0),
    ("scale", 1, 4, 4, 16, 1, True, 2),
    ("sinks", 16, 4, 1, 16, 4, True, 0),
    ("alibi", 48, 4, 2, 16, 2, True, 0),
]


def check_case(program, name, case, order):
    _, dtype, dims, chunked = KERNELS[name]
    option, block_size, heads, kv_heads, few_rows, splits, through, extra = case
    tensors, arguments = make(dtype, block_size, ROWS, KEYS, (heads, kv_heads), dims, extra)
    query, *caches = tensors
    if block_size % 2:  # (blocks, block_size, heads, dim) in memory
        caches = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches]
    options = {n: x[:heads] if n in ("sinks", "alibi_slopes") else x for n, x in OPTIONS[option].items()}
    how = dict(few_rows=few_rows, splits=splits, through=through, chunked=chunked, order=order)
    actual = paged.attention(program, query, *caches, **arguments, **options, **how)
    assert_right(actual, tensors, {**arguments, **options}, str(case), slice(sum(ROWS)))


def check_hidden(program, name, order):
    """A NaN shows in the rows that see it alone; blocks that no table holds count as keys that no row sees; lengths
    past the table are cut."""
    _, dtype, dims, chunked = KERNELS[name]
    rows, keys = (20, 2, 40), (20, 70, 50)
    (q, k, v), arguments = make(dtype, 16, rows, keys, dims=dims)
    options = dict(is_causal=True, causal_alignment="bottom_right", scale=0.01)  # no weight is 0
    options |= dict(few_rows=16, chunked=chunked, order=order)
    before, _ = paged.attention(program, q, k, v, **arguments, **options)
    table = arguments["block_table"]
    for what, columns in ((k, 3), (v, 2)):
        saved = what.clone()
        what[table[0, 1], :, 2, columns] = math.nan  # key 18 of the first sequence, which its last two rows see
        out, _ = paged.attention(program, q, k, v, **arguments, **options)
        assert out[18:20].isnan().any(-1).all(), "a NaN does not show"
        assert torch.equal(out[:18], before[:18]) and torch.equal(out[20:], before[20:]), "a NaN leaks"
        what.copy_(saved)
    no_block = {**arguments, "block_table": table.clone()}
    no_block["block_table"][:, 1] = torch.tensor([-1, len(k), -7], dtype=torch.int32)
    out, _ = paged.attention(program, q, k, v, **no_block, **options)
    assert torch.equal(out[:16], before[:16])  # see nothing of it
    past = {**arguments, "cu_seqlens_k": torch.tensor([0, 20, 90, 90 + 1000])}
    out, _ = paged.attention(program, q, k.nan_to_num(), v.nan_to_num(), **past, **options)
    whole = {**arguments, "cu_seqlens_k": torch.tensor([0, 20, 90, 90 + 16 * table.shape[1]])}
    assert torch.equal(out, paged.attention(program, q, k.nan_to_num(), v.nan_to_num(), **whole, **options)[0])


def check_holes(program, name, order):
    """Without a block, as if its keys were hidden: a sequence of 48 keys without its second block of 16, beside one
    of the 32 others."""
    _, dtype, dims, chunked = KERNELS[name]
    for rows in (30, 2):
        (q, k, v), arguments = make(dtype, 16, (rows, rows), (48, 32), dims=dims)
        q[rows:] = q[:rows]
        table = torch.full((2, 3), -1, dtype=torch.int32)
        own = arguments["block_table"]
        table[0, 0], table[0, 2] = own[0, 0], own[0, 2]
        table[1, 0], table[1, 1] = own[0, 0], own[0, 2]
        how = dict(few_rows=16, chunked=chunked, order=order)
        out, lse = paged.attention(program, q, k, v, **{**arguments, "block_table": table}, **how)
        offsets = torch.tensor([0, rows, 2 * rows])
        tensors = (q, *(torch.where(x.isnan(), 0, x) for x in (k, v)))
        right = dict(
            cu_seqlens_q=offsets, cu_seqlens_k=torch.tensor([0, 32, 64]), block_table=table[[1, 1], :2].contiguous()
        )
        assert_right((out, lse), tensors, right, f"a hole, {rows} rows")


FAULTY = [(kernel, *fault) for kernel, list_ in faults.PAGED.items() for fault in list_]


@pytest.fixture(scope="module")
def programs():
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
    check_hidden(program, name, "random")
    check_holes(program, name, "random")


def test_every_option_is_tried():
    assert {option for option, *_ in CASES} == OPTIONS.keys() - {"dropout"}


def attempts(program, name):
    """What may notice a fault."""
    for i, case in enumerate(CASES):
        yield partial(check_case, program, name, case, run.ORDER_NAMES[i % len(run.ORDER_NAMES)])
    for order in run.ORDER_NAMES:
        yield partial(check_hidden, program, name, order)
        yield partial(check_holes, program, name, order)
        yield partial(check_case, program, name, CASES[3], order)


@pytest.mark.parametrize("name,what,file,old,new", FAULTY, ids=[f"{f[0]} {f[1]}" for f in FAULTY])
def test_faulty_kernel_is_found(programs, name, what, file, old, new):
    program = build.program(*KERNELS[name][0], build.Fault(file, old, new))
    assert is_noticed(attempts(program, name), what)

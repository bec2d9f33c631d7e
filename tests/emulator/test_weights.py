"""The kernel behind attention_weights on CUDA, run on the CPU by tests/emulator: against float64, in several orders of
threads, and faults that must be found."""

import itertools
import math
from functools import partial

import pytest
import torch

from attnjourney import BlockMask, reference
from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.test_options import as_given, call
from tests.support.block_patterns import PATTERNS, dense
from tests.support.testing import reference_run

TYPES = {torch.bfloat16: "Bf16,float", torch.float16: "Half,float", torch.float32: "float,float"}
TYPES[torch.float64] = "double,double"
PROGRAMS = {dtype: ("weights", (f"KERNEL=AttentionWeights<{types}>",)) for dtype, types in TYPES.items()}
CASES = [  # options, q_len, kv_len, head_dim, rows, heads, a pattern of blocks and their size
    (("softcap", "scale"), 20, 70, 40, range(20), range(4), None),
    (("causal", "sinks"), 130, 90, 33, [129, 0, 1, 64, 64, 5], [3, 1], None),
    (("bottom_right", "alibi", "query_lengths"), 70, 130, 8, range(70), [2], None),
    (("alibi_per_item", "window", "key_lengths"), 40, 140, 64, range(40), range(4), None),
    (("bool_mask", "prefix"), 66, 75, 16, range(10, 60), [0, 3], None),
    (("mask",), 20, 66, 12, range(20), range(4), None),
    (("row_mask", "softcap"), 9, 70, 300, range(9), [1], None),
    (("fp32_mask",), 12, 20, 20, range(12), range(4), None),
    ((), 100, 150, 24, range(0, 100, 3), [3, 0], ("ragged", 16)),
    (("causal", "alibi"), 70, 200, 16, range(70), range(4), ("document", 48)),
    ((), 3, 0, 16, range(3), range(4), None),
]


def expected_weights(case, dtype):
    """query, key, value; arguments but for the mask; options as the programs take them; lse; the weights in float64."""
    names, q_len, kv_len, head_dim, rows, heads, blocks = case
    tensors, arguments = call(names, dtype, q_len, kv_len, head_dim, head_dim)
    if "alibi_slopes" in arguments:  # the program takes them in float32
        arguments["alibi_slopes"] = arguments["alibi_slopes"].float().to(dtype)
    _, options = as_given(arguments, q_len, kv_len)
    mask = arguments.pop("attn_mask", None)
    if blocks is not None:
        seen = PATTERNS[blocks[0]](blocks[1], q_len, kv_len)
        options["attn_mask"] = BlockMask.from_function(seen, 2, 4, q_len, kv_len, blocks[1])
        mask = dense(seen, 2, 4, q_len, kv_len)
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in arguments.items()}
    wide["attn_mask"] = mask.double() if mask is not None and mask.is_floating_point() else mask
    query, key = (x.double() for x in tensors[:2])
    expected = reference.attention_weights(query, key, **wide)[:, heads][:, :, rows]
    grad_out = torch.zeros(2, 4, q_len, head_dim, dtype=dtype)
    lse = reference_run((*tensors, mask), grad_out, **arguments)[1].to(torch.promote_types(dtype, torch.float32))
    return tensors, arguments, options, lse, expected


def weights_bound(dtype):
    """One rounding; that of the scores where they are no wider than the result."""
    return (2 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps


def check(program, dtype, case, order, rows_first=False):
    _, q_len, kv_len, _, rows, heads, _ = case
    tensors, arguments, options, lse, expected = expected_weights(case, dtype)
    ranges, _ = as_given(arguments, q_len, kv_len)
    weights = run.weights(program, *tensors[:2], lse, rows, heads, ranges, order, rows_first, options)
    assert not weights[expected == 0].any()
    assert dtype == torch.float16 or weights[expected > 0].all()  # float16 underflows
    error = (weights.double() - expected).abs().max() if expected.numel() else 0.0
    assert error <= weights_bound(dtype), f"{error} > {weights_bound(dtype)}"


@pytest.fixture(scope="module")
def programs():
    build.build_all([*PROGRAMS.values(), *(faulty(*edit) for _, *edit in faults.WEIGHTS)])


def faulty(*edit):
    return (*PROGRAMS[torch.bfloat16], build.Fault(*edit))


@pytest.mark.parametrize("dtype", PROGRAMS)
def test_weights(programs, dtype):
    first = list(PROGRAMS).index(dtype)
    for i, case in enumerate(CASES, first):
        order = run.ORDER_NAMES[i % len(run.ORDER_NAMES)]
        with run.named(f"{case}, order {order}"):
            check(build.program(*PROGRAMS[dtype]), dtype, case, order, i % 2 == 1)


def test_rows_and_heads_that_are_not_there_get_zeros(programs):
    """Numbers on the device are not checked there: nothing outside the tensors is read."""
    tensors, arguments = call((), torch.float32, 20, 30, 8, 8)
    lse = reference_run((*tensors, None), torch.zeros(2, 4, 20, 8), **arguments)[1].float()
    program = build.program(*PROGRAMS[torch.float32])
    weights = run.weights(program, *tensors[:2], lse, [5, -1, 20, 1 << 40], [1, -1, 4, 1 << 40], {})
    assert torch.allclose(weights[:, 0, 0].sum(-1), torch.ones(2))
    weights[:, 0, 0] = 0
    assert not weights.any()


def test_what_is_hidden_does_not_leak(programs):
    """NaN in key 40 of a causal call shows in the rows from 40 on, and nowhere else."""
    tensors, arguments = call(("causal",), torch.bfloat16, 70, 70, 16, 16)
    ranges, _ = as_given(arguments, 70, 70)
    lse = reference_run((*tensors, None), torch.zeros(2, 4, 70, 16, dtype=torch.bfloat16), **arguments)[1].float()
    tensors[1][:, :, 40] = math.nan
    program = build.program(*PROGRAMS[torch.bfloat16])
    weights = run.weights(program, *tensors[:2], lse, range(70), range(4), ranges)
    assert weights[:, :, :40].isfinite().all() and weights[:, :, 40:, 40].isnan().all()
    assert weights[:, :, 40:, :40].isfinite().all() and not weights[:, :, 40:, 41:].isnan().any()


@pytest.mark.parametrize("what,file,old,new", faults.WEIGHTS, ids=[f[0] for f in faults.WEIGHTS])
def test_faulty_weights_are_found(programs, what, file, old, new):
    program = build.program(*faulty(file, old, new))
    calls = zip(CASES * 2, itertools.cycle(run.ORDER_NAMES))
    assert is_noticed([partial(check, program, torch.bfloat16, *call) for call in calls], what)

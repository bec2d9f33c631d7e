"""The derivative of attention in a direction on mma.sync, run on the CPU by tests/emulator: with every option, against
float64 by the rule of tests/support/derivative_checks.py."""

import math
from functools import partial

import pytest
import torch

from attnjourney import BlockMask
from attnjourney import reference as formulas
from attnjourney.reference.dropout import keep_mask_of
from tests.emulator import test_options as options
from tests.emulator.faults import jvp as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.test_blocks import block_call
from tests.support.derivative_checks import compare, directions, function_of
from tests.support.options_cases import leaves_of
from tests.support.testing import LSE_DTYPE, OUTPUT_FACTOR

NAMES = ("query", "key", "value")


def sm80(dtype, name, head_dim, v_head_dim, size, keys):
    return ("jvp", (f"KERNEL=Sm80Jvp<{name},{size},{keys}>",)), dtype, head_dim, v_head_dim


def fp32(dtype, name, head_dim, v_head_dim, size):
    return ("jvp", (f"KERNEL=Fp32JvpOf<{name},{size}>", "FP32")), dtype, head_dim, v_head_dim


SM80 = {  # kernel: (program, dtype, head_dim, v_head_dim)
    "64-bf16": sm80(torch.bfloat16, "Bf16", 64, 40, 64, 32),
    "128-fp16": sm80(torch.float16, "Half", 120, 128, 128, 32),
    "256-bf16": sm80(torch.bfloat16, "Bf16", 256, 200, 256, 16),
}
FP32 = {
    "64-fp32": fp32(torch.float32, "float", 64, 36, 64),
    "256-fp32": fp32(torch.float32, "float", 132, 256, 256),
    "64-fp64": fp32(torch.float64, "double", 34, 64, 64),
    "128-fp64": fp32(torch.float64, "double", 128, 18, 128),
    "256-fp64": fp32(torch.float64, "double", 256, 130, 256),
    "128-fp32": fp32(torch.float32, "float", 72, 128, 128),
}
KERNELS = {**SM80, **FP32}
ALL = (*NAMES, "attn_mask", "sinks", "alibi_slopes")
CASES = [  # options, q_len, kv_len, what moves
    (("softcap", "scale"), 70, 100, ALL),
    (("mask", "left", "sinks"), 70, 75, ALL),
    (("alibi_per_item", "window"), 80, 75, ("key", "alibi_slopes")),
    (("dropout", "fp32_mask", "prefix"), 40, 72, ALL),
    (("bottom_right", "alibi", "sinks", "large_cap"), 65, 100, ALL),
    (("documents", "sinks", "softcap", "dropout", "part_of_whole"), 70, 90, ("query", "value", "sinks")),
    (("row_mask", "key_lengths", "alibi"), 33, 70, ("attn_mask",)),
    (("column_mask", "query_lengths"), 30, 40, ("value", "attn_mask")),
    (("causal",), 75, 75, ("query",)),
    (("padding",), 20, 100, ("value",)),
    (("sinks",), 20, 0, ALL),
    (("own_mask", "sinks"), 20, 33, ("sinks",)),
    (("all_dropped", "sinks"), 20, 30, ALL),
    (("one_number",), 5, 20, ALL),
]
BLOCKS = [  # as test_blocks.py, and what moves
    (("ragged", 16, (2, 4), ("softcap", "sinks"), 70, 90), ALL),
    (("document", 48, (2, 1), ("dropout",), 70, 130), ("key", "value")),
]
PACKED = [  # options, offsets of queries and keys, rows and keys in all
    (("bottom_right", "alibi_per_sequence", "dropout"), (0, 40, 40, 45, 110), (0, 36, 50, 90, 90), 113, 91),
    (("causal", "sinks", "softcap"), (0, 65, 100), (0, 70, 75), 100, 75),
]


def in_directions(moving, names):
    """jvp of derivative_checks in the direction of these inputs alone."""

    def jvp(function, tensors, arguments, dtype=None):
        tensors, arguments, leaves = leaves_of(tensors, arguments, dtype)
        inputs = [x.detach() for x in leaves.values()]
        call = function_of(function, {**arguments, **dict(zip(NAMES, tensors))}, leaves)
        changes = torch.func.jvp(call, tuple(inputs), tuple(directions_of(leaves, moving, inputs)))[1]
        return dict(zip(names, changes))

    return jvp


def directions_of(leaves, moving, inputs):
    return [t if n in moving else torch.zeros_like(t) for n, t in zip(leaves, directions(inputs))]


def formula_arguments(tensors, arguments, head=0, heads=0):
    """With the weights that dropout keeps, for all formulas the same."""
    arguments = dict(arguments)
    origin = arguments.pop("origin", (0, 0, head, heads))
    seed = arguments.pop("dropout_seed", None)
    if seed is not None:
        shape = (*tensors[0].shape[:3], tensors[1].size(2))
        arguments["keep_mask"] = keep_mask_of(shape, seed, arguments["dropout_p"], origin)
    return arguments


def moving_of(tensors, arguments, moving):
    """{name: direction} of those that there are."""
    leaves = leaves_of(tensors, arguments)[2]
    inputs = [x.detach() for x in leaves.values()]
    return {n: t for n, t in zip(leaves, directions(inputs)) if n in moving}


def forward_of(tensors, plainly):
    out, lse = formulas.attention(*(x.double() for x in tensors), return_lse=True, **in_float64(plainly))
    dtype = tensors[0].dtype
    return out.to(dtype), lse.to(LSE_DTYPE.get(dtype, torch.float32))


def in_float64(arguments):
    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in arguments.items()}


def run_jvp(program, tensors, plainly, ranges, given, tangents, order, rows_first):
    out, lse = forward_of(tensors, plainly)
    stats = run.stats_of(lse, given)
    return run.jvp(program, tensors, out, stats, tangents, ranges, order, rows_first, given)


def check_with(program, tensors, arguments, ranges, given, moving, order, rows_first):
    plainly = formula_arguments(tensors, arguments)
    tangents = moving_of(tensors, plainly, moving)
    changes = run_jvp(program, tensors, plainly, ranges, given, tangents, order, rows_first)
    names = ("out_tangent", "lse_tangent")
    compare(in_directions(moving, names), dict(zip(names, changes)), tensors, plainly, "", OUTPUT_FACTOR)


def check(program, kernel, case, order, rows_first=False):
    _, dtype, head_dim, v_head_dim = kernel
    names, q_len, kv_len, moving = case
    tensors, arguments = options.call(names, dtype, q_len, kv_len, head_dim, v_head_dim)
    ranges, given = options.as_given(arguments, q_len, kv_len)
    check_with(program, tensors, arguments, ranges, given, moving, order, rows_first)


def check_blocks(program, kernel, case, order, rows_first=False):
    _, dtype, head_dim, v_head_dim = kernel
    tensors, arguments, ranges, given = block_call(case[0], dtype, head_dim, v_head_dim)
    assert isinstance(given["attn_mask"], BlockMask)
    check_with(program, tensors, arguments, ranges, given, case[1], order, rows_first)


def check_packed(program, kernel, case, order, rows_first=False):
    """Each sequence by itself; what belongs to none is not written."""
    _, dtype, head_dim, v_head_dim = kernel
    tensors, arguments, ranges, given = options.packed_call(case, dtype, head_dim, v_head_dim)
    _, q_offsets, k_offsets, *_ = case
    out = torch.zeros(*tensors[0].shape[:3], v_head_dim, dtype=dtype)
    lse = torch.full(out.shape[:3], -math.inf, dtype=LSE_DTYPE.get(dtype, torch.float32))
    parts = []
    for i in range(len(q_offsets) - 1):
        rows, keys = (slice(x[i], x[i + 1]) for x in (q_offsets, k_offsets))
        own = [tensors[0][:, :, rows], tensors[1][:, :, keys], tensors[2][:, :, keys]]
        some = dict(arguments)
        slopes = some.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            some["alibi_slopes"] = slopes[i]
        some = formula_arguments(own, some, 4 * i, 4 * len(q_offsets))
        if own[0].size(2):
            out[:, :, rows], lse[:, :, rows] = forward_of(own, some)
        parts.append((rows, keys, own, some))
    tangents = {n: torch.zeros_like(x) for n, x in zip(NAMES, tensors)}
    for name in ("sinks", "alibi_slopes"):
        if name in arguments:
            tangents[name] = torch.zeros_like(arguments[name])
    for i, (rows, keys, own, some) in enumerate(parts):
        for name, x in moving_of(own, some, ALL).items():
            if name in NAMES:
                tangents[name][:, :, rows if name == "query" else keys] = x
            else:
                to = tangents[name]
                (to[i] if to.dim() == 2 else to).copy_(x)
    stats = run.stats_of(lse, given)
    changes = run.jvp(program, tensors, out, stats, tangents, ranges, order, rows_first, given)
    names = ("out_tangent", "lse_tangent")
    for rows, _, own, some in parts:
        if own[0].size(2):
            actual = dict(zip(names, (x[:, :, rows] for x in changes)))
            compare(in_directions(ALL, names), actual, own, some, f"rows {rows}", OUTPUT_FACTOR)


def check_nan(program, kernel, order):
    """NaN in key and value 40 of a causal call, and in their directions, shows in the rows from 40 on and nowhere
    else."""
    _, dtype, head_dim, v_head_dim = kernel
    tensors, arguments = options.call(("causal", "softcap"), dtype, 70, 70, head_dim, v_head_dim)
    ranges, given = options.as_given(arguments, 70, 70)
    tangents = moving_of(tensors, arguments, ALL)
    out, lse = forward_of(tensors, arguments)
    stats = run.stats_of(lse, given)
    clean = run.jvp(program, tensors, out, stats, tangents, ranges, order, False, given)
    spoilt = [x.clone() for x in tensors]
    moved = {n: x.clone() for n, x in tangents.items()}
    for x in (spoilt[1], spoilt[2], moved["key"], moved["value"]):
        x[:, :, 40] = math.nan
    for inputs, changes in ((spoilt, tangents), (tensors, moved)):
        found = run.jvp(program, inputs, out, stats, changes, ranges, order, False, given)
        for x, y in zip(found, clean):
            assert torch.equal(x[:, :, :40], y[:, :, :40])
            assert x[:, :, 40:].isnan().all()


FAULTY = [("64-bf16", *fault) for fault in faults.SM80]
FAULTY += [("64-fp32", *fault) for fault in faults.FP32] + [("256-fp64", *fault) for fault in faults.ONE_TILE]


@pytest.fixture(scope="module")
def programs():
    """Everything built, side by side."""
    requests = [entry[0] for entry in KERNELS.values()]
    requests += [(*KERNELS[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY]
    build.build_all(requests)


@pytest.mark.parametrize("name", KERNELS)
def test_jvp(programs, name):
    family = SM80 if name in SM80 else FP32
    options.check_all(check, KERNELS, name, options.part_of(CASES, family, name, 4))
    options.check_all(check_blocks, KERNELS, name, options.part_of(BLOCKS, family, name, 2))
    options.check_all(check_packed, KERNELS, name, options.part_of(PACKED, family, name, 2))


@pytest.mark.parametrize("name", ["64-bf16", "64-fp32"])
def test_nan(programs, name):
    check_nan(build.program(*KERNELS[name][0]), KERNELS[name], "random")


def check_one_key(program, kernel, names=()):
    """Rows with one key that has all the weight: without a pivot mu * out would cancel (P A) V."""
    _, dtype, head_dim, v_head_dim = kernel
    tensors, arguments = options.call(names, dtype, 40, 70, head_dim, v_head_dim)
    arguments["scale"] = 4.0
    ranges, given = options.as_given(arguments, 40, 70)
    check_with(program, tensors, arguments, ranges, given, ALL, "forward", False)


@pytest.mark.parametrize("name", ["64-fp32", "128-fp64"])
def test_one_key_with_all_the_weight(programs, name):
    check_one_key(build.program(*KERNELS[name][0]), KERNELS[name])
    check_one_key(build.program(*KERNELS[name][0]), KERNELS[name], ("sinks", "bool_mask"))


def attempts(program, kernel):
    """What may notice a fault, the quick ones first."""
    orders = [run.ORDER_NAMES[i % len(run.ORDER_NAMES)] for i in range(len(CASES))]
    for case, order in zip(CASES, orders):
        yield partial(check, program, kernel, case, order)
    yield partial(check_one_key, program, kernel)
    yield partial(check_one_key, program, kernel, ("sinks", "bool_mask"))
    for case in PACKED:
        yield partial(check_packed, program, kernel, case, "random")
    for case in BLOCKS:
        yield partial(check_blocks, program, kernel, case, "random")
    for order in run.ORDER_NAMES:
        yield partial(check_nan, program, kernel, order)
        yield from [partial(check, program, kernel, case, order) for case in CASES[:2]]


@pytest.mark.parametrize("name,what,file,old,new", FAULTY, ids=[f"{f[0]}: {f[1]}" for f in FAULTY])
def test_a_fault_is_found(programs, name, what, file, old, new):
    program = build.program(*KERNELS[name][0], build.Fault(file, old, new))
    assert is_noticed(attempts(program, KERNELS[name]), what)

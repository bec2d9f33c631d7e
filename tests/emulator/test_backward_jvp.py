"""The derivative of attention's backward in a direction on mma.sync, run on the CPU by tests/emulator: with every
option, against float64 by the rule of tests/support/derivative_checks.py."""

import math
from functools import partial

import pytest
import torch

from attnjourney import reference as formulas
from tests.emulator import test_options as options
from tests.emulator.faults import backward_jvp as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.test_blocks import block_call
from tests.emulator.test_jvp import (
    ALL,
    NAMES,
    directions_of,
    formula_arguments,
    forward_of,
    in_directions,
    moving_of,
)
from tests.support.derivative_checks import compare, directions, function_of
from tests.support.options_cases import leaves_of
from tests.support.testing import LSE_DTYPE


def kernel(math_, dtype, *dims):
    """(program, dtype, head dimensions of query and value: of one slice, of two, which stay in shared memory, of more
    and several blocks of columns)"""
    return ("backward_jvp", (f"MATH={math_}",)), dtype, dims


KERNELS = {
    "bf16": kernel("Sm80BackwardJvpMath<Bf16>", torch.bfloat16, (64, 40), (72, 128), (136, 72)),
    "fp32": kernel("Fp32BackwardJvpMath<float>", torch.float32, (32, 20), (36, 64), (132, 68)),
    "fp64": kernel("Fp32BackwardJvpMath<double>", torch.float64, (16, 10), (18, 32), (66, 34)),
}
EACH = (*ALL, "grad_out", "grad_lse")
CASES = [  # options, q_len, kv_len, which of the head dimensions, what moves
    (("one_number", "scale"), 5, 40, 2, EACH),
    (("mask", "left", "sinks"), 20, 70, 1, EACH),
    (("bottom_right", "alibi", "sinks", "large_cap"), 66, 20, 0, EACH),
    (("dropout", "fp32_mask", "prefix", "bottom_right"), 10, 100, 0, EACH),
    (("documents", "sinks", "softcap", "dropout", "part_of_whole"), 40, 50, 0, ("query", "value", "sinks")),
    (("alibi_per_item", "window"), 66, 33, 1, ("key", "alibi_slopes")),
    (("row_mask", "key_lengths", "alibi"), 20, 40, 0, ("attn_mask", "grad_lse")),
    (("column_mask", "query_lengths"), 30, 20, 2, ("value", "attn_mask")),
    (("causal",), 40, 40, 2, ("grad_out",)),
    (("padding",), 20, 70, 0, ("value",)),
    (("sinks",), 20, 0, 0, EACH),
    (("own_mask", "sinks"), 20, 33, 0, ("sinks",)),
    (("all_dropped", "sinks"), 10, 20, 0, EACH),
]
BLOCKS = [  # as test_blocks.py, and what moves
    (("ragged", 16, (2, 4), ("softcap", "sinks"), 40, 70), EACH),
    (("document", 48, (2, 1), ("dropout",), 30, 60), ("key", "value")),
]
PACKED = [  # options, offsets of queries and keys, rows and keys in all
    (("bottom_right", "alibi_per_sequence", "dropout"), (0, 20, 20, 25, 40), (0, 16, 30, 40, 40), 43, 41),
    (("causal", "sinks", "softcap"), (0, 65, 75), (0, 30, 45), 75, 45),
]


def gradients_in_directions(moving):
    """Changes of all gradients in the direction of these inputs, and of the gradients of out and lse, alone."""

    def change(function, tensors, arguments, dtype=None):
        tensors, arguments, leaves = leaves_of(tensors, arguments, dtype)
        call = function_of(function, {**arguments, **dict(zip(NAMES, tensors))}, leaves)
        outputs = call(*leaves.values())
        grads, changes = sides_of(outputs, moving)
        first = torch.autograd.grad(outputs, list(leaves.values()), grads, create_graph=True, allow_unused=True)
        tangents = directions_of(leaves, moving, [x.detach() for x in leaves.values()])
        pairs = [(x, t) for x, t in zip((*first, *outputs), (*tangents, *changes)) if x is not None and x.requires_grad]
        along, by = zip(*pairs)
        found = torch.autograd.grad(along, list(leaves.values()), by, allow_unused=True)
        return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), found)}

    return change


def only(kind, names):
    """The same of these inputs alone."""
    return lambda *x: {n: y for n, y in kind(*x).items() if n in names}


def sides_of(outputs, moving):
    """Gradients of out and lse, and their directions."""
    detached = [x.detach() for x in outputs]
    changes = directions(detached, 70)
    still = [name not in moving for name in ("grad_out", "grad_lse")]
    return directions(detached, 60), [torch.zeros_like(x) if s else x for x, s in zip(changes, still)]


def given_of(tensors, plainly, moving):
    """out, lse, their changes, gradients of both with their directions, and all directions by name, as the programs
    take them."""
    out, lse = forward_of(tensors, plainly)
    exact = in_directions(moving, ("out", "lse"))(formulas.attention, tensors, plainly, torch.float64)
    changes = exact["out"].to(out.dtype), exact["lse"].to(lse.dtype)
    grads, sides = sides_of((out, lse), moving)
    tangents = moving_of(tensors, plainly, moving)
    tangents |= {n: x for n, x in zip(("grad_out", "grad_lse"), sides) if n in moving}
    return (out, lse), changes, grads, tangents


def check_with(program, tensors, arguments, ranges, given, moving, order, rows_first):
    plainly = formula_arguments(tensors, arguments)
    (out, lse), changes, grads, tangents = given_of(tensors, plainly, moving)
    saved = (out, run.stats_of(lse, given), *grads)
    found = run.backward_jvp(program, tensors, saved, tangents, changes, ranges, order, rows_first, given)
    found = {n: x.to(tensors[0].dtype if n not in given else given[n].dtype) for n, x in found.items()}
    compare(gradients_in_directions(moving), found, tensors, plainly)


def check(program, kernel, case, order, rows_first=False):
    names, q_len, kv_len, dims, moving = case
    tensors, arguments = options.call(names, kernel[1], q_len, kv_len, *kernel[2][dims])
    ranges, given = options.as_given(arguments, q_len, kv_len)
    check_with(program, tensors, arguments, ranges, given, moving, order, rows_first)


def check_blocks(program, kernel, case, order, rows_first=False):
    tensors, arguments, ranges, given = block_call(case[0], kernel[1], *kernel[2][0])
    check_with(program, tensors, arguments, ranges, given, case[1], order, rows_first)


def check_packed(program, kernel, case, order, rows_first=False):
    """Each sequence by itself; what belongs to none is not written."""
    tensors, arguments, ranges, given = options.packed_call(case, kernel[1], *kernel[2][0])
    dtype, (_, q_offsets, k_offsets, *_) = kernel[1], case
    wide = LSE_DTYPE.get(dtype, torch.float32)
    out = torch.zeros(*tensors[0].shape[:3], tensors[2].size(3), dtype=dtype)
    lse = torch.full(out.shape[:3], -math.inf, dtype=wide)
    changes, grads = [[torch.zeros_like(x) for x in (out, lse)] for _ in range(2)]
    tangents = {n: torch.zeros_like(x) for n, x in zip((*NAMES, "grad_out", "grad_lse"), (*tensors, out, lse))}
    heads = [n for n in ("sinks", "alibi_slopes") if n in arguments]
    tangents |= {n: torch.zeros_like(arguments[n]) for n in heads}
    tangents["grad_lse"].zero_()
    expected = []
    for i in range(len(q_offsets) - 1):
        rows, keys = (slice(x[i], x[i + 1]) for x in (q_offsets, k_offsets))
        own = [tensors[0][:, :, rows], tensors[1][:, :, keys], tensors[2][:, :, keys]]
        if own[0].size(2) == 0:
            continue
        some = dict(arguments)
        if "alibi_slopes" in some and some["alibi_slopes"].dim() == 2:
            some["alibi_slopes"] = some["alibi_slopes"][i]
        some = formula_arguments(own, some, 4 * i, 4 * len(q_offsets))
        results, changed, sides, moved = given_of(own, some, EACH)
        for to, x in zip((out, lse, *changes, *grads), (*results, *changed, *sides)):
            to[:, :, rows] = x
        for name, x in moved.items():
            if name in heads:
                to = tangents[name]
                (to[i] if to.dim() == 2 else to).copy_(x)
            else:
                tangents[name][:, :, keys if name in ("key", "value") else rows] = x
        expected.append((i, rows, keys, own, some))
    saved = (out, run.stats_of(lse, given), *grads)
    found = run.backward_jvp(program, tensors, saved, tangents, changes, ranges, order, rows_first, given)
    kind = gradients_in_directions(EACH)
    for i, rows, keys, own, some in expected:
        actual = {n: found[n][:, :, rows if n == "query" else keys] for n in NAMES}
        for n in heads:  # of one sequence alone where they are per sequence
            if found[n].dim() == 2:
                actual[n] = found[n][i].to(some[n].dtype)
        compare(only(kind, actual), actual, own, some)
    for n in heads:
        if found[n].dim() == 1:
            exact = [kind(formulas.attention, x, y, torch.float64)[n] for *_, x, y in expected]
            torch.testing.assert_close(found[n].double(), sum(exact), rtol=2e-2, atol=2e-2)


def check_nan(program, kernel, order):
    """NaN in key and value 40 of a causal call, and in their directions, leaks into no row before; and in query 10, the
    gradient of its row and their directions into no other query and no key after it."""
    tensors, arguments = options.call(("causal", "softcap"), kernel[1], 50, 50, *kernel[2][0])
    ranges, given = options.as_given(arguments, 50, 50)
    (out, lse), changes, grads, tangents = given_of(tensors, arguments, EACH)
    stats = run.stats_of(lse, given)
    clean = run.backward_jvp(program, tensors, (out, stats, *grads), tangents, changes, ranges, order, options=given)

    def spoilt(at, *names):
        named = dict(zip((*NAMES, "grad_out"), (*(x.clone() for x in tensors), grads[0].clone())))
        moved = {n: x.clone() for n, x in tangents.items()}
        for name in names:
            (named if name in named else moved)[name.removesuffix("_tangent")][:, :, at] = math.nan
        saved = (out, stats, named["grad_out"], grads[1])
        inputs = [named[n] for n in NAMES]
        return run.backward_jvp(program, inputs, saved, moved, changes, ranges, order, options=given)

    def same(found, name, part):
        assert torch.equal(found[name][:, :, part], clean[name][:, :, part]), name

    for names in (("key", "value"), ("key_tangent", "value_tangent")):
        found = spoilt(40, *names)
        same(found, "query", slice(0, 40))
        assert found["query"][:, :, 40:].isnan().all()
    for names in (("query", "grad_out"), ("query_tangent", "grad_out_tangent")):
        found = spoilt(10, *names)
        for name in ("key", "value"):
            same(found, name, slice(11, 50))
            assert found[name][:, :, :11].isnan().all()
        same(found, "query", slice(0, 10))
        same(found, "query", slice(11, 50))


FAULTY = [(name, *fault) for name, some in faults.FAULTS.items() for fault in some]


@pytest.fixture(scope="module")
def programs():
    """Everything built, side by side."""
    requests = [entry[0] for entry in KERNELS.values()]
    requests += [(*KERNELS[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY]
    build.build_all(requests)


@pytest.mark.parametrize("name", KERNELS)
def test_backward_jvp(programs, name):
    options.check_all(check, KERNELS, name, options.part_of(CASES, KERNELS, name, 3))
    options.check_all(check_blocks, KERNELS, name, options.part_of(BLOCKS, KERNELS, name, 2))
    options.check_all(check_packed, KERNELS, name, options.part_of(PACKED, KERNELS, name, 2))


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_nan(programs, name):
    check_nan(build.program(*KERNELS[name][0]), KERNELS[name], "random")


def attempts(program, kernel):
    """What may notice a fault, the quick ones first."""
    orders = [run.ORDER_NAMES[i % len(run.ORDER_NAMES)] for i in range(len(CASES))]
    for case, order in zip(CASES, orders):
        yield partial(check, program, kernel, case, order)
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

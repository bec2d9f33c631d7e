"""attention's options in the kernels on mma.sync, run on the CPU by tests/emulator: as test_attention.py."""

import math
from functools import partial

import pytest
import torch

from attnjourney.reference.dropout import dropout_keep_mask, keep_mask_of
from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.host.remembered import remembered
from tests.support.options_cases import OPTIONS, SEED, plain_attention
from tests.support.testing import (
    GRADIENT_FACTOR,
    LSE_DTYPE,
    ULPS,
    assert_close_to_reference,
    plain_run,
    random_tensor,
    reference_run,
)


def kernel(program, *shape):
    name = {"forward": "attention_forward", "backward": "attention_backward"}[program]
    return (name, (f"KERNEL=Sm80{program.capitalize()}<{','.join(map(str, shape))}>", "RANGED"))


FORWARD = {  # kernel: (program, dtype, head_dim, v_head_dim)
    "64-bf16": (kernel("forward", "Bf16", 64, 64, 64, "true"), torch.bfloat16, 64, 64),
    "128-fp16": (kernel("forward", "Half", 128, 128, 64, "true"), torch.float16, 128, 128),
    "192-bf16": (kernel("forward", "Bf16", 192, 128, 64, "true"), torch.bfloat16, 192, 128),
    "256-fp16": (kernel("forward", "Half", 256, 256, 16, "true"), torch.float16, 256, 256),
}
BACKWARD = {  # kernel: (program, dtype, head_dim, deterministic)
    "64-fp16": (kernel("backward", "Half", 64, 128, 64, "false", "true"), torch.float16, 64, False),
    "128-bf16": (kernel("backward", "Bf16", 128, 64, 64, "false", "true"), torch.bfloat16, 128, False),
    "256-fp16": (kernel("backward", "Half", 256, 32, 64, "false", "true"), torch.float16, 256, False),
    "64-deterministic": (kernel("backward", "Bf16", 64, 128, 64, "true", "true"), torch.bfloat16, 64, True),
}
MORE = {
    # two documents: whole tiles of both kernels are hidden
    "documents": lambda q, s: dict(
        attn_mask=(torch.arange(q.size(2))[:, None] * s // q.size(2) < s // 2) == (torch.arange(s) < s // 2)
    ),
    "padding": lambda q, s: dict(attn_mask=torch.arange(s) < torch.tensor([s // 3, s - 1]).view(2, 1, 1, 1)),
    # tiles that only the other rows see, between tiles that these do
    "bands": lambda q, s: dict(
        attn_mask=torch.arange(s) // 128 != torch.where(torch.arange(q.size(2)) % 128 < 64, 1, 2)[:, None]
    ),
    "float_causal": lambda q, s: dict(attn_mask=torch.full((q.size(2), s), -math.inf, dtype=q.dtype).triu(1)),
    "fp32_mask": lambda q, s: dict(
        attn_mask=random_tensor((len(q), 1, q.size(2), s), torch.float32, 13).masked_fill(
            random_tensor((q.size(2), s), seed=14, outliers=False) > 0.5, -math.inf
        )
    ),
    # of every head of every item its own
    "own_mask": lambda q, s: dict(
        attn_mask=random_tensor((*q.shape[:3], s), q.dtype, 13, outliers=False).masked_fill(
            random_tensor((q.size(2), s), seed=14, outliers=False) > 1, -math.inf
        )
    ),
    "one_number": lambda q, s: dict(attn_mask=torch.full((1, 1, 1, 1), 0.7, dtype=q.dtype)),
    "all_dropped": lambda q, s: dict(dropout_p=1.0, dropout_seed=torch.tensor(SEED)),
    # the bits of a call of which this is a part: nine heads, rows from 5 on, keys from 11 on
    "part_of_whole": lambda q, s: dict(origin=(5, 11, 3, 9)),
    "large_cap": lambda q, s: dict(softcap=30.0, scale=2.0),
}
CASES = [  # options, q_len, kv_len
    (("softcap",), 70, 130),
    (("causal", "sinks"), 130, 70),
    (("sinks",), 20, 0),
    (("bottom_right", "alibi"), 65, 150),
    (("alibi_per_item", "window", "large_cap"), 140, 75),
    (("bool_mask", "causal"), 75, 75),
    (("documents", "sinks"), 150, 260),
    (("padding", "softcap", "query_lengths"), 40, 200),
    (("mask", "left", "sinks"), 90, 100),
    (("row_mask", "key_lengths", "alibi"), 70, 135),
    (("mask", "sinks", "query_lengths"), 33, 40),
    (("column_mask", "softcap", "query_lengths"), 130, 70),
    (("fp32_mask", "prefix"), 66, 140),
    (("one_number", "scale"), 30, 70),
    (("dropout", "part_of_whole"), 75, 150),
    (("dropout", "mask", "prefix"), 70, 72),
    (("all_dropped", "sinks"), 20, 30),
    (("dropout", "softcap", "sinks", "alibi", "documents", "bottom_right", "scale"), 140, 150),
]


def call(names, dtype, q_len, kv_len, head_dim, v_head_dim):
    """query, key, value and the arguments of attention; batch 2, four heads on two."""
    shapes = ((2, 4, q_len, head_dim), (2, 2, kv_len, head_dim), (2, 2, kv_len, v_head_dim))
    tensors = [random_tensor(shape, dtype, seed, outliers=False) for seed, shape in enumerate(shapes)]
    arguments = {"enable_gqa": True}
    for name in names:
        arguments.update({**OPTIONS, **MORE}[name](tensors[0], kv_len))
    mask = arguments.get("attn_mask")
    if mask is not None:
        arguments["attn_mask"] = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    return tensors, arguments


def as_given(arguments, q_len, kv_len):
    """The arguments as the emulator's programs take them: (ranges, options)."""
    left, right = arguments.get("window_size", (-1, -1))
    ranges = {"left": left, "right": 0 if arguments.get("is_causal") else right}
    ranges["prefix"] = arguments.get("prefix_length", 0)
    ranges["bottom_right"] = arguments.get("causal_alignment") == "bottom_right"
    ranges["offset"] = kv_len - q_len if ranges["bottom_right"] else 0
    if "query_lengths" in arguments or "key_lengths" in arguments:
        most = torch.tensor([[q_len] * 2, [kv_len] * 2])
        ranges["lengths"] = [arguments.get(n, most[i]).tolist() for i, n in enumerate(("query_lengths", "key_lengths"))]
    names = ("softcap", "scale", "dropout_p", "origin", "sinks", "alibi_slopes", "attn_mask")
    return ranges, {"seed": SEED, **{name: arguments[name] for name in names if name in arguments}}


@remembered
def expected_of(tensors, arguments, grad_out, grad_lse):
    """((values, roundings) of plain PyTorch, exact values): out, lse, gradients as reference_run orders them."""
    exact = dict(arguments)
    seed = exact.pop("dropout_seed", None)
    keep = None
    if seed is not None:
        shape = (*tensors[0].shape[:3], tensors[1].size(2))
        keep = keep_mask_of(shape, seed, arguments["dropout_p"], exact.pop("origin", (0, 0, 0, 0)))
    values = reference_run((*tensors, exact.pop("attn_mask", None)), grad_out, grad_lse, keep, **exact)
    return plain_attention(tensors, arguments, (grad_out, grad_lse), ULPS), values


def check_forward(program, kernel, case, order, rows_first=False):
    _, dtype, head_dim, v_head_dim = kernel
    names, q_len, kv_len = case
    tensors, arguments = call(names, dtype, q_len, kv_len, head_dim, v_head_dim)
    ranges, options = as_given(arguments, q_len, kv_len)
    (out, lse), counts = run.forward(program, *tensors, ranges, order, rows_first, options)
    (plain, rounding), exact = expected_of(tensors, arguments, torch.zeros_like(out), torch.zeros_like(lse))
    for i, (what, x) in enumerate((("out", out), ("lse", lse))):
        assert_close_to_reference(x, plain[i], exact[i], name=what, rounding=rounding[i])
    return counts


def check_backward(program, kernel, case, order, rows_first=False):
    _, dtype, head_dim, deterministic = kernel
    names, q_len, kv_len = case
    tensors, arguments = call(names, dtype, q_len, kv_len, head_dim, head_dim)
    grad_out = random_tensor((2, 4, q_len, head_dim), dtype, 4, outliers=False)
    grad_lse = random_tensor((2, 4, q_len), LSE_DTYPE.get(dtype, torch.float32), 5, outliers=False)
    (plain, rounding), exact = expected_of(tensors, arguments, grad_out, grad_lse)
    ranges, options = as_given(arguments, q_len, kv_len)
    given = (exact[0].detach().to(dtype), exact[1].detach().to(grad_lse.dtype), grad_out, grad_lse)
    results = run.backward(program, tensors, *given, ranges, order, rows_first, options, deterministic=deterministic)
    trained = [n for n in ("sinks", "alibi_slopes", "attn_mask") if n in options and options[n].is_floating_point()]
    by_name = dict(zip(("query", "key", "value", *trained), results, strict=True))
    order_of_reference = [n for n in ("query", "key", "value", "attn_mask", "sinks", "alibi_slopes") if n in by_name]
    for i, what in enumerate(order_of_reference, 2):
        assert_close_to_reference(by_name[what], plain[i], exact[i], GRADIENT_FACTOR, f"grad_{what}", rounding[i])


PACKED = [  # options, offsets of the queries' and the keys' sequences, rows and keys in all: the last belong to none
    (("bottom_right", "alibi_per_sequence", "dropout"), (0, 70, 70, 75, 140), (0, 66, 80, 150, 150), 143, 151),
    (("causal", "sinks", "softcap"), (0, 65, 200), (0, 130, 135), 200, 135),
    ((), (0, 1, 30), (0, 70, 75), 110, 80),  # a tile of rows of no sequence
    (("left", "alibi", "sinks"), (0, 64, 150), (0, 64, 150), 150, 150),
]


def packed_call(case, dtype, head_dim, v_head_dim):
    names, q_offsets, k_offsets, q_len, kv_len = case
    tensors, arguments = call(
        [n for n in names if n != "alibi_per_sequence"], dtype, q_len, kv_len, head_dim, v_head_dim
    )
    if "alibi_per_sequence" in names:
        shape = (len(q_offsets) - 1, 4)
        arguments["alibi_slopes"] = random_tensor(shape, dtype, 12, outliers=False) / 8
    ranges, options = as_given(arguments, 0, 0)
    return [x[:1] for x in tensors], arguments, {**ranges, "packed": (q_offsets, k_offsets)}, options


@remembered
def packed_expected(tensors, arguments, case, grad_out, grad_lse):
    """As expected_of, sequence by sequence."""
    _, q_offsets, k_offsets, *_ = case
    count = len(q_offsets) - 1
    longest = [max(b - a for a, b in zip(x, x[1:])) for x in (q_offsets, k_offsets)]
    seed, dropout_p = arguments.get("dropout_seed"), arguments.get("dropout_p", 0.0)
    keep = None if seed is None else dropout_keep_mask(seed, count, 4, *longest, dropout_p)
    slopes = arguments.get("alibi_slopes")
    results = []  # of plain, its rounding squared, exact: out, lse, the three gradients
    for _ in range(3):
        wide = [torch.zeros(grad_out.shape), torch.full(grad_lse.shape, -math.inf), *map(torch.zeros_like, tensors)]
        results.append([x.double() for x in wide])
    results[1][1].zero_()
    heads = {
        n: [torch.zeros(arguments[n].shape, dtype=torch.float64) for _ in range(3)]
        for n in ("sinks", "alibi_slopes")
        if n in arguments
    }
    for i in range(count):
        rows, keys = (slice(x[i], x[i + 1]) for x in (q_offsets, k_offsets))
        own = [tensors[0][:, :, rows], tensors[1][:, :, keys], tensors[2][:, :, keys]]
        if own[0].size(2) == 0:
            continue
        given = {n: x for n, x in arguments.items() if n != "dropout_seed"}
        if slopes is not None and slopes.dim() == 2:
            given["alibi_slopes"] = slopes[i]
        kept = None if keep is None else keep[i : i + 1, :, : own[0].size(2), : own[1].size(2)]
        sides = (grad_out[:, :, rows], grad_lse[:, :, rows])
        plain, rounding = plain_run((*own, None), *sides, kept, **given)
        exact = reference_run((*own, None), *sides, kept, **given)
        for to, x in zip(results, (plain, [r.square() for r in rounding], exact)):
            for j, part in enumerate((rows, rows, rows, keys, keys)):
                to[j][:, :, part] = x[j].double()
            for n, y in zip(heads, x[5:]):
                target = heads[n][0 if to is results[0] else 1 if to is results[1] else 2]
                (target[i] if target.dim() == 2 else target).add_(y.double())
    for n in heads:
        for to, x in zip(results, heads[n]):
            to.append(x)
    return results[0], [x.sqrt() for x in results[1]], results[2]


def check_packed_forward(program, kernel, case, order, rows_first=False):
    _, dtype, head_dim, v_head_dim = kernel
    tensors, arguments, ranges, options = packed_call(case, dtype, head_dim, v_head_dim)
    results = run.forward(program, *tensors, ranges, order, rows_first, options)[0]
    plain, rounding, exact = packed_expected(tensors, arguments, case, *map(torch.zeros_like, results))
    end = case[1][-1]  # what belongs to no sequence is not written
    for i, x in enumerate(results):
        assert_close_to_reference(
            x[:, :, :end],
            plain[i][:, :, :end],
            exact[i][:, :, :end],
            name="out lse".split()[i],
            rounding=rounding[i][:, :, :end],
        )


def check_packed_backward(program, kernel, case, order, rows_first=False):
    _, dtype, head_dim, deterministic = kernel
    tensors, arguments, ranges, options = packed_call(case, dtype, head_dim, head_dim)
    grad_out = random_tensor(tensors[0].shape, dtype, 4, outliers=False)
    grad_lse = random_tensor(tensors[0].shape[:3], LSE_DTYPE.get(dtype, torch.float32), 5, outliers=False)
    plain, rounding, exact = packed_expected(tensors, arguments, case, grad_out, grad_lse)
    given = (exact[0].to(dtype), exact[1].to(grad_lse.dtype), grad_out, grad_lse)
    results = run.backward(program, tensors, *given, ranges, order, rows_first, options, deterministic=deterministic)
    ends = (case[1][-1], case[2][-1], case[2][-1])
    for i, x in enumerate(results):
        end = ends[i] if i < 3 else None
        x, p, e, r = (y[:, :, :end] if i < 3 else y for y in (x, plain[2 + i], exact[2 + i], rounding[2 + i]))
        assert_close_to_reference(x, p, e, GRADIENT_FACTOR, f"gradient {i}", r)


FAULTY_FORWARD = [("64-bf16", *fault) for fault in faults.FORWARD_OPTIONS]
FAULTY_BACKWARD = [("64-fp16", *fault) for fault in faults.BACKWARD_OPTIONS]


@pytest.fixture(scope="module")
def programs():
    """Everything built, side by side."""
    requests = [entry[0] for entry in (*FORWARD.values(), *BACKWARD.values())]
    requests += [(*FORWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY_FORWARD]
    requests += [(*BACKWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY_BACKWARD]
    build.build_all(requests)


def part_of(cases, kernels, name, parts):
    """All cases for the first kernel; for the others, whose source is the same, one of so many parts each in turn."""
    i = list(kernels).index(name)
    return cases if i == 0 else cases[i % parts :: parts]


def check_all(check, kernels, name, cases):
    """Every case once, each in another order of threads, which differs from kernel to kernel too; in both layouts."""
    for i, case in enumerate(cases, list(kernels).index(name)):
        order = run.ORDER_NAMES[i % len(run.ORDER_NAMES)]
        with run.named(f"{case}, order {order}"):
            check(build.program(*kernels[name][0]), kernels[name], case, order, i % 2 == 1)


@pytest.mark.parametrize("name", FORWARD)
def test_forward(programs, name):
    check_all(check_forward, FORWARD, name, part_of(CASES, FORWARD, name, 3))


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(programs, name):
    check_all(check_backward, BACKWARD, name, part_of(CASES, BACKWARD, name, 3))


@pytest.mark.parametrize("name", FORWARD)
def test_packed_forward(programs, name):
    check_all(check_packed_forward, FORWARD, name, PACKED)


@pytest.mark.parametrize("name", BACKWARD)
def test_packed_backward(programs, name):
    check_all(check_packed_backward, BACKWARD, name, PACKED)


def test_tiles_that_a_boolean_mask_hides_are_skipped(programs):
    """Two documents of equal length: half of the tiles."""
    program = build.program(*FORWARD["64-bf16"][0])
    half = check_forward(program, FORWARD["64-bf16"], (("documents",), 256, 256), "forward")
    full = check_forward(program, FORWARD["64-bf16"], ((), 256, 256), "forward")
    assert half["mma"] * 2 == full["mma"]


def check_nan_forward(program, kernel, order):
    """NaN in key and value 40 of a causal call shows in the rows from 40 on and nowhere else; one hidden from all in
    none."""
    _, dtype, head_dim, v_head_dim = kernel
    tensors, arguments = call(("causal", "softcap"), dtype, 70, 70, head_dim, v_head_dim)
    ranges, options = as_given(arguments, 70, 70)
    clean = run.forward(program, *tensors, ranges, order, False, options)[0]
    tensors[1][:, :, 40] = tensors[2][:, :, 40, 1:] = math.nan
    out, lse = run.forward(program, *tensors, ranges, order, False, options)[0]
    assert torch.equal(out[:, :, :40], clean[0][:, :, :40]) and torch.equal(lse[:, :, :40], clean[1][:, :, :40])
    assert out[:, :, 40:, 1:].isnan().all() and lse[:, :, 40:].isnan().all()
    tensors[1][:, :, 40] = 0.0
    out = run.forward(program, *tensors, ranges, order, False, options)[0][0]
    assert torch.equal(out[:, :, :40], clean[0][:, :, :40])
    assert out[:, :, 40:, 1:].isnan().all() and out[:, :, 40:, 0].isfinite().all()


def check_nan_backward(program, kernel, order):
    """NaN in key and value 69, which the mask hides from all, and in the first row of a causal call leaks nowhere."""
    _, dtype, head_dim, deterministic = kernel
    tensors, arguments = call(("causal", "softcap"), dtype, 70, 70, head_dim, head_dim)
    arguments["attn_mask"] = (torch.arange(70) < 69).view(1, 1, 1, 70)
    ranges, options = as_given(arguments, 70, 70)
    grad_out = random_tensor((2, 4, 70, head_dim), dtype, 4, outliers=False)
    zeros = torch.zeros(2, 4, 70, dtype=LSE_DTYPE.get(dtype, torch.float32))
    values = expected_of(tensors, arguments, grad_out, zeros)[1]

    def gradients():
        given = (values[0].detach().to(dtype), values[1].detach().to(zeros.dtype), grad_out, zeros)
        return run.backward(program, tensors, *given, ranges, order, False, options, deterministic=deterministic)

    grad_out[:, :, 0] = 0
    clean = gradients()
    tensors[1][:, :, 69] = tensors[2][:, :, 69] = grad_out[:, :, 0] = math.nan
    for x, y in zip(gradients(), clean):
        torch.testing.assert_close(x[:, :, 1:], y[:, :, 1:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", FORWARD)
def test_nan_forward(programs, name):
    check_nan_forward(build.program(*FORWARD[name][0]), FORWARD[name], "random")


@pytest.mark.parametrize("name", BACKWARD)
def test_nan_backward(programs, name):
    check_nan_backward(build.program(*BACKWARD[name][0]), BACKWARD[name], "random")


def attempts(check, check_packed, check_nan, program, kernel):
    """What may notice a fault."""
    for i, case in enumerate((*PACKED, *CASES)):
        order = run.ORDER_NAMES[i % len(run.ORDER_NAMES)]
        yield partial(check_packed if case in PACKED else check, program, kernel, case, order)
    for order in run.ORDER_NAMES:
        yield partial(check_nan, program, kernel, order)
        yield from [partial(check, program, kernel, case, order) for case in CASES[6:8]]


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_FORWARD, ids=[f[1] for f in FAULTY_FORWARD])
def test_faulty_forward_is_found(programs, name, what, file, old, new):
    program = build.program(*FORWARD[name][0], build.Fault(file, old, new))
    checks = attempts(check_forward, check_packed_forward, check_nan_forward, program, FORWARD[name])
    assert is_noticed(checks, what)


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_BACKWARD, ids=[f[1] for f in FAULTY_BACKWARD])
def test_faulty_backward_is_found(programs, name, what, file, old, new):
    program = build.program(*BACKWARD[name][0], build.Fault(file, old, new))
    checks = attempts(check_backward, check_packed_backward, check_nan_backward, program, BACKWARD[name])
    assert is_noticed(checks, what)

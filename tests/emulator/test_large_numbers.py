"""Scores and finite masks of any size in every family of CUDA kernels, run on the CPU by tests/emulator: what a forward
leaves of its rows is what a backward, the gradient of a mask and the weights are made of. Cases and rule are those of
tests/attention/test_large_numbers.py, but that delta and dP are sums in another order, which large queries and keys
multiply."""

from functools import partial

import pytest
import torch

from tests.attention import test_large_numbers as large
from tests.emulator import (
    test_attention,
    test_fp16x2,
    test_fp16x2_backward,
    test_fp32,
    test_full_sm90,
    test_full_sm90_backward,
    test_options,
    test_weights,
)
from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.support.testing import FLOOR_ULPS, GRADIENT_FACTOR, assert_close_to_reference, random_tensor

SCORES = (
    "dominant_9",
    "dominant_20",
    "dominant_40",
    "negative_100",
    "rising_12",
    "equal_13",
    "equal_5e25",
    "equal_3e40",
)
MASKS = ("row_-1e+09", "row_-1e+30", "row_3e+38", "keys_-1e+30", "one_key_1e+30", "all_lowest", "two_of_the_lowest")
MASKS += ("both_ends",)
CASES = {**large.SCORES, **large.MASKS}
CASES["equal_3e40"] = (*large.inputs(score=3 * 2.0**40, keys=torch.ones(large.KEYS)), None, False)
CASES["equal_5e25"] = (*large.inputs(score=5 * 2.0**25, keys=torch.ones(large.KEYS)), None, False)
BOOL = {"attn_mask": torch.ones(1, 1, large.ROWS, large.KEYS, dtype=torch.bool)}
SINKS = {"sinks": torch.tensor([-(2.0**126), -(2.0**126)])}

FP16X2 = (test_fp16x2.program(64), test_fp16x2_backward.program(64))
FULL = (test_full_sm90.KERNELS["64-bf16"][0], test_full_sm90_backward.BACKWARD["128-bf16"][0])
FAMILIES = {  # (programs of forward and backward, dtype, cases, options)
    "sm80": (
        test_attention.FORWARD["sm80-64-bf16"][0],
        test_attention.BACKWARD["sm80-64-bf16"][0],
        torch.bfloat16,
        SCORES,
        {},
    ),
    "sm90": (
        test_attention.FORWARD["sm90-64-fp16"][0],
        test_attention.BACKWARD["sm90-64-fp16"][0],
        torch.float16,
        SCORES,
        {},
    ),
    "sm90-short": (
        test_attention.FORWARD["sm90-64-short-bf16"][0],
        test_attention.BACKWARD["sm90-128-bf16"][0],
        torch.bfloat16,
        SCORES,
        {},
    ),
    "fp16x2": (*FP16X2, torch.float32, SCORES, {}),
    "sm80-options": (
        test_options.FORWARD["128-fp16"][0],
        test_options.BACKWARD["64-fp16"][0],
        torch.float16,
        SCORES[2:3] + MASKS,
        {},
    ),
    "sm90-bias": (
        test_full_sm90.kernel("Half", 64, 64, "fp32")[0],  # as the masks, which float16 cannot hold
        test_full_sm90_backward.BACKWARD["64-fp16"][0],
        torch.float16,
        MASKS,
        {},
    ),
    "sm90-bias-bf16": (
        test_full_sm90.BIASED["128-bf16"][0],
        test_full_sm90_backward.BACKWARD["128-bf16"][0],
        torch.bfloat16,
        MASKS,
        {},
    ),
    "sm90-boolean": (*FULL, torch.bfloat16, SCORES[1:5], BOOL),
    "sm90-sinks": (*FULL, torch.bfloat16, SCORES[4:6], SINKS),
    "fp32": (
        test_fp32.FORWARD["64-fp32"][0],
        test_fp32.BACKWARD["64-fp32"][0],
        torch.float32,
        SCORES + MASKS,
        {},
    ),
    "fp64": (
        test_fp32.FORWARD["64-fp64"][0],
        test_fp32.BACKWARD["64-fp64"][0],
        torch.float64,
        SCORES[1:4] + MASKS[1:5],
        {},
    ),
}


@pytest.fixture(scope="module")
def programs():
    requests = [program for entry in FAMILIES.values() for program in entry[:2]]
    requests += [faulty(family, *edit)[i] for family, _, *edit in faults.LARGE_NUMBERS for i in (0, 1)]
    build.build_all([*requests, *test_weights.PROGRAMS.values()])


def case_of(name, dtype):
    tensors, mask, _ = large.tensors_of(CASES[name], dtype)
    return tensors, mask if mask is None else mask[None, None]


def results(forward, backward, tensors, mask, options):
    """{name: number} of the two programs."""
    options = {"scale": 1.0, **options} | ({} if mask is None else {"attn_mask": mask})
    grad_out = random_tensor((*tensors[0].shape[:-1], large.DIM), tensors[0].dtype, 40, outliers=False)
    if forward[0].startswith("fp16x2"):
        program = build.program(*forward)
        out, _, stats, *_ = test_fp16x2.call(program, *tensors, {}, stats=True, scale=1000)
        grad_lse = torch.zeros(out.shape[:3])
        program = build.program(*backward)
        grads, *_ = test_fp16x2_backward.call(program, tensors, out, stats, grad_out, grad_lse, {}, scale=1000)
    else:
        (out, lse, stats), _ = run.forward(build.program(*forward), *tensors, {}, options=options, stats=True)
        given = (out, stats, grad_out, torch.zeros_like(lse))
        grads = run.backward(build.program(*backward), tensors, *given, {}, options=options)
    names = ("query", "key", "value")
    found = {"out": out} | {f"grad_{n}": g for n, g in zip(names, grads)}
    return found | ({} if mask is None else {"grad_mask": grads[-1]})


def expected(tensors, mask, dtype):
    """The same of plain PyTorch."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (*tensors, *([] if mask is None else [mask]))]
    if mask is not None and dtype.itemsize == 2:
        leaves[3] = mask.clone().requires_grad_()
    out = large.plain(*leaves)
    grad_out = random_tensor((*tensors[0].shape[:-1], large.DIM), tensors[0].dtype, 40, outliers=False)
    grads = torch.autograd.grad(out, leaves, grad_out.to(dtype))
    return {"out": out.detach()} | {f"grad_{n}": g for n, g in zip(("query", "key", "value", "mask"), grads)}


def check(forward, backward, dtype, name, options):
    tensors, mask = case_of(name, dtype)
    if not all(x.isfinite().all() for x in (*tensors, *([] if mask is None else [mask]))):
        return
    found = results(forward, backward, tensors, mask, options)
    same, right = (expected(tensors, mask, d) for d in (dtype, torch.float64))
    mask_gradient = found.pop("grad_mask", None)
    large.compare(found, same, right, tensors, False, dtype, name)
    if mask_gradient is not None:
        least = torch.full(mask_gradient.shape, 60 * torch.finfo(dtype).eps, dtype=torch.float64)
        assert_close_to_reference(mask_gradient, same["grad_mask"], right["grad_mask"], 3, "grad_mask", least)


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward(programs, family):
    *kernels, dtype, names, options = FAMILIES[family]
    for name in names:
        with run.named(name):
            check(*kernels, dtype, name, options)


LARGE_VALUES = {  # family: its mask
    "sm90-short": None,
    "sm90-bias-bf16": torch.zeros(1, 1, large.ROWS, 300, dtype=torch.bfloat16),
    "sm90-boolean": torch.ones(1, 1, large.ROWS, 300, dtype=torch.bool),
}


def check_values(family, program):
    """Values near the largest number, under equal scores and under scores that grow on the way from the last key to the
    first, by less than what moves a row's reference."""
    dtype, mask = FAMILIES[family][2], LARGE_VALUES[family]
    for score in (0.0, 5.4):
        query, key, value = torch.zeros(1, 2, large.ROWS, large.DIM), *torch.zeros(2, 1, 2, 300, large.DIM)
        query[..., 0], key[..., :192, 0], value[..., :4], value[..., 4:] = score, 1, 1e38, -3e38
        tensors = [x.to(dtype) for x in (query, key, value)]
        options = {"scale": 1.0} | ({} if mask is None else {"attn_mask": mask})
        (out, *_), _ = run.forward(program, *tensors, {}, options=options, stats=True)
        right = large.plain(*(x.double() for x in tensors))
        assert_close_to_reference(out, large.plain(*tensors), right, name=f"score {score}")


@pytest.mark.parametrize("family", LARGE_VALUES)
def test_large_values(programs, family):
    check_values(family, build.program(*FAMILIES[family][0]))


@pytest.mark.parametrize("name", ("dominant_20", "rising_90", "row_-1e+30", "all_lowest", "two_of_the_lowest"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
def test_weights_of_chosen_rows(programs, name, dtype):
    (query, key, _), mask = case_of(name, dtype)
    family = {
        torch.float32: "fp32",
        torch.float64: "fp64",
        torch.bfloat16: "sm90-bias-bf16" if mask is not None else "sm80",
    }
    forward = build.program(*FAMILIES[family[dtype]][0])
    options = {"scale": 1.0} | ({} if mask is None else {"attn_mask": mask})
    (_, lse, stats), _ = run.forward(forward, query, key, key, {}, options=options, stats=True)
    program = build.program(*test_weights.PROGRAMS[dtype])
    rows = range(large.ROWS)
    actual = run.weights(program, query, key, lse, rows, range(2), {}, options=options, stats=stats)
    eye = torch.eye(large.KEYS, dtype=dtype).expand(1, 2, -1, -1)
    wide = [x if x is None else x.double() for x in (query, key, eye, mask)]
    ulps = FLOOR_ULPS * (4 if dtype == torch.float64 else 1)  # where plain PyTorch is the reference, with its rounding
    least = torch.full(actual.shape, ulps * torch.finfo(dtype).eps, dtype=torch.float64)
    plain, right = large.plain(query, key, eye, mask), large.plain(*wide)
    assert_close_to_reference(actual, plain, right, GRADIENT_FACTOR, name, least)


def faulty(family, *edit):
    """Forward and backward of a family, one of them with a fault."""
    made = [
        (source, (*defines, "RANGED") if source in ("attention_forward", "attention_backward") else defines)
        for source, defines in FAMILIES[family][:2]
    ]
    at = 0 if "forward" in edit[0] else 1
    made[at] = (*made[at][:2], build.Fault(*edit))
    return made


@pytest.mark.parametrize(
    "family,what,file,old,new", faults.LARGE_NUMBERS, ids=[f"{f[0]}-{f[1]}" for f in faults.LARGE_NUMBERS]
)
def test_a_fault_is_found(programs, family, what, file, old, new):
    made = faulty(family, file, old, new)
    _, _, dtype, names, options = FAMILIES[family]
    attempts = [partial(check, *made, dtype, name, options) for name in names]
    if family in LARGE_VALUES:
        attempts.append(partial(check_values, family, build.program(*made[0])))
    assert is_noticed(attempts, what)

"""What is hidden does not leak and what is visible shows, in the CUDA kernels of plain calls (the rules of
csrc/README.md): NaN and inf in keys, values, queries and gradients within tiles that some rows see in part."""

import math
from functools import partial

import pytest
import torch

from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.test_attention import BACKWARD, FORWARD, causal, faulty, inputs_of, value_dim
from tests.support.testing import random_tensor

CALLS = [  # shape; which keys hold NaN
    ((1, 2, 1, 200, 200, 0, causal()), [40, 150]),
    ((1, 1, 1, 150, 330, 0, {"left": 60, "right": 3, "offset": 100}), [130, 200]),
    ((1, 1, 1, 300, 300, 0, {"left": 20, "right": 3, "prefix": 140}), [130, 250]),
    # whole tiles between two others, which have NaN in their second halves
    ((1, 1, 1, 128, 1024, 0, {"left": 512, "right": 0, "offset": 896}), [470, 990]),
]
FORWARD_NAMES = ["sm80-64-fp16", "sm90-64-bf16", "sm90-64-short-bf16", "sm90-128-fp16", "sm90-192-bf16"]
BACKWARD_NAMES = list(BACKWARD)
PADDED = (2, 1, 1, 70, 300, 0, {"lengths": ((70, 70), (133, 260))})
FAULTY_FORWARD = [("sm90-64-short-bf16", *fault) for fault in faults.NAN_SM90_FORWARD]
FAULTY_FORWARD += [("sm90-64-bf16", *fault) for fault in faults.NAN_SM90_WIDE_FORWARD]
FAULTY_BACKWARD = [("sm80-128-fp16", *fault) for fault in faults.NAN_SM80_BACKWARD]
FAULTY_BACKWARD += [("sm90-128-bf16", *fault) for fault in faults.NAN_SM90_BACKWARD]
FAULTY_BACKWARD += [("sm90-192-bf16", *fault) for fault in faults.NAN_SM90_PARTS_BACKWARD]
FAULTY_BACKWARD += [("sm90-256-fp16", *fault) for fault in faults.NAN_SM90_COLUMNS_BACKWARD]


@pytest.fixture(scope="module")
def programs():
    requests = [FORWARD[name][0] for name in FORWARD_NAMES] + [BACKWARD[name][0] for name in BACKWARD_NAMES]
    requests += [faulty(FORWARD[k][0], *edit) for k, _, *edit in FAULTY_FORWARD]
    requests += [faulty(BACKWARD[k][0], *edit) for k, _, *edit in FAULTY_BACKWARD]
    requests += [faulty(FORWARD["sm90-64-short-bf16"][0], *edit) for _, *edit in faults.PADDING]
    build.build_all(requests)


def equal(x, clean, where, what):
    """x is that of the clean call but where a bad number is seen, and there it is not finite."""
    torch.testing.assert_close(x[~where], clean[~where], rtol=2e-2, atol=2e-2, msg=f"{what} leaks")
    assert not x[where].isfinite().any(), f"{what} does not show"


def check_forward(program, name, order):
    _, dtype, head_dim, v_head_dim = FORWARD[name]
    for shape, bad in CALLS:
        (query, key, value), seen = inputs_of(shape, dtype, head_dim, v_head_dim, False)
        call = partial(run.forward, program, query, key, value, shape[-1], order, grid=1, section=1)
        clean = call()[0][0]
        value[:, :, bad[0], 3], value[:, :, bad[1], v_head_dim - 1] = math.nan, math.inf
        out = call()[0][0]
        where = torch.zeros(out.shape, dtype=torch.bool)
        where[..., 3], where[..., v_head_dim - 1] = seen[:, :, :, bad[0]], seen[:, :, :, bad[1]]
        equal(out, clean, where, "value")


@pytest.mark.parametrize("name", FORWARD_NAMES)
def test_forward(programs, name):
    check_forward(build.program(*FORWARD[name][0]), name, run.ORDER_NAMES[FORWARD_NAMES.index(name)])


def loads_for_padding(program):
    """ldmatrix of the Hopper forward, which has them for numbers that are not finite alone, with NaN past the
    lengths."""
    tensors, _ = inputs_of(PADDED, torch.bfloat16, 64, 64, False)
    for x in tensors[1:]:
        for item, length in zip(x, PADDED[-1]["lengths"][1]):
            item[:, length:] = math.nan
    (out, _), counts = run.forward(program, *tensors, PADDED[-1], "forward")
    assert out.isfinite().all()
    return counts["ldmatrix"]


def test_nan_past_the_lengths_costs_nothing(programs):
    program, *_ = FORWARD["sm90-64-short-bf16"]
    assert loads_for_padding(build.program(*program)) == 0
    for what, *edit in faults.PADDING:
        assert loads_for_padding(build.program(*faulty(program, *edit))) > 0, f"nothing noticed: {what}"


def gradients_of(program, arguments, query, key, value, grad_out):
    out, lse, grad_lse, ranges, order, deterministic = arguments
    given = (out, lse, grad_out, grad_lse)
    return run.backward(program, [query, key, value], *given, ranges, order, deterministic=deterministic)


def check_backward(program, kernel, order, forward_lse=False):
    """NaN in a row of grad_out, in a query and in a key: the gradients of what they have nothing to do with stay.
    forward_lse: beside a query with NaN, lse is NaN too, as a forward says, and the kernel may rely on that."""
    _, dtype, head_dim, deterministic = kernel
    for shape, (bad, _) in CALLS[:2]:
        inputs, seen = inputs_of(shape, dtype, head_dim, value_dim(head_dim), False)
        row = 45
        grad_out = random_tensor((*inputs[0].shape[:3], value_dim(head_dim)), dtype, 4, outliers=False)
        scores = inputs[0].float() @ inputs[1].float().repeat_interleave(shape[1] // shape[2], 1).mT / head_dim**0.5
        scores = scores.masked_fill(~seen, -math.inf)
        out = (scores.softmax(-1) @ inputs[2].float().repeat_interleave(shape[1] // shape[2], 1)).to(dtype)
        lse = scores.logsumexp(-1)
        arguments = (out, lse, torch.zeros(inputs[0].shape[:3]), shape[-1], order, deterministic)
        gradients = partial(gradients_of, program, arguments)
        clean = gradients(*inputs, grad_out)
        of_row = torch.zeros(clean[0].shape, dtype=torch.bool)
        of_row[:, :, row] = True
        seen_by_row = seen.expand(*inputs[0].shape[:3], -1)[:, : shape[2], row, :, None].expand(clean[1].shape)
        for what in ("grad_out", "key", "query"):
            query, key, value, grad = (x.clone() for x in (*inputs, grad_out))
            if what == "key":
                key[:, :, bad] = math.nan
                got = gradients(query, key, value, grad)
                rows = seen[:, :, :, bad].expand(inputs[0].shape[:3])[..., None].expand(clean[0].shape)
                equal(got[0], clean[0], rows, what)
                continue
            (grad if what == "grad_out" else query)[:, :, row] = math.nan
            if forward_lse and what == "query":
                lse[:, :, row] = math.nan
            got = gradients(query, key, value, grad)
            equal(got[0], clean[0], of_row, what)
            equal(got[1], clean[1], seen_by_row, what)
            equal(got[2], clean[2], seen_by_row[..., : value_dim(head_dim)], what)


@pytest.mark.parametrize("name", BACKWARD_NAMES)
def test_backward(programs, name):
    order = run.ORDER_NAMES[BACKWARD_NAMES.index(name) % len(run.ORDER_NAMES)]
    check_backward(build.program(*BACKWARD[name][0]), BACKWARD[name], order)


def attempts(check, program, kernel):
    """What may notice a fault."""
    return [partial(check, program, kernel, order) for order in run.ORDER_NAMES]


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_FORWARD, ids=[f[1] for f in FAULTY_FORWARD])
def test_faulty_forward_is_found(programs, name, what, file, old, new):
    program = build.program(*faulty(FORWARD[name][0], file, old, new))
    starved = partial(check_forward, program, name, "starve0")  # the warps beside the producer, and it
    assert is_noticed([*attempts(check_forward, program, name), starved], what)


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_BACKWARD, ids=[f"{f[0]}-{f[1]}" for f in FAULTY_BACKWARD])
def test_faulty_backward_is_found(programs, name, what, file, old, new):
    program = build.program(*faulty(BACKWARD[name][0], file, old, new))
    assert is_noticed(attempts(check_backward, program, BACKWARD[name]), what)

"""Masks of blocks in the kernels on mma.sync, run on the CPU by tests/emulator: as tests/emulator/test_options.py,
whose programs these are."""

from functools import partial

import pytest
import torch

from attnjourney import BlockMask
from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.test_options import BACKWARD, FORWARD, as_given, call, check_all, expected_of, part_of
from tests.support.block_patterns import PATTERNS, dense
from tests.support.testing import GRADIENT_FACTOR, LSE_DTYPE, assert_close_to_reference, random_tensor

CASES = [  # pattern, block size, batch and heads of the mask, options, q_len, kv_len
    ("ragged", 16, (2, 4), ("softcap", "sinks"), 150, 170),
    ("bigbird", 16, (1, 4), (), 300, 290),
    ("document", 48, (2, 1), ("dropout",), 130, 200),
    ("causal_blocks", 64, (1, 1), ("bottom_right", "alibi"), 140, 210),
    ("ragged", 128, (1, 4), ("window", "key_lengths"), 140, 260),
    ("document", 208, (1, 1), ("prefix", "dropout", "sinks"), 220, 230),
    ("bigbird", 32, (2, 4), ("alibi_per_item", "query_lengths", "scale"), 70, 520),
    ("ragged", 64, (1, 4), ("causal",), 33, 20),
]
# more key tiles than a block of threads looks at in one go
FAR = ("far", 64, (1, 1), (), 20, 8500)


def far(block_size, q_len, kv_len):
    return lambda b, h, i, j: (j // block_size % 43 == 5) & (i >= 0)


def block_call(case, dtype, head_dim, v_head_dim):
    """query, key, value, arguments with the mask as a tensor, and what the programs are given."""
    pattern, block_size, (batch, heads), names, q_len, kv_len = case
    tensors, arguments = call(names, dtype, q_len, kv_len, head_dim, v_head_dim)
    ranges, options = as_given(arguments, q_len, kv_len)
    seen = {**PATTERNS, "far": far}[pattern](block_size, q_len, kv_len)
    options["attn_mask"] = BlockMask.from_function(seen, batch, heads, q_len, kv_len, block_size)
    arguments["attn_mask"] = dense(seen, batch, heads, q_len, kv_len)
    return tensors, arguments, ranges, options


def check_forward(program, kernel, case, order, rows_first=False):
    _, dtype, head_dim, v_head_dim = kernel
    tensors, arguments, ranges, options = block_call(case, dtype, head_dim, v_head_dim)
    (out, lse), counts = run.forward(program, *tensors, ranges, order, rows_first, options)
    (plain, rounding), exact = expected_of(tensors, arguments, torch.zeros_like(out), torch.zeros_like(lse))
    for i, (what, x) in enumerate((("out", out), ("lse", lse))):
        assert_close_to_reference(x, plain[i], exact[i], name=what, rounding=rounding[i])
    return counts


def check_backward(program, kernel, case, order, rows_first=False):
    _, dtype, head_dim, deterministic = kernel
    tensors, arguments, ranges, options = block_call(case, dtype, head_dim, head_dim)
    grad_out = random_tensor((*tensors[0].shape[:3], head_dim), dtype, 4, outliers=False)
    grad_lse = random_tensor(tensors[0].shape[:3], LSE_DTYPE.get(dtype, torch.float32), 5, outliers=False)
    (plain, rounding), exact = expected_of(tensors, arguments, grad_out, grad_lse)
    given = (exact[0].detach().to(dtype), exact[1].detach().to(grad_lse.dtype), grad_out, grad_lse)
    results = run.backward(program, tensors, *given, ranges, order, rows_first, options, deterministic=deterministic)
    trained = [n for n in ("sinks", "alibi_slopes") if n in options]
    for i, (what, x) in enumerate(zip(("query", "key", "value", *trained), results, strict=True), 2):
        assert_close_to_reference(x, plain[i], exact[i], GRADIENT_FACTOR, f"grad_{what}", rounding[i])


FAULTY_FORWARD = [("64-bf16", *fault) for fault in faults.FORWARD_BLOCKS]
FAULTY_BACKWARD = [("64-fp16", *fault) for fault in faults.BACKWARD_BLOCKS]
FAULTY_DETERMINISTIC = [("64-deterministic", *fault) for fault in faults.DETERMINISTIC_BLOCKS]


@pytest.fixture(scope="module")
def programs():
    """Everything built, side by side."""
    requests = [entry[0] for entry in (*FORWARD.values(), *BACKWARD.values())]
    requests += [(*FORWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY_FORWARD]
    requests += [(*BACKWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY_BACKWARD]
    requests += [(*BACKWARD[k][0], build.Fault(*edit)) for k, _, *edit in FAULTY_DETERMINISTIC]
    build.build_all(requests)


@pytest.mark.parametrize("name", FORWARD)
def test_forward(programs, name):
    check_all(check_forward, FORWARD, name, part_of(CASES, FORWARD, name, 3))


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(programs, name):
    check_all(check_backward, BACKWARD, name, part_of(CASES, BACKWARD, name, 3))


def test_many_tiles(programs):
    check_forward(build.program(*FORWARD["64-bf16"][0]), FORWARD["64-bf16"], FAR, "random")


def test_blocks_that_hide_everything_are_skipped(programs):
    """Half of the blocks, on the diagonal: half of the products, and of the backward's too."""
    program = build.program(*FORWARD["64-bf16"][0])
    tensors = call((), torch.bfloat16, 256, 256, 64, 64)[0]

    def products(seen):
        mask = BlockMask.from_function(seen, 1, 1, 256, 256, 64)
        return run.forward(program, *tensors, {"left": -1}, options={"attn_mask": mask})[1]["mma"]

    full = products(lambda b, h, i, j: (i >= 0) & (j >= 0))
    assert products(lambda b, h, i, j: i // 128 == j // 128) * 2 == full
    assert products(lambda b, h, i, j: i // 64 == j // 64) * 4 == full


@pytest.mark.parametrize("broken", ["offsets", "index", "partial"])
def test_lists_that_lead_nowhere_are_not_followed(programs, broken):
    """Numbers out of range: nothing outside the tensors is read, which the emulator would report, and rows whose own
    lists are right are right."""
    case = ("ragged", 16, (1, 1), (), 96, 96)
    _, dtype, head_dim, _ = FORWARD["64-bf16"]
    tensors, arguments, ranges, options = block_call(case, dtype, head_dim, head_dim)
    mask = options["attn_mask"]
    first = mask.offsets[0, 0, 1]  # of the second row of blocks: the others are left as they are
    if broken == "offsets":
        mask.offsets[0, 0, -1] = 1 << 30
        mask.offsets[0, 0, -2] = -(1 << 30)
    else:
        getattr(mask, broken)[:first] = torch.tensor([1 << 30, -(1 << 30), 96]).repeat(9)[:first].int()
    kept = slice(16, 64)
    out, lse = run.forward(build.program(*FORWARD["64-bf16"][0]), *tensors, ranges, "random", options=options)[0]
    (plain, rounding), exact = expected_of(tensors, arguments, torch.zeros_like(out), torch.zeros_like(lse))
    for i, x in enumerate((out, lse)):
        x, p, e, r = (y[:, :, kept] for y in (x, plain[i], exact[i], rounding[i]))
        assert_close_to_reference(x, p, e, rounding=r)
    given = (exact[0].detach().to(dtype), exact[1].detach().float(), torch.ones_like(out), torch.zeros_like(lse))
    program = build.program(*BACKWARD["64-fp16"][0])
    half = [x.half() for x in tensors]
    given = [x.half() if x.dtype == dtype else x for x in given]
    run.backward(program, half, *given, ranges, "random", options=options)


def attempts(check, program, kernel):
    """What may notice a fault."""
    for i, case in enumerate((*CASES, *[FAR] * 3) if check is check_forward else CASES):
        yield partial(check, program, kernel, case, run.ORDER_NAMES[i % len(run.ORDER_NAMES)])


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_FORWARD, ids=[f[1] for f in FAULTY_FORWARD])
def test_faulty_forward_is_found(programs, name, what, file, old, new):
    program = build.program(*FORWARD[name][0], build.Fault(file, old, new))
    assert is_noticed(attempts(check_forward, program, FORWARD[name]), what)


FAULTY_BACKWARD += FAULTY_DETERMINISTIC


@pytest.mark.parametrize("name,what,file,old,new", FAULTY_BACKWARD, ids=[f[1] for f in FAULTY_BACKWARD])
def test_faulty_backward_is_found(programs, name, what, file, old, new):
    program = build.program(*BACKWARD[name][0], build.Fault(file, old, new))
    assert is_noticed(attempts(check_backward, program, BACKWARD[name]), what)

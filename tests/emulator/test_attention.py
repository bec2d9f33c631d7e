"""CUDA kernels, run on the CPU by tests/emulator: values against fp64, and faults that must be found."""

import itertools
import math
import subprocess
from functools import partial

import pytest
import torch

from tests.emulator.faults import attention as faults
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.emulator.host.remembered import remembered
from tests.support.testing import GRADIENT_FACTOR, assert_close_to_reference, plain_run, random_tensor, reference_run

plain_run, reference_run = remembered(plain_run), remembered(reference_run)


def sm80_forward(*shape):
    return ("attention_forward", (f"KERNEL=Sm80Forward<{','.join(map(str, shape))}>",))


def sm90_forward(dtype, dqk, dv, groups, keys, stages, query_stages, ping_pong, ahead, store):
    sizes = f"{dtype},{dqk},{dv},{groups},{keys},{stages},{query_stages}"
    return ("attention_forward", (f"SHAPE(ranged)=Sm90ForwardShape<{sizes},ranged,{ping_pong},{ahead},{store}>",))


FORWARD = {  # kernel: (program, dtype, head_dim, v_head_dim)
    "sm80-64-bf16": (sm80_forward("Bf16", 64, 64, 64), torch.bfloat16, 64, 64),
    "sm80-64-fp16": (sm80_forward("Half", 64, 64, 64), torch.float16, 64, 64),
    "sm80-128-bf16": (sm80_forward("Bf16", 128, 128, 64), torch.bfloat16, 128, 128),
    "sm80-192-fp16": (sm80_forward("Half", 192, 128, 64), torch.float16, 192, 128),
    "sm80-256-bf16": (sm80_forward("Bf16", 256, 256, 32), torch.bfloat16, 256, 256),
    "sm90-64-bf16": (sm90_forward("Bf16", 64, 64, 3, 128, 2, 2, 1, 0, 1), torch.bfloat16, 64, 64),
    "sm90-64-fp16": (sm90_forward("Half", 64, 64, 3, 128, 2, 2, 1, 0, 1), torch.float16, 64, 64),
    "sm90-64-short-bf16": (sm90_forward("Bf16", 64, 64, 2, 128, 2, 2, 1, 4, 1), torch.bfloat16, 64, 64),
    "sm90-128-bf16": (sm90_forward("Bf16", 128, 128, 2, 128, 2, 2, 0, 4, 1), torch.bfloat16, 128, 128),
    "sm90-128-fp16": (sm90_forward("Half", 128, 128, 2, 128, 2, 2, 0, 4, 1), torch.float16, 128, 128),
    "sm90-192-bf16": (sm90_forward("Bf16", 192, 128, 2, 128, 2, 1, 1, 4, 0), torch.bfloat16, 192, 128),
    "sm90-256-fp16": (sm90_forward("Half", 256, 256, 2, 64, 2, 1, 1, 4, 0), torch.float16, 256, 256),
}


def causal(offset=0):
    return {"right": 0, "offset": offset}


# batch, query heads, key heads, q_len, kv_len, columns less than the kernel's, which keys are seen (run.py)
SHAPES = [
    (1, 1, 1, 200, 200, 0, causal()),
    (2, 4, 2, 65, 150, 8, causal(85)),
    (1, 2, 1, 150, 65, 16, causal(-85)),  # the first 85 rows see no key
    (1, 4, 2, 129, 72, 0, {}),
    (1, 1, 1, 1, 7, 56, {}),
    (1, 2, 1, 20, 0, 0, causal()),
    (1, 2, 1, 200, 400, 0, {"left": 70, "right": 0, "offset": 150}),
    (
        2,
        2,
        2,
        150,
        560,
        8,
        {"left": 30, "right": 25, "prefix": 70, "bottom_right": 1, "lengths": ((150, 99), (560, 165))},
    ),
    (3, 2, 1, 130, 260, 0, {"right": 0, "bottom_right": 1, "lengths": ((130, 0, 64), (260, 100, 33))}),
    (2, 1, 1, 70, 200, 0, {"lengths": ((70, 70), (0, 133))}),
    (1, 1, 1, 300, 300, 0, {"left": 20, "right": 3, "prefix": 140}),
]
WITH_KEYS = [shape for shape in SHAPES if shape[4]]  # without keys the kernels on mma.sync are taken
FAULT_SHAPES = [
    (1, 4, 2, 150, 200, 8, causal(50)),
    (1, 4, 2, 65, 300, 0, {}),
    (1, 2, 1, 600, 60, 0, causal(-540)),  # tiles that see no key: nothing but the queries' own barriers orders them
    (
        2,
        2,
        2,
        70,
        420,
        8,
        {"left": 30, "right": 25, "prefix": 70, "bottom_right": 1, "lengths": ((70, 59), (420, 165))},
    ),
]
FAULTY_FORWARD = [("sm80-64-bf16", *fault) for fault in faults.SM80_FORWARD]
FAULTY_FORWARD += [("sm90-64-bf16", *fault) for fault in faults.SM90_FORWARD]


def sm80_backward(*shape):
    return ("attention_backward", (f"KERNEL=Sm80Backward<{','.join(map(str, shape))}>",))


def sm90_backward(*shape, entry=()):
    return ("attention_backward", (f"SHAPE=Sm90BackwardShape<{','.join(map(str, shape))}>", *entry))


def sm90_parts_backward(dtype, deterministic):
    return sm90_backward(dtype, 192, 64, deterministic, entry=("ENTRY=sm90_parts_backward",))


def sm90_columns_backward(dtype, deterministic):
    return sm90_backward(dtype, 256, 64, deterministic, entry=("ENTRY=sm90_columns_backward",))


def value_dim(head_dim):
    """The columns of values that a backward kernel has."""
    return 128 if head_dim == 192 else head_dim


BACKWARD = {  # kernel: (program, dtype, head_dim, deterministic)
    "sm80-64-bf16": (sm80_backward("Bf16", 64, 128, 128, "false"), torch.bfloat16, 64, False),
    "sm80-128-fp16": (sm80_backward("Half", 128, 64, 128, "false"), torch.float16, 128, False),
    "sm80-256-bf16": (sm80_backward("Bf16", 256, 32, 64, "false"), torch.bfloat16, 256, False),
    "sm80-128-deterministic": (sm80_backward("Bf16", 128, 64, 128, "true"), torch.bfloat16, 128, True),
    "sm90-64-fp16": (sm90_backward("Half", 64, 128, "false"), torch.float16, 64, False),
    "sm90-128-bf16": (sm90_backward("Bf16", 128, 64, "false"), torch.bfloat16, 128, False),
    "sm90-64-deterministic": (sm90_backward("Bf16", 64, 128, "true"), torch.bfloat16, 64, True),
    "sm90-128-deterministic": (sm90_backward("Half", 128, 64, "true"), torch.float16, 128, True),
    "sm90-192-bf16": (sm90_parts_backward("Bf16", "false"), torch.bfloat16, 192, False),
    "sm90-192-deterministic": (sm90_parts_backward("Half", "true"), torch.float16, 192, True),
    "sm90-256-fp16": (sm90_columns_backward("Half", "false"), torch.float16, 256, False),
    "sm90-256-deterministic": (sm90_columns_backward("Bf16", "true"), torch.bfloat16, 256, True),
}
BACKWARD_FAULT_SHAPES = [
    (1, 1, 1, 400, 130, 0, {}),
    (1, 2, 1, 150, 65, 0, causal(-85)),
    (1, 2, 1, 300, 200, 0, causal()),
    (
        2,
        2,
        2,
        70,
        420,
        8,
        {"left": 30, "right": 25, "prefix": 70, "bottom_right": 1, "lengths": ((70, 59), (420, 165))},
    ),
    (1, 2, 1, 256, 256, 0, {"left": 0, "right": 0}),  # no block adds to the rows of another
]
FAULTY_BACKWARD = [("sm80-128-fp16", *fault) for fault in faults.SM80_BACKWARD]
FAULTY_BACKWARD += [("sm90-128-bf16", *fault) for fault in faults.SM90_BACKWARD]
FAULTY_BACKWARD += [("sm90-192-bf16", *fault) for fault in faults.SM90_PARTS_BACKWARD]
FAULTY_BACKWARD += [("sm90-192-deterministic", *fault) for fault in faults.SM90_PARTS_DETERMINISTIC]
FAULTY_BACKWARD += [("sm90-256-fp16", *fault) for fault in faults.SM90_COLUMNS_BACKWARD]


def visible_keys(shape):
    """(batch, 1, q_len, kv_len): the rule of csrc/core/mask.h, once more."""
    batch, _, _, q_len, kv_len, _, r = shape
    q_lens, k_lens = (
        torch.tensor(x).view(-1, 1, 1, 1) for x in r.get("lengths", ((q_len,) * batch, (kv_len,) * batch))
    )
    i, j = torch.arange(q_len).view(-1, 1), torch.arange(kv_len)
    position = i + (k_lens - q_lens if r.get("bottom_right") else r.get("offset", 0))
    seen = (j >= position - r.get("left", 1 << 20)) & (j <= position + r.get("right", 1 << 20)) | (
        j < r.get("prefix", 0)
    )
    return seen & (j < k_lens) & (i < q_lens)


def inputs_of(shape, dtype, head_dim, v_head_dim, outliers=True):
    """query, key, value; the mask."""
    batch, q_heads, kv_heads, q_len, kv_len, less, _ = shape
    sizes = [(q_heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, v_head_dim)]
    qkv = [
        random_tensor((batch, h, n, d - less), dtype, seed, outliers=outliers) for seed, (h, n, d) in enumerate(sizes)
    ]
    return qkv, visible_keys(shape)


def with_nan(shape, tensors, of_queries):
    """Copies with NaN wherever the lengths of the batch items say that there is nothing."""
    lengths = shape[-1].get("lengths")
    tensors = [x.clone() for x in tensors]
    for x, queries in zip(tensors, of_queries) if lengths else ():
        for item, n in zip(x, lengths[0 if queries else 1]):
            item[:, n:] = math.nan
    return tensors


def faulty(program, *edit):
    """The program of a kernel with a fault; only the one that looks at ranges, which compiles in half the time."""
    source, defines = program
    return source, (*defines, "RANGED"), build.Fault(*edit)


@pytest.fixture(scope="module")
def programs():
    """Everything built, side by side."""
    requests = [entry[0] for entry in FORWARD.values()]
    requests += [faulty(FORWARD[k][0], *edit) for k, _, *edit in FAULTY_FORWARD]
    requests += [entry[0] for entry in BACKWARD.values()]
    requests += [faulty(BACKWARD[k][0], *edit) for k, _, *edit in FAULTY_BACKWARD]
    build.build_all([("self_test",), ("conformance",), *requests])


def check_forward(program, kernel, shape, order, rows_first=False, **extra):
    _, dtype, head_dim, v_head_dim = FORWARD[kernel] if isinstance(kernel, str) else kernel  # or an entry like those
    inputs, mask = inputs_of(shape, dtype, head_dim, v_head_dim)
    given = with_nan(shape, inputs, (True, False, False))
    results, counts = run.forward(program, *given, shape[-1], order, rows_first, **extra)
    grad_out = torch.zeros_like(results[0])
    expected = reference_run((*inputs, mask), grad_out, enable_gqa=True)
    plain, rounding = plain_run((*inputs, mask), grad_out, enable_gqa=True)
    for i, name in enumerate(("out", "lse")):
        assert_close_to_reference(results[i], plain[i], expected[i], name=name, rounding=rounding[i])
    return counts


def test_the_emulator_itself(programs):
    done = subprocess.run(build.program("self_test"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_conformance(programs):
    """The answers that a GPU is held to (`make gpu PART=conformance`) are those of the host twins."""
    done = subprocess.run(build.program("conformance"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kernel", FORWARD)
def test_forward(programs, kernel):
    """Every shape and every order once, in both layouts; where the kernel can, tiles fetched from a counter too."""
    first = list(FORWARD).index(kernel)  # the orders meet the shapes differently for each kernel
    for i, shape in enumerate(WITH_KEYS if kernel.startswith("sm90") else SHAPES):
        order = run.ORDER_NAMES[(i + first) % len(run.ORDER_NAMES)]
        with run.named(f"{shape}, order {order}"):
            counts = check_forward(
                build.program(*FORWARD[kernel][0]), kernel, shape, order, (i + first) % 2 == 1, counter=i % 2, section=3
            )
        if counts["ldmatrix"]:
            assert counts["phases"] == counts["ldmatrix"], "bank conflicts in ldmatrix"


@pytest.mark.parametrize("kernel", [k for k in FORWARD if k.startswith("sm80")])
def test_a_value_that_is_not_seen_does_not_leak(programs, kernel):
    """NaN in value 40 of a causal call shows in the rows from 40 on and nowhere else."""
    _, dtype, head_dim, v_head_dim = FORWARD[kernel]
    (query, key, value), _ = inputs_of((1, 1, 1, 70, 70, 0, causal()), dtype, head_dim, v_head_dim, False)
    program = build.program(*FORWARD[kernel][0])
    clean = run.forward(program, query, key, value, causal())[0][0]
    value[:, :, 40] = math.nan
    out = run.forward(program, query, key, value, causal())[0][0]
    assert torch.equal(out[:, :, :40], clean[:, :, :40]) and out[:, :, 40:].isnan().all()


@pytest.mark.parametrize("kernel", ["sm80-64-bf16", "sm90-128-bf16"])
def test_tiles_that_no_row_sees_are_skipped(programs, kernel):
    program = build.program(*FORWARD[kernel][0])
    full = check_forward(program, kernel, (1, 1, 1, 384, 384, 0, {}), "forward")
    half = check_forward(program, kernel, (1, 1, 1, 384, 384, 0, causal()), "forward")
    tiles = 384 // (64 if kernel.startswith("sm80") else 128)
    assert half["mma"] * 2 * tiles <= full["mma"] * (tiles + 1)
    window = check_forward(program, kernel, (1, 1, 1, 384, 384, 0, {"left": 63, "right": 0}), "forward")
    assert window["mma"] * tiles <= full["mma"] * 2


@pytest.mark.parametrize("kernel,what,file,old,new", FAULTY_FORWARD, ids=[f"{f[0]}-{f[1]}" for f in FAULTY_FORWARD])
def test_faulty_forward_is_found(programs, kernel, what, file, old, new):
    program = build.program(*faulty(FORWARD[kernel][0], file, old, new))
    calls = itertools.product(FAULT_SHAPES, run.ORDER_NAMES)
    assert is_noticed([partial(check_forward, program, kernel, *call, counter=1, grid=2) for call in calls], what)


def check_backward(program, kernel, shape, order, rows_first=False, finish=False):
    """finish: on Hopper the blocks themselves make dQ of their sums, as where sequences are short."""
    _, dtype, head_dim, deterministic = BACKWARD[kernel]
    inputs, mask = inputs_of(shape, dtype, head_dim, value_dim(head_dim), outliers=False)
    grad_out = random_tensor((*inputs[0].shape[:3], inputs[2].shape[3]), dtype, 4, outliers=False)
    grad_lse = random_tensor(inputs[0].shape[:3], torch.float32, 5, outliers=False)
    out, lse, *expected = reference_run((*inputs, mask), grad_out, grad_lse, enable_gqa=True)
    plain, rounding = plain_run((*inputs, mask), grad_out, grad_lse, enable_gqa=True)
    out, grad_out_, *inputs = with_nan(shape, (out.detach().to(dtype), grad_out, *inputs), (1, 1, 1, 0, 0))
    given = (out, lse.detach().float(), grad_out_, grad_lse)
    finish = finish and "SHAPE" in BACKWARD[kernel][0][1][0] and not deterministic and shape[4] > 0
    how = {"deterministic": deterministic, "finish": finish}
    results = run.backward(program, inputs, *given, shape[-1], order, rows_first, **how)
    for i, name in enumerate(("grad_query", "grad_key", "grad_value")):
        assert_close_to_reference(results[i], plain[2 + i], expected[i], GRADIENT_FACTOR, name, rounding[2 + i])


@pytest.mark.parametrize("kernel", BACKWARD)
def test_backward(programs, kernel):
    first = list(BACKWARD).index(kernel)
    for i, shape in enumerate(WITH_KEYS if kernel.startswith("sm90") else SHAPES):
        order = run.ORDER_NAMES[(i + first) % len(run.ORDER_NAMES)]
        with run.named(f"{shape}, order {order}"):
            rows_first, finish = (i + first) % 2 == 1, (i + first) // 2 % 2 == 1
            check_backward(build.program(*BACKWARD[kernel][0]), kernel, shape, order, rows_first, finish)


@pytest.mark.parametrize("kernel,what,file,old,new", FAULTY_BACKWARD, ids=[f"{f[0]}-{f[1]}" for f in FAULTY_BACKWARD])
def test_faulty_backward_is_found(programs, kernel, what, file, old, new):
    program = build.program(*faulty(BACKWARD[kernel][0], file, old, new))
    calls = itertools.product(BACKWARD_FAULT_SHAPES, enumerate(run.ORDER_NAMES))
    checks = [partial(check_backward, program, kernel, shape, order, finish=i % 2 == 0) for shape, (i, order) in calls]
    assert is_noticed(checks, what)

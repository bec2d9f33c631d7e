"""The lightning indexer's CUDA kernels, run on the CPU by tests/emulator: as tests/emulator/test_attention.py."""

from functools import partial

import pytest
import torch

from attnjourney import reference
from tests.emulator.faults import indexer as faults
from tests.emulator.host import build, indexer, run
from tests.emulator.host.noticed import is_noticed
from tests.support.indexer_cases import (
    LOSS_SCALES,
    LOSS_SHAPES,
    TOPK_SHAPES,
    compare_loss,
    compare_topk,
    loss_inputs,
    topk_inputs,
)
from tests.support.testing import random_tensor

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOPK = {  # the kernel's size, dtype, head_dim
    "64-bf16": (64, BF16, 64),
    "128-fp16": (128, FP16, 128),
    "64-one-fp16": (-64, FP16, 64),
    "128-one-bf16": (-128, BF16, 128),
    "fma-bf16": (0, BF16, 33),
    "fma-fp32": (0, FP32, 64),
    "fma-fp64": (0, FP64, 40),
}
LOSS = {  # dtype, then for the indexer and for the attention the kernel's columns and the head_dim
    "64-bf16": (BF16, (64, 64), (128, 128)),
    "128-fp16": (FP16, (128, 128), (256, 256)),
    "128-latent-bf16": (BF16, (128, 128), (576, 576)),
    "fma-fp16": (FP16, (0, 33), (0, 20)),
    "fma-fp32": (FP32, (0, 64), (0, 96)),
    "fma-fp64": (FP64, (0, 40), (0, 576)),
}
TOPK_FAULTS = [(name, *fault) for name, some in faults.TOPK.items() for fault in some]
LOSS_FAULTS = [(name, *fault) for name, some in faults.LOSS.items() for fault in some]


def topk_request(name, fault=None):
    size, dtype, _ = TOPK[name]
    return indexer.topk_request(dtype, size, fault)


def loss_request(name, fault=None):
    dtype, (size, _), (target, _) = LOSS[name]
    return indexer.loss_request(dtype, size, target, fault)


@pytest.fixture(scope="module")
def programs():
    requests = [topk_request(name) for name in TOPK] + [loss_request(name) for name in LOSS]
    requests += [topk_request(name, build.Fault(*edit)) for name, _, *edit in TOPK_FAULTS]
    requests += [loss_request(name, build.Fault(*edit)) for name, _, *edit in LOSS_FAULTS]
    build.build_all(requests)


def choose(program, inputs, options, how=None, order="forward"):
    """indices and scores."""
    rest = {name: x for name, x in options.items() if name != "causal_alignment"}
    bottom_right = options["causal_alignment"] == "bottom_right"
    return indexer.topk(program, *inputs, bottom_right=bottom_right, order=order, **rest, **how or {})[0]


def check_topk(program, name, shape, order="forward"):
    inputs, options, how = topk_inputs(shape, *TOPK[name][1:])
    compare_topk(*choose(program, inputs, options, how, order), inputs, options)


def check_nan(program, name):
    """A NaN in a key is a score that is chosen first; an infinite one stays what it is."""
    _, dtype, dim = TOPK[name]
    q, k, w = (random_tensor(s, dtype, seed=i) for i, s in enumerate(((1, 3, 2, dim), (1, 90, dim), (1, 3, 2))))
    k.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[k.itemsize])[0, 11, 5] = -1  # a NaN with a sign
    k[0, 70, 5] = torch.inf
    w = w.abs() + 1
    options = dict(is_causal=False, causal_alignment="top_left", key_lengths=None)
    indices, scores = choose(program, (q, k, w, 4), options)
    expected, values = reference.lightning_indexer(q, k, w, 4, is_causal=False, return_scores=True)
    assert torch.equal(indices, expected)
    assert torch.equal(scores.isnan(), values.isnan()) and torch.equal(scores.isinf(), values.isinf())


def check_loss(program, name, shape, order="forward"):
    dtype, (_, dim), (_, target_dim) = LOSS[name]
    inputs, grad_loss, how = loss_inputs(shape, dtype, dim, target_dim)
    compare_loss(indexer.loss(program, *inputs, grad_loss, order=order, **LOSS_SCALES, **how)[0], inputs, grad_loss)


@pytest.mark.parametrize("name", TOPK)
def test_choice(programs, name):
    """Every shape, in every order once over the programs."""
    program, first = build.program(*topk_request(name)), list(TOPK).index(name)
    for i, shape in enumerate(TOPK_SHAPES):
        order = run.ORDER_NAMES[(i + first) % len(run.ORDER_NAMES)]
        with run.named(f"{shape}, order {order}"):
            check_topk(program, name, shape, order)
    check_nan(program, name)


@pytest.mark.parametrize("name", LOSS)
def test_loss_and_gradients(programs, name):
    program, first = build.program(*loss_request(name)), list(LOSS).index(name)
    for i, shape in enumerate(LOSS_SHAPES):
        order = run.ORDER_NAMES[(i + first) % len(run.ORDER_NAMES)]
        with run.named(f"{shape}, order {order}"):
            check_loss(program, name, shape, order)


@pytest.mark.parametrize("name, what, file, old, new", TOPK_FAULTS, ids=[f"{x[0]}-{x[1]}" for x in TOPK_FAULTS])
def test_a_fault_of_the_choice_is_found(programs, name, what, file, old, new):
    program = build.program(*topk_request(name, build.Fault(file, old, new)))
    calls = [(shape, order) for order in ("forward", "reverse", "starve") for shape in TOPK_SHAPES]
    assert is_noticed(
        [*(partial(check_topk, program, name, *c) for c in calls), partial(check_nan, program, name)], what
    )


@pytest.mark.parametrize("name, what, file, old, new", LOSS_FAULTS, ids=[f"{x[0]}-{x[1]}" for x in LOSS_FAULTS])
def test_a_fault_of_the_loss_is_found(programs, name, what, file, old, new):
    program = build.program(*loss_request(name, build.Fault(file, old, new)))
    calls = [(shape, order) for order in ("forward", "reverse", "starve") for shape in LOSS_SHAPES]
    assert is_noticed([partial(check_loss, program, name, *call) for call in calls], what)

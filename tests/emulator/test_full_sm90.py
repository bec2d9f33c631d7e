"""attention's options in the Hopper forward, run on the CPU by tests/emulator: the cases of the kernels on mma.sync
(tests/emulator/test_options.py, tests/emulator/test_blocks.py), and some with more tiles."""

import math
from functools import partial

import pytest
import torch

from attnjourney import BlockMask
from tests.emulator import test_blocks as blocks
from tests.emulator import test_options as options
from tests.emulator.faults import full_forward as faults_full_forward
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.support.testing import random_tensor


def kernel(dtype, dqk, dv, mask="none"):
    shape = f"{dtype},{dqk},{dv},MaskElement::{mask}"
    program = ("full_forward", (f"SHAPE=Sm90FullShape<{shape}>",))
    return program, {"Bf16": torch.bfloat16, "Half": torch.float16}[dtype], dqk, dv


KERNELS = {  # as options.FORWARD
    "64-bf16": kernel("Bf16", 64, 64),
    "128-fp16": kernel("Half", 128, 128),
    "192-bf16": kernel("Bf16", 192, 128),
    "256-fp16": kernel("Half", 256, 256),
}
BIASED = {  # with a floating mask, of the dtype of query or in float32
    "64-fp16": kernel("Half", 64, 64, "same"),
    "128-bf16": kernel("Bf16", 128, 128, "same"),
    "192-fp16": kernel("Half", 192, 128, "same"),
    "256-bf16": kernel("Bf16", 256, 256, "same"),
    "64-fp32": kernel("Bf16", 64, 64, "fp32"),
    "192-fp32": kernel("Bf16", 192, 128, "fp32"),
}
FLOATING = {"mask", "own_mask", "row_mask", "column_mask", "fp32_mask", "one_number", "float_causal"}
EVERY = ("softcap", "sinks", "alibi", "dropout", "scale")
MORE = [  # every option beside every mask and every range, and some alone, of several tiles
    (("bands",), 200, 601),
    (("bands", "left", "sinks"), 150, 520),
    (("bool_mask", "dropout"), 70, 257),
    (("alibi", "bottom_right"), 130, 400),
    (("scale", "key_lengths"), 90, 300),
    (("prefix", "sinks"), 300, 300),
    ((*EVERY, "bool_mask", "window"), 140, 258),
    ((*EVERY, "padding", "causal"), 280, 270),
    ((*EVERY, "documents", "prefix"), 130, 390),
    ((*EVERY, "causal", "query_lengths", "key_lengths"), 200, 330),
    (("mask",), 70, 401),
    (("row_mask", "dropout"), 65, 385),
    (("fp32_mask",), 66, 384),
    (("float_causal", "sinks"), 200, 256),
    ((*EVERY, "mask", "bottom_right"), 140, 258),
    ((*EVERY, "fp32_mask", "key_lengths"), 70, 260),
    ((*EVERY, "column_mask", "window"), 90, 270),
    ((*EVERY, "row_mask", "prefix"), 130, 257),
    (("mask", "causal"), 150, 264),  # from here on by TMA
    (("own_mask",), 200, 264),
    (("row_mask", "bottom_right"), 70, 136),
    (("fp32_mask", "window", "sinks"), 260, 268),
]
CASES = [case for case in (*options.CASES, *MORE) if case[2]]  # without keys the kernel on mma.sync is taken


def checks(name):
    """(check, cases) of a kernel."""
    biased = name in BIASED
    dense = [case for case in CASES if biased == bool(FLOATING & set(case[0]))]
    if biased:
        return [(options.check_forward, [case for case in dense if ("fp32_mask" in case[0]) == ("fp32" in name)])]
    return [
        (options.check_forward, dense),
        (options.check_packed_forward, options.PACKED),
        (blocks.check_forward, blocks.CASES),
    ]


FAULTS = [("64-bf16", *fault) for fault in faults_full_forward.PLAIN]
FAULTS += [("64-fp16", *fault) for fault in faults_full_forward.BIAS]
FAULTS += [("64-fp32", *fault) for fault in faults_full_forward.FP32_BIAS]


@pytest.fixture(scope="module")
def programs():
    """Everything built, side by side."""
    all_kernels = {**KERNELS, **BIASED}
    requests = [entry[0] for entry in all_kernels.values()]
    requests += [(*all_kernels[name][0], build.Fault(*edit)) for name, _, *edit in FAULTS]
    build.build_all(requests)


@pytest.mark.parametrize("name", [*KERNELS, *BIASED])
def test_forward(programs, name):
    kernels = KERNELS if name in KERNELS else BIASED
    for check, cases in checks(name):
        options.check_all(check, kernels, name, cases if name.startswith("64") else cases[::3])


def check_nan(program, kernel, biased, order):
    """NaN and inf in keys and values that are hidden do not leak, by whatever they are hidden; those seen show."""
    _, dtype, head_dim, v_head_dim = kernel
    for mask in ("float_causal",) if biased else ("bool_mask", "causal"):
        tensors, arguments = options.call((mask,), dtype, 150, 200, head_dim, v_head_dim)
        if "MaskElement::fp32" in str(kernel[0]):
            arguments["attn_mask"] = arguments["attn_mask"].float()
        given = arguments.get("attn_mask", torch.ones(150, 200).tril().bool()[None, None])
        seen = (given if given.dtype == torch.bool else given == 0)[0, 0, :, 100]
        call = partial(run.forward, program, *tensors, *options.as_given(arguments, 150, 200)[:1], order, False)
        call = partial(call, options.as_given(arguments, 150, 200)[1])
        clean = call()[0][0]
        for tensor, column in ((tensors[2], 3), (tensors[1], slice(None))):
            before = tensor[:, :, 100, column].clone()
            tensor[:, :, 100, column] = math.nan
            out = call()[0][0]
            tensor[:, :, 100, column] = before
            torch.testing.assert_close(out[:, :, ~seen], clean[:, :, ~seen], rtol=2e-2, atol=2e-2)
            assert out[:, :, seen][..., column].isnan().all()


@pytest.mark.parametrize("name", [*KERNELS, *BIASED])
def test_nan(programs, name):
    entry = {**KERNELS, **BIASED}[name]
    order = run.ORDER_NAMES[[*KERNELS, *BIASED].index(name) % len(run.ORDER_NAMES)]
    check_nan(build.program(*entry[0]), entry, name in BIASED, order)


def check_packed_nan(program, kernel, order):
    """What belongs to another sequence, or to none, is nobody's business; nor does it cost anything."""
    _, dtype, head_dim, v_head_dim = kernel
    tensors, _, ranges, given = options.packed_call(options.PACKED[0], dtype, head_dim, v_head_dim)
    (clean, _), _ = run.forward(program, *tensors, ranges, order, False, given)
    for bad in (0, 3, None):
        poisoned = [x.clone() for x in tensors]
        for x, at in zip(poisoned, (ranges["packed"][0], ranges["packed"][1], ranges["packed"][1])):
            x[:, :, at[-1] if bad is None else at[bad] : None if bad is None else at[bad + 1]] = math.nan
        (out, _), counts = run.forward(program, *poisoned, ranges, order, False, given)
        assert bad is not None or counts["ldmatrix"] == 0
        for i, (begin, end) in enumerate(zip(ranges["packed"][0], ranges["packed"][0][1:])):
            assert i == bad or torch.equal(out[:, :, begin:end], clean[:, :, begin:end])


@pytest.mark.parametrize("name", KERNELS)
def test_packed_nan(programs, name):
    check_packed_nan(build.program(*KERNELS[name][0]), KERNELS[name], "random")


def test_many_tiles(programs):
    """More tiles than bits in a word, most of them hidden."""
    blocks.check_forward(build.program(*KERNELS["64-bf16"][0]), KERNELS["64-bf16"], blocks.FAR, "random")


def test_tiles_that_a_mask_hides_are_skipped(programs):
    """Two documents of equal length: half of the products, with a mask and with blocks."""
    program, entry = build.program(*KERNELS["64-bf16"][0]), KERNELS["64-bf16"]
    tensors, arguments = options.call(("documents",), entry[1], 512, 512, 64, 64)
    mask = BlockMask.from_function(lambda b, h, i, j: i // 256 == j // 256, 1, 1, 512, 512, 64)
    full, half, blocked = (
        run.forward(program, *tensors, {"left": -1}, options=given)[1]["mma"]
        for given in ({}, {"attn_mask": arguments["attn_mask"]}, {"attn_mask": mask})
    )
    assert half * 2 == blocked * 2 == full


@pytest.mark.parametrize("name", ["64-fp16", "64-fp32"])
def test_masks_that_tma_takes(programs, name):
    """Those whose rows are whole 16-byte chunks come by TMA, in boxes of 64 columns of 16 bits; of others words are
    copied where rows are whole words and tiles whole, and elements else."""
    program, entry = build.program(*BIASED[name][0]), BIASED[name]
    dtype, boxes, row_tiles = (torch.float32, 4, 8) if "fp32" in name else (torch.float16, 2, 8)

    def copies(shape):
        tensors = options.call((), entry[1], 70, max(shape[3], 258), 64, 64)[0]
        given = {"attn_mask": random_tensor(shape, dtype, 3, outliers=False)}
        return run.forward(program, *tensors, {"left": -1}, options=given)[1]["copies"]

    others = copies((1, 1, 1, 1))  # is read as elements, beside 258 keys
    width, tiles = 258 + -258 % (16 // dtype.itemsize), 3
    for shape in ((2, 4, 70), (1, 1, 70), (1, 4, 1), (1, 1, 1)):
        assert copies((*shape, width)) - others == row_tiles * tiles * boxes
    words = row_tiles * (tiles - 1) * 128 * boxes * 32  # of whole tiles
    assert copies((1, 1, 70, 258)) - others == words
    assert copies((2, 1, 1, 258)) - others == words
    assert copies((1, 1, 70, 259)) - others == (words if dtype == torch.float32 else 0)


def attempts(program, name, file):
    """What may notice a fault, the likely ones first."""
    entry, biased = {**KERNELS, **BIASED}[name], name in BIASED
    for turn in range(len(run.ORDER_NAMES)):
        orders = run.ORDER_NAMES[turn:] + run.ORDER_NAMES[:turn]
        rare = [partial(check_nan, program, entry, biased, orders[0])]
        if not biased:
            rare = [partial(check_packed_nan, program, entry, orders[0]), *rare]
            rare.append(partial(blocks.check_forward, program, entry, blocks.FAR, orders[0]))
        of_sequences = file in (faults_full_forward.PRODUCER, faults_full_forward.OUTPUT)
        yield from rare if of_sequences else ()
        for check, cases in sorted(checks(name), key=lambda c: of_sequences and len(c[1])):
            yield from [partial(check, program, entry, case, orders[i % 6]) for i, case in enumerate(cases)]
        yield from () if of_sequences else rare


@pytest.mark.parametrize("name,what,file,old,new", FAULTS, ids=[f[1] for f in FAULTS])
def test_faulty_forward_is_found(programs, name, what, file, old, new):
    entry = {**KERNELS, **BIASED}[name]
    program = build.program(*entry[0], build.Fault(file, old, new))
    assert is_noticed(attempts(program, name, file), what)

"""Decoding over latents on CUDA, run on the CPU by tests/emulator: values against float64 for every dtype and option,
and faults that must be found."""

from functools import partial

import pytest
import torch

from attnjourney import reference
from tests.emulator.host import build, run
from tests.emulator.host.noticed import is_noticed
from tests.support.testing import assert_close_to_reference, plain_run, random_tensor, reference_run

KERNELS = {  # program, dtype, multiple of the dimensions
    "mma-bf16": ("LatentMma<Bf16,64,32>", torch.bfloat16, 8),
    "mma-fp16": ("LatentMma<Half,32,16>", torch.float16, 8),
    "sm90-bf16": ("Sm90Latent<Bf16>", torch.bfloat16, 8),
    "mma-bf16-int8": ("LatentMma<Bf16,64,32,true>", torch.bfloat16, 16),
    "mma-fp16-e4m3": ("LatentMma<Half,32,16,true>", torch.float16, 16),
    "fma-fp32-e4m3": ("LatentFma<float,true>", torch.float32, 1),
    "fma-bf16-int8": ("LatentFma<Bf16,true>", torch.bfloat16, 1),
    "fma-fp32": ("LatentFma<float>", torch.float32, 1),
    "fma-fp64": ("LatentFma<double>", torch.float64, 1),
    "fma-bf16": ("LatentFma<Bf16>", torch.bfloat16, 1),
}
# heads, q_len, dim, v_dim, lengths, capacity, block size (0: dense), splits, options
CASES = [
    (70, 1, 576, 512, (83, 0), 90, 0, 1, {}),
    (5, 3, 64, 48, (70, 2), 75, 0, 3, {}),
    (20, 2, 96, 40, (101, 33), 128, 16, 2, {}),
    (3, 4, 40, 40, (90, 61), 96, 24, 2, {"window_size": (20, -1), "prefix_length": 11}),
    (3, 5, 56, 32, (77, 3), 80, 0, 2, {"softcap": 1.5, "sinks": 2, "alibi_slopes": 2}),
    (2, 3, 72, 64, (66, 40), 70, 10, 1, {"is_causal": False, "window_size": (9, 4), "attn_mask": torch.bool}),
    (4, 3, 64, 32, (50, 45), 64, 0, 2, {"attn_mask": torch.float32, "sinks": 1}),
    (2, 1, 64, 32, (45, 20), 64, 0, 1, {"attn_mask": None}),  # in the dtype of query
    (66, 1, 544, 480, (200, 65), 210, 48, 2, {"softcap": 2.0, "sinks": 1, "alibi_slopes": 1}),
    (9, 1, 576, 512, (200, 30), 200, 0, 2, {"window_size": (70, -1), "prefix_length": 3}),
    (4, 2, 576, 512, (400, 129), 400, 0, 1, {"is_causal": False}),
    (3, 3, 528, 512, (130, 70), 130, 0, 1, {"nan": True}),  # the last key is NaN, and the last row alone sees it
    (3, 2, 64, 32, (40, 17), 40, 0, 1, {"nan": True}),
    (5, 3, 576, 512, (333, 150), 340, 0, 1, {"window_size": (100, -1), "prefix_length": 2}),
    (3, 2, 64, 32, (50, 45), 64, 0, 2, {"attn_mask": "both ends"}),  # of the range
    (20, 1, 96, 40, (45, 17), 48, 1, 2, {"is_causal": False, "sinks": 2}),  # tokens that indices name
    # groups of blocks, 5: the fourth has the end of a sequence, a whole one and the begin of one
    (66, 1, 576, 512, (450, 0, 30), 450, 0, 4, {}),
    (9, 1, 576, 512, (600, 0, 300), 600, 24, 5, {"sinks": 2}),
    (2, 3, 576, 512, (64, 200, 128, 0, 65), 200, 0, 2, {}),
]


def served(kernel, case):
    """Hopper's kernel reads no masks, and it alone has groups of blocks; ordinary arithmetic takes long for large
    sizes."""
    if case in CASES[-3:]:
        return kernel == "sm90-bf16"
    if kernel.startswith("fma"):
        return case[2] < 500 or (kernel == "fma-fp32" and case is CASES[9])
    return kernel != "sm90-bf16" or (case[2] > 500 and "attn_mask" not in case[-1])


MMA = [
    (
        "a tile read before it landed",
        "ptx::cp_async_wait<0>();\n      __syncthreads();",
        "__syncthreads();",
    ),
    ("a tile refilled while others read it", "@tile_landed", ""),
    ("maxima of their own", "fmaxf(tops[row + 8 * h], tops[kRows + row + 8 * h])", "tops[half * kRows + row + 8 * h]"),
    ("weights read before they are written", "@weights_complete", ""),
    ("the other half's columns", "column / 8 + lane / 16", "j * 2 + lane / 16"),
    ("rows past the end are written", "      if (i >= task.rows) continue;\n", ""),
    ("blocks of another sequence", "place_of(task, sequence, part.batch, tile", "place_of(task, sequence, 0, tile"),
    ("a hidden value leaks", "guarded_mma<T>(", "pair_mma<T>("),
]
FMA = [
    ("a tile refilled while others read it", "@tile_read", ""),
    ("one slice's products", "product += ptx::shfl_xor(product, w)", "product += Real(0)"),
    ("rows exchanged", "const DecodeRow<Real>& r = rows[i / 2];", "const DecodeRow<Real>& r = rows[i % 2];"),
    ("a hidden value leaks", "guarded && weight == Real(0)", "false && weight == Real(0)"),
]
BYTES = [
    ("numbers before they are expanded", "@expanded", ""),
    ("keys without their scale", "*= own_scales[i / 4 * 8 + i % 2];", "*= 1.f;"),
    ("weights without their scale", "(own_scales[j * 8 + e] * inverse)", "1.f"),
    ("a unit that does not move", "shrink[h] *= moved;", "shrink[h] *= 1.f;"),
    ("scales of the other tile", "scales[stage * kKeys + lane]", "scales[(stage ^ 1) * kKeys + lane]"),
]
SM90 = [
    ("the rotary part used before it landed", "ptx::mbarrier_wait(full(smem, own, kRotary), phase);", ""),
    ("columns used before they landed", "ptx::mbarrier_wait(full(smem, own, quarter), phase);", ""),
    ("columns refilled without waiting", "ptx::mbarrier_wait(empty(smem, own, q), phase ^ 1);", ""),
    (
        "the rotary part refilled without waiting",
        "ptx::mbarrier_wait(empty(smem, own, kRotary), phase ^ 1);",
        "",
    ),
    (
        "copies that wgmma cannot see",
        "ptx::cp_async_wait<0>();\n      ptx::fence_proxy_async();\n      ptx::mbarrier_arrive",
        "ptx::cp_async_wait<0>();\n      ptx::mbarrier_arrive",
    ),
    (
        "a quarter full when the one before it is",
        "ptx::cp_async_wait<0>();\n      ptx::fence_proxy_async();\n      ptx::mbarrier_arrive",
        "ptx::fence_proxy_async();\n      ptx::mbarrier_arrive",
    ),
    ("scores before they are there", "ptx::wgmma_wait<2>();", "ptx::wgmma_wait<3>();"),
    ("weights that wgmma cannot see", "ptx::fence_proxy_async();\n      __syncwarp();", "__syncwarp();"),
    ("weights counted before all lanes have written", "@weights_written", ""),
    ("the other's weights before they are there", "ptx::mbarrier_wait(weighed(smem, own ^ 1), phase);", ""),
    ("the other's weights of the turn before", "own ? phase : phase ^ 1", "phase"),
    ("outputs not brought to the other's maximum", "move(theirs_at);", "top[0] = theirs_at[0], top[1] = theirs_at[1];"),
    (
        "columns released before their products are done",
        "ptx::wgmma_wait<1>();\n      release(own, 2 * own);",
        "release(own, 2 * own);",
    ),
    ("the other's released before they are done", "@other_read", "ptx::wgmma_wait<2>();"),
    ("the query before it is there", "@query_there", ""),
    ("sums before they are there", "@all_multiplied", ""),
    ("turns that begin anew with each sequence", "turn = (turn + again.last - again.first) & 3;", ""),
    (
        "the last tile not released",
        "      release(own ^ 1, 2 * own);\n      release(own ^ 1, 2 * own + 1);\n    }",
        "    }",
    ),
    ("parts taken for results", "if (range.slot >= 0)", "if (false)"),
    ("sequences of others", "batch <= share.end.batch && ", ""),
    ("the last tile left to the other", "if (n == part.last && n > part.first)", "if (false)"),
    ("a hidden value leaks", "if (guarded(n)) guard(base, own, own);", ""),
    ("a hidden value of the other's tile leaks", "if (guarded(n)) guard(base, own, own ^ 1);", ""),
    ("one place for what both tiles hold", "4 * (2 * own + tile)", "4 * 2 * own"),
    (
        "zeros that wgmma cannot see",
        "ptx::fence_proxy_async();\n    ptx::bar_sync(2 + own, 128);",
        "ptx::bar_sync(2 + own, 128);",
    ),
]
MERGE = [
    ("parts against their own maxima", "part_weight(own.x, all.top, exponent);", "1.f;"),
    ("the last part left out", "- slot0 / 2 + 1;", "- slot0 / 2;"),
    ("the first part is its group's first", "part == 0 ? slot0 :", ""),
    ("parts of whole sequences", "  if (slot0 < 0) return;\n", ""),
    ("rows of another tile", "i / tile_rows) * tile_rows", "0) * tile_rows"),
]
SHARES = [
    ("a sequence without keys left out", "first < last || tiles == 0;", "first < last;"),
    ("the end of a sequence not noted", "if (ends) task", "if (ends && first == 0) task"),
    ("two parts in one place", "2 * share.group + (batch != share.begin.batch);", "2 * share.group;"),
]
FAULTS = [("mma-fp16", "decode/latent_mma.cuh", *fault) for fault in MMA]
FAULTS += [("fma-fp32", "decode/latent_fma.cuh", *fault) for fault in FMA]
FAULTS += [("mma-fp16-e4m3", "decode/latent_mma.cuh", *fault) for fault in BYTES]
SCALE = ("a hidden key's scale leaks", "x == 0.f ? 0.f : x * (own", "x * (own")  # of int8, which has no other NaN
FAULTS.append(("mma-bf16-int8", "decode/latent_mma.cuh", *SCALE))
FAULTS += [("sm90-bf16", "sm90/latent.cuh", *fault) for fault in SM90]
FAULTS += [("sm90-bf16", "decode/ragged_merge.cuh", *fault) for fault in MERGE]
FAULTS += [("sm90-bf16", "decode/ragged_shares.cuh", *fault) for fault in SHARES]


def program(kernel):
    function = {"mma": "latent_mma", "fma": "latent_fma", "sm90": "sm90_latent"}[kernel.split("-")[0]]
    flags = ["BYTES"] * (kind_of(kernel) is not None) + ["SHARES_ALL"] * (function == "sm90_latent")
    return ("latent", (f"KERNEL={KERNELS[kernel][0]}", f"FUNCTION={function}", *flags))


def kind_of(kernel):
    """The dtype of the kernel's caches, None: that of the query."""
    return {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}.get(kernel.split("-")[-1])


def tensors_of(case, dtype, multiple):
    """query, latents (batch, capacity, dim), the options of a call. Key 3 is hidden by a mask."""
    heads, q_len, dim, v_dim, lengths, capacity, _, _, options = case
    if multiple == 1 and dim < 576:  # any sizes
        dim, v_dim = dim - 3, v_dim - 3
    dim, v_dim = dim + -dim % multiple, v_dim + -v_dim % multiple
    batch = len(lengths)
    query = random_tensor((batch, heads, q_len, dim), dtype, outliers=False)
    latent = random_tensor((batch, capacity, dim), dtype, 1, outliers=False)
    options = {name: x for name, x in options.items() if name != "nan"}
    for i, name in enumerate(("sinks", "alibi_slopes")):
        if name in options:
            shape = (heads,) if options[name] == 1 else (batch, heads)
            options[name] = random_tensor(shape, torch.float32, 2 + i, outliers=False)
            if name == "alibi_slopes":
                options[name] = options[name].abs() / 8
    if "attn_mask" in options:
        kind = options["attn_mask"] or dtype
        mask = random_tensor((batch, 1, q_len, capacity), torch.float32, 5, outliers=False)
        mask[..., 3] = -2
        hidden = mask < -1.2
        if kind == "both ends":
            kind = torch.promote_types(dtype, torch.float32)
            mask = torch.where(mask > 0, 0.9, -0.95).double() * torch.finfo(torch.float32).max
        options["attn_mask"] = mask > -1 if kind == torch.bool else mask.to(kind).masked_fill(hidden, -torch.inf)
    return query, latent, v_dim, options


def expected_of(query, latent, unrounded, v_dim, lengths, options, scale):
    """(plain, rounding, exact) for each sequence. unrounded: the latents before they take the dtype of query."""
    results = []
    for b, length in enumerate(lengths):
        given = {"scale": scale, "enable_gqa": True, "causal_alignment": "bottom_right", "is_causal": True} | options
        given["prefix_length"] = min(given.get("prefix_length", 0), length)
        mask = given.pop("attn_mask", None)
        for name in ("sinks", "alibi_slopes"):
            if name in given and given[name].dim() == 2:
                given[name] = given[name][b]
        key = latent[b, None, :length]
        inputs = (query[b], key, key[..., :v_dim], None if mask is None else mask[b, ..., :length])
        grad_out = torch.zeros(*query.shape[1:3], v_dim, dtype=query.dtype)
        plain, rounding = plain_run(inputs, grad_out, **given)
        key = unrounded[b, None, :length]
        inputs = (query[b], key, key[..., :v_dim], inputs[3])
        results.append((plain, rounding, reference_run(inputs, grad_out, **given)))
    return results


def arguments_of(case, query, latent, v_dim, options, scale, kind=None):
    """The program's arguments and tensors; latents in rows of 8 numbers more than they have (16 bytes), NaN as are all
    that no row sees."""
    pad = 8 if kind is None else 16
    heads, q_len, _, _, lengths, capacity, block_size, splits, _ = case
    dim, batch = query.shape[3], len(lengths)
    left, right = options.get("window_size", (-1, -1))
    if options.get("is_causal", True):
        right = 0
    arguments = dict(batch=batch, heads=heads, q_len=q_len, dim=dim, v_dim=v_dim, capacity=capacity, splits=splits)
    arguments |= dict(left=left, right=right, prefix=options.get("prefix_length", 0), scale=round(1000 * scale))
    arguments |= dict(softcap=round(1000 * options.get("softcap", 0)), pitch=dim + pad, block_size=block_size)
    latent = latent.clone()
    if "attn_mask" in options:
        latent[:, 3] = torch.nan
    for b, length in enumerate(lengths):
        latent[b, length:] = torch.nan
        if "nan" in case[-1]:
            latent[b, length - 1] = torch.nan
    stored = torch.nn.functional.pad(latent, (0, pad), value=torch.nan)
    table, blocks, width = None, 0, 0
    if block_size:
        width = -(-capacity // block_size)
        blocks = batch * width + 1
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(4)).tolist()
        pool = stored.new_full((blocks, block_size, dim + pad), torch.nan)
        table = torch.full((batch, width), -7, dtype=torch.int32)
        for b, length in enumerate(lengths):
            for j in range(0, length, block_size):
                table[b, j // block_size] = block = order.pop()
                pool[block, : min(block_size, capacity - j)] = stored[b, j : j + block_size]
        stored = pool
    arguments |= dict(blocks=blocks, max_blocks=width, sinks="sinks" in options, slopes="alibi_slopes" in options)
    arguments["bytes"] = 0
    scales = []
    if kind is not None:
        arguments["bytes"] = 1 + (kind == torch.float8_e4m3fn)
        bytes_, factors = reference.quantize(stored[..., :dim], kind)
        stored = torch.nn.functional.pad(bytes_.view(torch.uint8), (0, pad), value=0x7F)
        scales = [factors]
    tensors = [query, stored, *scales, torch.tensor(lengths)] + ([] if table is None else [table])
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    for name in ("sinks", "alibi_slopes"):
        if name in options:
            tensors.append(options[name].to(wide).expand(batch, heads))
    mask = options.get("attn_mask")
    strides = (0,) * 4
    arguments |= dict(mask=0, mask_count=0)
    if mask is not None:
        arguments["mask"] = 1 if mask.dtype == torch.bool else 3 if mask.dtype == query.dtype else 2
        arguments["mask_count"] = mask.numel()
        strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride())]
        tensors.append(mask)
    return arguments | dict(zip(("mask_batch", "mask_head", "mask_row", "mask_col"), strides)), tensors


def check(executable, kernel, case, order):
    _, dtype, multiple = KERNELS[kernel]
    heads, q_len, _, _, lengths, *_ = case
    scale = 0.07
    query, latent, v_dim, options = tensors_of(case, dtype, multiple)
    kind = kind_of(kernel)
    arguments, tensors = arguments_of(case, query, latent, v_dim, options, scale, kind)
    unrounded = latent
    if kind is not None:
        latent, unrounded = (reference.dequantize(*reference.quantize(latent, kind), t) for t in (dtype, torch.float64))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = (len(lengths), heads, q_len)
    outputs = [((*shape, v_dim), dtype), (shape, wide)]
    results, _ = run.run(executable, tensors, outputs, arguments | run.order_arguments(order))
    for b, (plain, rounding, exact) in enumerate(expected_of(query, latent, unrounded, v_dim, lengths, options, scale)):
        rows = q_len - ("nan" in case[-1])
        for i, name in enumerate(("out", "lse")):
            what = f"{name} of sequence {b}"
            given = [x[:, :rows] for x in (results[i][b], plain[i], exact[i])]
            assert_close_to_reference(*given, name=what, rounding=rounding[i][:, :rows])
            if name == "out" and rows < q_len:
                assert results[i][b][:, rows:].isnan().all(), f"{what} hides a NaN"


def faulty(fault):
    kernel, file, _, *edit = fault
    return *program(kernel), build.Fault(file, *edit)


@pytest.fixture(scope="module")
def programs():
    requests = [program(kernel) for kernel in KERNELS]
    requests += [faulty(fault) for fault in FAULTS]
    build.build_all(requests)


@pytest.mark.parametrize("kernel", KERNELS)
def test_values(programs, kernel):
    for i, case in enumerate(CASES):
        if not served(kernel, case):
            continue
        order = run.ORDER_NAMES[(i + list(KERNELS).index(kernel)) % len(run.ORDER_NAMES)]
        with run.named(f"{case}, order {order}"):
            check(build.program(*program(kernel)), kernel, case, order)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]} {fault[2]}")
def test_faults_are_found(programs, fault):
    kernel = fault[0]
    executable = build.program(*faulty(fault))
    cases = [*CASES[11:8:-1], CASES[13], *CASES[:-4:-1]] if kernel == "sm90-bf16" else [*CASES[1:7], CASES[9]]
    calls = [(case, order) for order in ("random", "reverse", "starve", "forward") for case in cases]
    assert is_noticed([partial(check, executable, kernel, *call) for call in calls], fault[2])

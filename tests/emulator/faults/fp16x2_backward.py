"""Faults in the backward of float32 on planes of halves; as faults/attention.py."""

SPLIT, PASSES = "fp32/fp16x2_backward.cuh", "fp32/fp16x2_backward_passes.cuh"

ALL = [
    ("tiles used before they landed", SPLIT, "ptx::cp_async_wait<0>();", ""),
    ("dS read before it is complete", SPLIT, "@scores_complete", ""),
    ("dO overwritten while it is read", SPLIT, "@grad_out_read", "__syncwarp();"),
    ("dS overwritten while it is read", SPLIT, "@tiles_landed", "__syncwarp();"),
    ("low half of keys forgotten", SPLIT, "small[n], a_low, b_high[2 * n]", "small[n], a_high, b_high[2 * n]"),
    ("low half of queries forgotten", SPLIT, "a_high, b_low[2 * n], b_low", "a_high, b_high[2 * n], b_low"),
    ("low halves as large as they are", SPLIT, "q % 2 * 2 + 1] * scale, kLowFactor)", "q % 2 * 2 + 1] * scale, 1.f)"),
    (
        "dS times a power of two of the warp alone",
        SPLIT,
        "max(max(parts.x, parts.y), max(parts.z, parts.w))",
        "largest",
    ),
    ("dS beyond halves", SPLIT, "split(f, ds, power.scale());", "split(f, ds, 16 * power.scale());"),
    ("mask off by one tile", SPLIT, "at.tile * Rows + Rows > range.whole_end", "at.tile * Rows > range.whole_end"),
    ("next head forgotten", SPLIT, "Place{at.pair + 1, range.first}", "Place{at.pair, range.first}"),
    ("scale of the first rows for all", SPLIT, "at.tile / (Fp16x2Size<D>::kRows / Rows)", "0"),
    ("turns of one row", SPLIT, "at.tile = tile;\n", ""),
    ("keys past the end written", SPLIT, "if (key >= kv_len) continue;", ""),
    ("gradients of lse that are not finite not counted", PASSES, "!is_finite(delta)", "false"),
    ("small columns not counted", PASSES, "r.columns = is_row || !second;", "r.columns = false;"),
    ("gradients as values", PASSES, "is_row && second ? 127 - 88 : 127 - 32", "127 - 32"),
    ("blocks of Fp32Backward left out", "fp32/backward.cuh", "block += gridDim.x", "block += 2 * gridDim.x"),
    ("tiles of Fp32Backward overwritten while they are read", "fp32/backward.cuh", "@tiles_read", ""),
]

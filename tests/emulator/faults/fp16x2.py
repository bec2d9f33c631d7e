"""Faults in the kernels of float32 on Hopper; as faults/attention.py."""

PLANES, SPLIT = "fp32/fp16x2_planes.cuh", "sm90/fp16x2_forward.cuh"

PREPARE = [
    ("numbers that are not finite not counted", PLANES, "most >> 23 > exponent;", "false;"),
    ("small rows not counted", PLANES, "needs_fallback = needs_fallback || small(rows[i]);", ";"),
    ("small columns not counted", PLANES, "needs_fallback || (r.columns && small(columns[e]))", "needs_fallback"),
    ("rows past a length are read", PLANES, "row < r.end && column < r.dim", "row < r.length && column < r.dim"),
    ("columns past head_dim are read", PLANES, "row < r.end && column < r.dim", "row < r.end"),
    ("maxima read before they are written", PLANES, "= most;\n  __syncthreads();", "= most;"),
    ("half of a warp's rows left out", PLANES, "if (kLanes < 32) most =", "if (kLanes < 16) most ="),
    ("low halves of values as large as they are", PLANES, "is_value ? kLowFactor : 1.f", "1.f"),
]

FORWARD = [
    ("K used before it landed", SPLIT, "ptx::mbarrier_wait(barriers.k_full + 8 * stage, phase);", ""),
    ("V used before it landed", SPLIT, "ptx::mbarrier_wait(barriers.v_full + 8 * stage, phase);", ""),
    ("K never released", SPLIT, "release(barriers.k_empty + 8 * stage);", ""),
    ("Q never released", SPLIT, "if (after < 0) release_q();", ""),
    (
        "K and Q released before they are read",
        SPLIT,
        """        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kSlices; i++) ptx::keep(slices[i]);
        release(barriers.k_empty + 8 * stage);
        if (after < 0) release_q();
""",
        """        release(barriers.k_empty + 8 * stage);
        if (after < 0) release_q();
        ptx::wgmma_wait<0>();
""",
    ),
    (
        "V released before it is read",
        SPLIT,
        """        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kParts; i++) ptx::keep(sum[i]);
        release(barriers.v_empty + 8 * stage);
""",
        "        release(barriers.v_empty + 8 * stage);\n        ptx::wgmma_wait<0>();\n",
    ),
    (
        "scores read before they are there",
        SPLIT,
        "        ptx::wgmma_wait<0>();\n#pragma unroll\n        for (int i = 0; i < kSlices",
        "#pragma unroll\n        for (int i = 0; i < kSlices",
    ),
    ("turns never passed on", SPLIT, "        token_pass();\n        const float4", "        const float4"),
    ("low half of Q forgotten", SPLIT, "at + kSlices * kQueryPanel, to, true", "at, to, true"),
    ("low half of K forgotten", SPLIT, "at, to + kSlices * kKeyPanel, true", "at, to, true"),
    ("low half of P forgotten", SPLIT, "low[kk][q] = x.low;", "low[kk][q] = 0u;"),
    ("low half of V forgotten", SPLIT, "v + kLow + kk * kStep, true", "v + kk * kStep, true"),
    ("sums of the last tile go on", SPLIT, "v + kk * kStep, kk > 4 * i", "v + kk * kStep, true"),
    ("second slice left out", SPLIT, "scores_[e] += slices[i][e];", ";"),
    ("change of the values' scale forgotten", SPLIT, "soft.alpha[1] *= unit * scale.y;", ""),
    ("scale of the first rows for all", SPLIT, "(slot.row + 64 * group) / Fp16x2Size<D>", "slot.row / Fp16x2Size<D>"),
    ("key heads by remainder", SPLIT, "slot.head / task.group)", "slot.head % planes.kv_heads)"),
    (
        "mask off by one tile",
        SPLIT,
        "n < slot.tiles.whole_begin || n >= slot.tiles.whole_end",
        "n > slot.tiles.whole_end",
    ),
    ("output not rescaled", SPLIT, "out[e] * soft.alpha[e >> 1 & 1] +", "out[e] +"),
    ("rows past the end are written", SPLIT, "if (r >= task.q_len) continue;", ""),
    ("rows that see nothing not written", SPLIT, "write_zeros(r0, t, slot, task);", ""),
    ("tiles of others not passed over", SPLIT, "k < start; k++, count++", "k < start; k++"),
    ("left to Fp32Forward never", "fp32/forward.cuh", "if (*needs_fallback == 0) return;", "return;"),
]

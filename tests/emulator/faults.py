"""Faults that the emulator has to find: (what, file in csrc/cuda/kernels, text there, text instead of it)."""

SM80_FORWARD = [
    ("K read before its copy landed", "sm80_forward.cuh", "ptx::cp_async_wait<0>();  // K (and Q)", "// K (and Q)"),
    ("V read before its copy landed", "sm80_forward.cuh", "ptx::cp_async_wait<0>();  // V has landed", ""),
    (
        "no barrier between reading K and refilling it",
        "sm80_forward.cuh",
        "__syncthreads();          // all warps",
        "//",
    ),
    (
        "no barrier between reading V and refilling it",
        "sm80_forward.cuh",
        "__syncthreads();          // and every",
        "//",
    ),
    ("columns of K in the wrong order", "sm80_forward.cuh", "lane % 8 + lane / 16 * 8, kk", "lane % 16, kk"),
    (
        "halves of a fragment exchanged",
        "sm80_forward.cuh",
        "(s[2 * j], qf[at], b[0], b[1])",
        "(s[2 * j], qf[at], b[0], b[2])",
    ),
    (
        "misaligned row of V",
        "sm80_forward.cuh",
        "j * 2 + lane / 16));\n          ptx::mma_m16n8k16<T>(acc[2 * j],",
        "j * 2 + lane / 16) + 8);\n          ptx::mma_m16n8k16<T>(acc[2 * j],",
    ),
    ("mask off by one", "sm80_forward.cuh", "col > r + p.offset))", "col > r + p.offset + 1))"),
    (
        "only the last tile is masked",
        "sm80_forward.cuh",
        "n0 + kKeys > p.kv_len || (Causal && n0 + kKeys - 1 > row0 + warp * 16 + p.offset)",
        "n == tiles - 1",
    ),
    ("keys past the end are read", "sm80_forward.cuh", "row0 + row < rows && chunk * 8 < dim", "chunk * 8 < dim"),
    ("columns past head_dim are read", "sm80_forward.cuh", "row0 + row < rows && chunk * 8 < dim", "row0 + row < rows"),
    ("rows past the end are written", "sm80_forward.cuh", "row0 + r < p.q_len && chunk", "chunk"),
    ("output read before the warp wrote it", "sm80_forward.cuh", "    __syncwarp();\n", ""),
    ("sum not rescaled", "sm80_forward.cuh", "row_sum[h] *= alpha;", ""),
    (
        "key heads by remainder instead of quotient",
        "sm80_forward.cuh",
        "where.head / p.group",
        "where.head % (p.q_heads / p.group)",
    ),
    ("one key tile too few", "forward_task.cuh", "+ p.offset + Keys - 1) / Keys", "+ p.offset - 1) / Keys"),
]

SM90_FORWARD = [
    ("K refilled without waiting", "sm90_forward_producer.cuh", "ptx::mbarrier_wait(b.k_empty", "(void)(b.k_empty"),
    ("V refilled without waiting", "sm90_forward_producer.cuh", "ptx::mbarrier_wait(b.v_empty", "(void)(b.v_empty"),
    ("Q refilled without waiting", "sm90_forward_producer.cuh", "ptx::mbarrier_wait(b.q_empty", "(void)(b.q_empty"),
    ("K used before it landed", "sm90_forward.cuh", "ptx::mbarrier_wait(b.k_full", "(void)(b.k_full"),
    ("V used before it landed", "sm90_forward.cuh", "ptx::mbarrier_wait(b.v_full", "(void)(b.v_full"),
    (
        "output read before its products are done",
        "sm90_forward.cuh",
        "const bool moved = softmax();\n        ptx::wgmma_wait<0>();",
        "const bool moved = softmax();",
    ),
    ("Q never released", "sm90_forward.cuh", "release(b.q_empty + 8 * query_stage());", ""),
    (
        "Q released while others still read their slot",
        "sm90_forward.cuh",
        "      __syncwarp();\n      release(b.q_empty",
        "      release(b.q_empty",
    ),
    ("TMA reads the output without a proxy fence", "sm90_forward_output.cuh", "    ptx::fence_proxy_async();\n", ""),
    (
        "output staged while TMA still reads it",
        "sm90_forward_output.cuh",
        "if (lane == 0) ptx::bulk_wait_read<0>();  // the last",
        "//",
    ),
    (
        "8 columns never written",
        "sm90_forward_output.cuh",
        "for (int j = 0; j < S::kDv / 8; j++)\n        *reint",
        "for (int j = 1; j < S::kDv / 8; j++)\n        *reint",
    ),
    ("mask off by one", "sm90_forward.cuh", "row0 + r0 + r + p.offset + 1)", "row0 + r0 + r + p.offset + 2)"),
    (
        "border tile not masked",
        "sm90_forward_producer.cuh",
        "row + p.offset + 1)) : p.kv_len) / S::kKeys",
        "row + p.offset + 1)) : p.kv_len) / S::kKeys + 1",
    ),
    (
        "probabilities of the last reference",
        "sm90_forward.cuh",
        "o[e] *= soft.alpha[e >> 1 & 1]",
        "o[e] *= soft.alpha[e & 1]",
    ),
    (
        "transaction count too small",
        "sm90_forward_producer.cuh",
        "(b.v_full + 8 * s, S::kValueBytes)",
        "(b.v_full + 8 * s, S::kValueBytes - 128)",
    ),
    (
        "the counter stays as it is",
        "sm90_forward_producer.cuh",
        "ptx::atomic_add(p.counter, 0u - uint32_t(p.total));",
        "",
    ),
    (
        "key heads by remainder instead of quotient",
        "sm90_forward_producer.cuh",
        "head_k = t.head / p.group",
        "head_k = t.head % (p.q_heads / p.group)",
    ),
]

# Leaving out the wait for a free Q stage alone is no fault: the wait for dO's stage implies it.
SM90_BACKWARD = [
    ("dS read without a proxy fence", "sm90_backward.cuh", "df[kk]);\n    ptx::fence_proxy_async();", "df[kk]);"),
    (
        "no wait for the other warpgroup's dS",
        "sm90_backward.cuh",
        "ptx::bar_sync(4 + 2 * (it & 1) + (group ^ 1), 256);",
        "",
    ),
    ("one pair of barriers for dS", "sm90_backward.cuh", "every 4 + 2 * (it & 1)", "4"),
    ("dO refilled without waiting", "sm90_backward.cuh", "ptx::mbarrier_wait(m.do_empty + 8 * ds, dop);", ""),
    (
        "dO released before its products are done",
        "sm90_backward.cuh",
        "ptx::wgmma_wait<0>();  // dV, dK",
        "ptx::wgmma_wait<2>();  // dV, dK",
    ),
    (
        "dO always waited for in phase 0",
        "sm90_backward.cuh",
        "ptx::mbarrier_wait(m.do_full + 8 * ds, dop);",
        "ptx::mbarrier_wait(m.do_full + 8 * ds, 0);",
    ),
    ("one dS tile instead of two", "sm90_backward.cuh", "m.ds + (it & 1) * S::kScoreBytes", "m.ds"),
    ("mask off by one", "sm90_backward.cuh", "n > row + p.offset)) s[i]", "n > row + p.offset + 1)) s[i]"),
    ("K and V used before they landed", "sm90_backward.cuh", "ptx::mbarrier_wait(m.kv_full, 0);", ""),
    ("rows without a key not marked", "backward_passes.cuh", "lse == -INFINITY ? INFINITY", "false ? INFINITY"),
    (
        "transaction count without the statistics",
        "sm90_backward.cuh",
        "(bar, S::kQueryBytes + S::kRows * 4)",
        "(bar, S::kQueryBytes)",
    ),
    (
        "stage released while others still read it",
        "sm90_backward.cuh",
        "    __syncwarp();\n    if (lane == 0) ptx::mbarrier_arrive(bar);",
        "    if (lane == 0) ptx::mbarrier_arrive(bar);",
    ),
    (
        "halves of dS exchanged in dQ",
        "sm90_backward.cuh",
        "group * (S::kKeyPanel / 16) : 0",
        "(group ^ 1) * (S::kKeyPanel / 16) : 0",
    ),
]

SM80_BACKWARD = [
    ("gradient of lse forgotten", "backward_passes.cuh", "sum -= p.grad_lse[stat]", "sum -= 0"),
    ("stage read before its copy landed", "sm80_backward.cuh", "ptx::cp_async_wait<0>();", ""),
    ("P and dS read before they are complete", "sm80_backward.cuh", "__syncthreads();  // P and dS", "//"),
    ("stage refilled while others read it", "sm80_backward.cuh", "__syncthreads();  // this stage", "//"),
    ("mask off by one", "sm80_backward.cuh", "n > m + p.offset)) s[i]", "n > m + p.offset + 1)) s[i]"),
    (
        "first query tile left out",
        "backward_task.cuh",
        "t.key_tile * Keys - p.offset) / Rows",
        "t.key_tile * Keys + Keys - p.offset) / Rows",
    ),
    ("delta left out", "sm80_backward.cuh", "(dp[i][j][e] - (e & 1 ? delta.y : delta.x))", "dp[i][j][e]"),
]

"""Faults that the emulator has to find: (what, file in csrc/cuda/kernels, text there, text instead of it)."""

SM80_FORWARD = [
    ("K read before its copy landed", "sm80/forward.cuh", "@key_landed", ""),
    ("V read before its copy landed", "sm80/forward.cuh", "@value_landed", ""),
    ("no barrier between reading K and refilling it", "sm80/forward.cuh", "@key_read", ""),
    ("no barrier between reading V and refilling it", "sm80/forward.cuh", "@value_read", ""),
    ("columns of K in the wrong order", "sm80/forward.cuh", "at % 8 + at / 16 * 8, kk", "at % 16, kk"),
    (
        "halves of a fragment exchanged",
        "sm80/forward.cuh",
        "(s[2 * j], qf[held], b[0], b[1])",
        "(s[2 * j], qf[held], b[0], b[2])",
    ),
    (
        "misaligned row of V",
        "sm80/forward.cuh",
        "value_fragment(b, kk, j, at);",
        "ptx::ldmatrix_x4_trans(b, chunk_at<kDv>(sv, kk * 16 + at % 16, j * 2 + at / 16) + 8);",
    ),
    ("mask off by one", "sm80/forward.cuh", "keys.hides(j * 8 + e)", "keys.hides(j * 8 + e) && j * 8 + e != keys.end"),
    (
        "only the last tile is masked",
        "sm80/forward.cuh",
        "bool border = !own.whole(n);",
        "bool border = n + 1 == tiles.end;",
    ),
    ("keys past the end are read", "sm80/forward.cuh", "row0 + row < rows && chunk * 8 < dim", "chunk * 8 < dim"),
    ("columns past head_dim are read", "sm80/forward.cuh", "row0 + row < rows && chunk * 8 < dim", "row0 + row < rows"),
    ("rows past the end are written", "sm80/forward.cuh", "row0 + r < sequence.rows && chunk", "chunk"),
    ("output read before the warp wrote it", "sm80/forward.cuh", "    __syncwarp();\n", ""),
    ("sum not rescaled", "sm80/forward.cuh", "row_sum[h] *= alpha;", ""),
    (
        "key heads by remainder instead of quotient",
        "sm80/forward.cuh",
        "where.head / p.group",
        "where.head % (p.q_heads / p.group)",
    ),
    (
        "one key tile too few",
        "common/sequence.cuh",
        "t.end = (t.key_end + Keys - 1) / Keys",
        "t.end = t.key_end / Keys",
    ),
    ("prefix forgotten", "common/sequence.cuh", "t.prefix = min(t.begin,", "t.prefix = min(0,"),
    (
        "window starts one key late",
        "sm80/forward.cuh",
        "keys.hides(j * 8 + e)",
        "keys.hides(j * 8 + e) || j * 8 + e == keys.begin",
    ),
    ("own lengths forgotten", "common/sequence.cuh", "if (p.bottom_right) s.keys.offset = k_len - s.q_len;", ""),
]

SM90_FORWARD = [
    (
        "K refilled without waiting",
        "sm90/forward_producer.cuh",
        "ptx::mbarrier_wait(barriers.k_empty",
        "(void)(barriers.k_empty",
    ),
    (
        "V refilled without waiting",
        "sm90/forward_producer.cuh",
        "ptx::mbarrier_wait(barriers.v_empty",
        "(void)(barriers.v_empty",
    ),
    (
        "Q refilled without waiting",
        "sm90/forward_producer.cuh",
        "ptx::mbarrier_wait(barriers.q_empty",
        "(void)(barriers.q_empty",
    ),
    ("K used before it landed", "sm90/forward.cuh", "ptx::mbarrier_wait(barriers.k_full", "(void)(barriers.k_full"),
    ("V used before it landed", "sm90/forward.cuh", "ptx::mbarrier_wait(barriers.v_full", "(void)(barriers.v_full"),
    ("output read before its products are done", "sm90/forward.cuh", "@output_done", ""),
    ("Q never released", "sm90/forward.cuh", "release(barriers.q_empty + 8 * query_stage());", ""),
    ("Q released while others still read their slot", "sm90/forward.cuh", "@slot_read", ""),
    ("TMA reads the output without a proxy fence", "sm90/forward_output.cuh", "    ptx::fence_proxy_async();\n", ""),
    ("output staged while TMA still reads it", "sm90/forward_output.cuh", "@output_stored", ""),
    (
        "8 columns never written",
        "sm90/forward_output.cuh",
        "for (int j = 0; j < Shape::kDv / 8; j++)\n        *reint",
        "for (int j = 1; j < Shape::kDv / 8; j++)\n        *reint",
    ),
    ("mask off by one", "sm90/forward_softmax.cuh", "(i & 1) >= (i & 2", "(i & 1) > (i & 2"),
    (
        "border tile not masked",
        "sm90/forward_producer.cuh",
        "slot.tiles.whole_end = own.whole_end;",
        "slot.tiles.whole_end = own.whole_end + 1;",
    ),
    (
        "probabilities of the last reference",
        "sm90/forward.cuh",
        "out[e] *= soft.alpha[e >> 1 & 1]",
        "out[e] *= soft.alpha[e & 1]",
    ),
    (
        "transaction count too small",
        "sm90/forward_producer.cuh",
        "(barriers.v_full + 8 * stage, Shape::kValueBytes)",
        "(barriers.v_full + 8 * stage, Shape::kValueBytes - 128)",
    ),
    (
        "the counter stays as it is",
        "sm90/forward_producer.cuh",
        "ptx::atomic_add(task.counter, 0u - uint32_t(task.total));",
        "",
    ),
    ("window not masked on the left", "sm90/forward_softmax.cuh", "keys.hides(j * 8 + e)", "j * 8 + e >= keys.end"),
    ("a lane still waits for a phase that comes again", "sm90/forward.cuh", "@lanes_met", ""),
    (
        "the tile below the window is taken for the prefix's",
        "sm90/forward.cuh",
        "next_tile = ptx::uniform(tiles.prefix) - 1;",
        "next_tile = key_tile - 1;",
    ),
    (
        "key heads by remainder instead of quotient",
        "sm90/forward_producer.cuh",
        "head_k = t.head / task.group",
        "head_k = t.head % (task.q_heads / task.group)",
    ),
]

_LOADS, _SHAPE = "sm90/forward_producer.cuh", "sm90/forward_shape.cuh"
SM90_CLUSTERS = [
    ("a block that begins before the other is there", _SHAPE, "@cluster_met", "__syncthreads();"),
    (
        "K brought to a block that still reads",
        _SHAPE,
        "k_empty + 8 * i, 4 * Shape::kGroups * Shape::kCluster",
        "k_empty + 8 * i, 4 * Shape::kGroups",
    ),
    (
        "V brought to a block that still reads",
        _SHAPE,
        "v_empty + 8 * i, 4 * Shape::kGroups * Shape::kCluster",
        "v_empty + 8 * i, 4 * Shape::kGroups",
    ),
    ("released to one block twice", "sm90/forward.cuh", "mbarrier_arrive_at(bar, rank)", "mbarrier_arrive_at(bar, 0)"),
    ("released to the first block alone", "sm90/forward.cuh", "rank < Shape::kCluster", "rank < 1"),
    ("both blocks bring the same half", _LOADS, "blockIdx.x % Shape::kCluster * kPart", "0"),
    ("halves exchanged", _LOADS, "head, row + first, batch", "head, row + kPart - first, batch"),
    ("a half that stays in its block", _LOADS, "(1u << Shape::kCluster) - 1", "1u << blockIdx.x % Shape::kCluster"),
    ("a block that ends before the other", _LOADS, "Loads::await_cluster();", ""),
    ("a block that ends before the other's last values", _LOADS, "wait_k();\n      wait_v(k_count);", "wait_k();"),
]

# Leaving out the wait for a free Q stage alone is no fault: the wait for dO's stage implies it.
SM90_BACKWARD = [
    ("dS read without a proxy fence", "sm90/backward.cuh", "df, part);\n    ptx::fence_proxy_async();", "df, part);"),
    (
        "no wait for the other warpgroup's dS",
        "sm90/backward.cuh",
        "ptx::bar_sync(4 + 2 * (it & 1) + (group ^ 1), 256);",
        "",
    ),
    ("one pair of barriers for dS", "sm90/backward.cuh", "every 4 + 2 * (it & 1)", "4"),
    ("dO refilled without waiting", "sm90/backward.cuh", "ptx::mbarrier_wait(memory.do_empty + 8 * ds, dop);", ""),
    ("dO released before its products are done", "sm90/backward.cuh", "@products_done", "ptx::wgmma_wait<2>();"),
    (
        "dO always waited for in phase 0",
        "sm90/backward.cuh",
        "ptx::mbarrier_wait(memory.do_full + 8 * ds, dop);",
        "ptx::mbarrier_wait(memory.do_full + 8 * ds, 0);",
    ),
    ("one dS tile instead of two", "sm90/backward.cuh", "memory.ds + (it & 1) * Shape::kScoreBytes", "memory.ds"),
    ("mask off by one", "sm90/backward.cuh", "if (x < begin ||", "if (x + 1 < begin ||"),
    ("K and V used before they landed", "sm90/backward.cuh", "ptx::mbarrier_wait(memory.kv_full, 0);", ""),
    (
        "transaction count without the statistics",
        "sm90/backward.cuh",
        "(bar, Panels * Shape::kQueryPanel + Shape::kRows * 4)",
        "(bar, Panels * Shape::kQueryPanel)",
    ),
    (
        "stage released while others still read it",
        "sm90/backward.cuh",
        "    __syncwarp();\n    if (lane == 0) ptx::mbarrier_arrive(bar);",
        "    if (lane == 0) ptx::mbarrier_arrive(bar);",
    ),
    (
        "halves of dS exchanged in dQ",
        "sm90/backward.cuh",
        "piece * (Shape::kKeyPanel / 16) : 0",
        "(piece ^ 1) * (Shape::kKeyPanel / 16) : 0",
    ),
]
SM90_BACKWARD += [
    (what, "sm90/backward_finish.cuh", old, new)
    for what, old, new in [
        ("dQ made one block early", "(task.key_tiles) - 1", "(task.key_tiles) - 2"),
        ("counted before the other threads have added", "ptx::bar_sync(1, 256);\n    if (tid", "if (tid"),
        ("counted without a fence before", "@counted_after", ""),
        ("sums read without a fence after the count", "ptx::thread_fence();\n    }", "}"),
        ("the count read before it is there", "}\n    ptx::bar_sync(1, 256);", "}"),
        ("the last rows of dQ left out", "(task.q_len + 7) / 8", "task.q_len / 8"),
        ("columns beyond head_dim written", " || at.chunk * 8 >= task.head_dim", ""),
    ]
]
SM90_BACKWARD += [("counters of blocks not cleared", "common/backward_passes.cuh", "p.query_blocks[pair] = 0;", ";")]

_PARTS = "sm90/backward_parts.cuh"
SM90_PARTS_BACKWARD = [
    ("scores read before they are done", _PARTS, "@scores_done", "ptx::wgmma_wait<1>();"),
    ("stages released before their products are done", _PARTS, "@products_done", "ptx::wgmma_wait<1>();"),
    (
        "no wait for the other warpgroup's dS",
        _PARTS,
        "ptx::bar_sync(4 + 2 * (it & 1) + (group ^ 1), 256);",
        "",
    ),
    ("one dS tile instead of two", _PARTS, "memory.ds + it % 2 * Shape::kScoreBytes", "memory.ds"),
    ("the first part's rows twice", "sm90/backward.cuh", "kQueryBytes + part * (kScoreRows * 128)", "kQueryBytes"),
    ("the first part's dO twice", "sm90/backward.cuh", "kOutBytes + part * (kScoreRows * 128)", "kOutBytes"),
    ("the first part's dS overwritten", "sm90/backward.cuh", "part * (kScoreRows / 8) + kk", "kk"),
    (
        "the first part's statistics twice",
        "sm90/backward.cuh",
        "const int row = stage * kRows + part * kScoreRows;",
        "const int row = stage * kRows;",
    ),
    ("mask of the first part", "sm90/backward.cuh", "at.tile * kRows + part * kScoreRows;", "at.tile * kRows;"),
    ("the last columns of dK left out", "sm90/backward.cuh", "if constexpr (K > kFirst)", "if constexpr (K < 0)"),
    (
        "the third piece added twice",
        "sm90/backward_shape.cuh",
        "piece == group : tile % 2 == group;",
        "piece == group : true;",
    ),
    ("Q refilled without waiting", "sm90/backward.cuh", "ptx::mbarrier_wait(memory.q_empty + 8 * qs, qp);", ""),
    ("rows of 256 columns cleared", "common/backward_passes.cuh", "if (c >= D / 8) return;", ""),
]
SM90_PARTS_DETERMINISTIC = [
    ("dQ staged while it is read", _PARTS, "if (Shape::kDeterministic && stored) ptx::bar_sync(8 + group, 160);", ""),
    (
        "the third piece in the place of another",
        "sm90/backward.cuh",
        "(Shape::kRows * Shape::kD) + piece * 4096,",
        "(Shape::kRows * Shape::kD) + half * 4096,",
    ),
]
NAN_SM90_PARTS_BACKWARD = [
    ("keys stay as they are", _PARTS, "if (Ranged) Guard::clean_keys(memory, smem);", ""),
    (
        "queries and dO stay as they are",
        _PARTS,
        "Guard::clean_queries(pf, memory, smem, query, out, part);",
        ";",
    ),
    ("one panel of keys stays", "sm90/backward_guard.cuh", "tile + i / 8 * Panel + row", "tile + i / 16 * Panel + row"),
    ("dO is not looked at", "sm90/backward_guard.cuh", " | not_finite_rows<Shape::kOutPanels>(out)", ""),
]

_COLUMNS = "sm90/backward_columns.cuh"
SM90_COLUMNS_BACKWARD = [
    ("scores read before they are done", _COLUMNS, "@scores_done", "ptx::wgmma_wait<1>();"),
    ("stages released before their products are done", _COLUMNS, "@products_done", "ptx::wgmma_wait<1>();"),
    ("P overwritten while the other warpgroup reads it", _COLUMNS, "@scores_read", ""),
    ("P and dS read before the other warpgroup wrote them", _COLUMNS, "@scores_written", ""),
    (
        "the other warpgroup's columns of Q and dO",
        "sm90/backward.cuh",
        "queries + group * (kHeld",
        "queries + (group ^ 1) * (kHeld",
    ),
    (
        "the first piece of dQ twice",
        _COLUMNS,
        "Base::issue_dq(dq[1], ds, 2 * group + 1);",
        "Base::issue_dq(dq[1], ds, 2 * group);",
    ),
    (
        "the other warpgroup's columns written",
        "sm90/backward.cuh",
        "Shape::kByColumns ? group * kChunks",
        "Shape::kByColumns ? (group ^ 1) * kChunks",
    ),
]
NAN_SM90_COLUMNS_BACKWARD = [
    ("half of a tile's rows stay as they are", _COLUMNS, "TileGuard::clean_rows_of(", "Guard::clean_rows_of("),
    ("marks of the first rows", _COLUMNS, "smem, group * Shape::kScoreRows);", "smem, 0);"),
]


SM80_BACKWARD = [
    ("gradient of lse forgotten", "common/backward_passes.cuh", "sum -= p.grad_lse[stat]", "sum -= 0"),
    ("stage read before its copy landed", "sm80/backward.cuh", "ptx::cp_async_wait<0>();", ""),
    ("P and dS read before they are complete", "sm80/backward.cuh", "@scores_complete", ""),
    ("stage refilled while others read it", "sm80/backward.cuh", "@stage_landed", ""),
    ("mask off by one", "sm80/backward.cuh", "if (x < begin ||", "if (x + 1 < begin ||"),
    (
        "first query tile left out",
        "common/backward_task.cuh",
        "first = some ? any.begin / Rows : 0;",
        "first = some ? any.begin / Rows + 1 : 0;",
    ),
    ("delta left out", "sm80/backward.cuh", "(dp[i][j][e] - row_delta)", "dp[i][j][e]"),
]

FORWARD_OPTIONS = [
    (
        "a sequence's rows run into the next",
        "common/sequence.cuh",
        "min(p.cu_q[batch + 1], p.q_len) - s.q_begin",
        "min(p.cu_q[batch + 1], p.q_len)",
    ),
    (
        "the last sequence has no tile of its own",
        "common/sequence.cuh",
        "cu[middle] / tile + middle",
        "cu[middle] / tile",
    ),
    ("softcap left out", "common/scores.cuh", "if (!s.modified())", "if (true)"),
    (
        "distances of the other alignment",
        "common/scores.cuh",
        "const int distance = row + offset - key",
        "const int distance = row - key",
    ),
    ("the sink counts in every thread of a row", "sm80/forward.cuh", "t == 0 ? 1.f : 0.f", "1.f"),
    (
        "rows past the length have a sink",
        "sm80/forward.cuh",
        "row + 8 * h < sequence.q_len && sink != -INFINITY",
        "sink != -INFINITY",
    ),
    ("the first item's mask for all", "common/scores.cuh", " + batch_offset(s, s.mask_batch, batch)", ""),
    ("the first head's mask for all", "common/scores.cuh", "head * s.mask_head + ", ""),
    ("halves of a boolean mask exchanged", "common/scores.cuh", "mask[f.row(i) *", "mask[f.row(i ^ 2) *"),
    (
        "columns of a floating mask exchanged",
        "common/scores.cuh",
        "(options, h, row + F::row(i), key + F::key(i))",
        "(options, h, row + F::row(i), key + F::key(i ^ 1))",
    ),
    (
        "one warp decides for all",
        "common/scores.cuh",
        "for (int w = 0; w < warps; w++) some |= now[w];",
        "some = now[0];",
    ),
    ("flags written while others read them", "common/scores.cuh", "  turn ^= 1;\n", ""),
    ("flags read before they are written", "common/scores.cuh", "= mine;\n  __syncthreads();", "= mine;"),
    ("bits of another octet", "common/scores.cuh", "key / 8 + c / 2)", "key / 8 + c / 2 + 1)"),
    ("bits of another row", "common/scores.cuh", "row + c % 2 * 8", "row + (c + 1) % 2 * 8"),
    ("bits of the whole's first keys", "common/scores.cuh", "octet + s.first_key / 8 + part", "octet + part"),
    ("one octet where there are parts of two", "common/scores.cuh", "s.first_key % 8 ? 2 : 1", "1"),
    ("kept weights not scaled", "sm80/forward.cuh", "inverse *= p.scores.keep_scale;", ";"),
    ("a value that is hidden leaks", "sm80/forward.cuh", "value_product(guarded_mma<T>", "value_product(pair_mma<T>"),
    ("a value that is not finite vanishes", "common/scores.cuh", "if (y[e] != 0.f) d[e] = NAN;", ""),
]
BACKWARD_OPTIONS = [
    (
        "all sequences in the scratch of the first",
        "common/backward_task.cuh",
        "int64_t(head) * p.rows + first_packed_tile(p.cu_q, p.tile_rows, batch) * p.tile_rows",
        "int64_t(head) * p.rows",
    ),
    ("derivative of the cap left out", "common/scores.cuh", "1 - t * t", "1"),
    ("kept weights not scaled", "common/scores.cuh", "grad * s.keep_scale : 0", "grad : 0"),
    ("dropped weights count", "sm80/backward.cuh", "bits >> i & 1 ? x.weight : 0.f", "x.weight"),
    (
        "bits of another row",
        "common/scores.cuh",
        "c / 2 % RowTiles * 8 + c % 2,",
        "c / 2 % RowTiles * 8 + (c + 1) % 2,",
    ),
    ("bits of another item's heads", "common/scores.cuh", "head / s.heads * s.heads_between", "0u"),
    ("one head's slope goes on in the next", "sm80/backward.cuh", "@slope_of_head", ""),
    ("one warp's part of the slope", "common/slope_sum.cuh", "w < Warps; w++", "w < 1; w++"),
    ("sign of the sink's gradient", "common/backward_heads.cuh", "sum -=\n", "sum +=\n"),
    ("the next tile's mask", "sm80/backward.cuh", "l.key(), seen}", "l.key(), found.seen}"),
    (
        "a mask's gradient of all items",
        "common/mask_gradient.cuh",
        "if (batch_offset(p.scores, out.batch, b) != own_item * item_size) continue;",
        "",
    ),
    (
        "tiles read before they landed",
        "sm80/mask_gradient.cuh",
        "ptx::cp_async_wait<0>();\n      __syncthreads();",
        "__syncthreads();",
    ),
    ("tiles refilled while others read them", "sm80/mask_gradient.cuh", "@tiles_read", ""),
    (
        "delta in the order of fragments",
        "common/mask_gradient.cuh",
        "first + Tiles::stat_position(row + 8 * h)",
        "first + row + 8 * h",
    ),
    ("a key that is hidden leaks", "sm80/backward.cuh", "query_product<true>(", "query_product<false>("),
    (
        "a row that is not seen leaks into dV",
        "sm80/backward.cuh",
        "accumulate_guarded(dv, weight_tile,",
        "accumulate(dv, weights, weight_tile,",
    ),
]
SMALL_BACKWARD = [  # of kernels for 99 KB of shared memory (emulator/test_small.py): kernel, what, ...
    ("64-fp16", "dO fetched while others read it", "sm80/backward.cuh", "@grad_out_read", ""),
    ("64-fp16", "dO of the tile before", "sm80/backward.cuh", "if (next < total) load_grad_out(0);", ""),
    ("256-fp16", "half of dQ left out", "sm80/backward.cuh", "i < kParts / kWarps;", "i < 1;"),
    (
        "256-fp16",
        "a mask's gradient from its first columns twice",
        "sm80/mask_gradient.cuh",
        "head_ * s.head + c,",
        "head_ * s.head,",
    ),
    (
        "256-bf16-deterministic",
        "columns read beyond the slices",
        "sm80/mask_gradient.cuh",
        "rows, dim - c);",
        "rows, dim);",
    ),
    (
        "256-fp64",
        "dQ looked for in units of 16 rows",
        "fp32/passes.cuh",
        "p.tile_rows < 16 ? p.tile_rows : 16",
        "16",
    ),
    (
        "256-fp64",
        "rows of the next head in a sink's gradient",
        "common/backward_heads.cuh",
        "(rows + p.tile_rows - 1) / p.tile_rows * p.tile_rows",
        "(rows + 15) / 16 * 16",
    ),
    ("256-fp64", "dropout of eight elements alone", "common/scores.cuh", "every (kCount + 7) / 8", "kCount / 8"),
    ("256-fp64", "blocks of eight elements alone", "common/block_tiles.cuh", "F::kCount < 8 ? F::kCount : 8", "8"),
]
FORWARD_BLOCKS = [
    (
        "a block's last key is the next one's",
        "common/block_tiles.cuh",
        "(key + keys - 1) / lists.size;",
        "key / lists.size;",
    ),
    (
        "one row of blocks for a tile of several",
        "common/block_tiles.cuh",
        "r <= min((first_row + rows - 1) / lists.size, lists.rows - 1)",
        "r <= first_row / lists.size",
    ),
    ("a block with elements counts as whole", "common/block_tiles.cuh", " && lists.partial[at] == kWhole;", ";"),
    ("a hidden block beside a whole one", "common/block_tiles.cuh", "all = all && expected == last + 1;", ""),
    ("elements of another row", "common/block_tiles.cuh", "% size + row - row0", "% size"),
    (
        "found before all have written",
        "common/block_tiles.cuh",
        "= all;\n        }\n        __syncthreads();",
        "= all;\n        }",
    ),
    ("overwritten before all have read", "common/block_tiles.cuh", "@found_read", ""),
    ("every head has the first one's lists", "common/scores.cuh", "head * s.mask_head + ", ""),
]
BACKWARD_BLOCKS = [
    (
        "a tile of the next head",
        "common/backward_task.cuh",
        "head = first_head + number / per_head();",
        "head = first_head;",
    ),
    ("partial tiles are not looked at", "common/next_tile.cuh", "blocks && !window.whole(n)", "false"),
    ("elements of another group", "common/block_tiles.cuh", "(row0 + f.row(kGroup * m)) % size", "row0 % size"),
]
DETERMINISTIC_BLOCKS = [
    (
        "a turn is not passed on",
        "common/next_tile.cuh",
        "for (; n < to; n++, at.next()) pass_turn();",
        "at.go(to, where.first_head);",
    ),
]
WEIGHTS = [
    ("read before all have loaded", "common/attention_weights.cuh", "-1; });\n        __syncthreads();", "-1; });"),
    ("loaded while others read", "common/attention_weights.cuh", "@tiles_read", ""),
    (
        "numbers of rows read before they are there",
        "common/attention_weights.cuh",
        "    }\n    __syncthreads();\n",
        "    }\n",
    ),
    ("columns past head_dim", "common/attention_weights.cuh", "row >= 0 && depth + d < head_dim ?", "row >= 0 ?"),
    ("the first head's key", "common/attention_weights.cuh", "head / p.key.group * p.key.head", "0"),
    (
        "elements of the next row",
        "common/attention_weights.cuh",
        "own[e / 4] % size) * size",
        "(own[e / 4] + 1) % size) * size",
    ),
    (
        "rows of the sequence instead of the chosen",
        "common/attention_weights.cuh",
        "p.rows[first + tid] : -1",
        "first + tid : -1",
    ),
    (
        "rows past the last are written",
        "common/attention_weights.cuh",
        "if (first + ty + 16 * r >= p.n_rows) continue;",
        "",
    ),
]
_OFFSETS = "common/packed_offsets.cuh"
OFFSETS = [
    ("read before all warps have written", _OFFSETS, "@parts_written", ""),
    ("written while others read", _OFFSETS, "@parts_read", ""),
    ("the pass before is forgotten", _OFFSETS, "x = combine(x, so_far);", ""),
    ("lanes before the first", _OFFSETS, "if (lane >= d) x = combine(x, other);", "x = combine(x, other);"),
    ("an order that is not all there", _OFFSETS, "@order_known", ""),
    ("lengths before the offsets are there", _OFFSETS, "@offsets_known", ""),
    ("short sequences first", _OFFSETS, "rows(j) > own", "rows(j) < own"),
    ("one place for two sequences", _OFFSETS, "rows(j) == own && j < i", "false"),
]
TAILS = [
    ("all rows", "common/clear_tails.cuh", "const int first = *t.begin,", "const int first = 0,"),
    ("of the first head", "common/clear_tails.cuh", " + head * t.head", ""),
    ("even words everywhere", "common/clear_tails.cuh", "word % 2 ? t.odd : t.even", "t.even"),
]
_TASK = "common/backward_task.cuh"
TURNS = [
    ("the first tiles start first", _TASK, "deterministic ? p.key_tiles - 1 - r / here : r / here", "r / here"),
    ("the first tiles of a sequence start first", _TASK, "p.turn ? first_packed", "!p.turn ? first_packed"),
    ("turns of the first row alone", _TASK, "min(tile * Rows + Rows, s.q_len) - 1), t.key", "tile * Rows), t.key"),
    (
        "rows past the end take turns",
        _TASK,
        "min(tile * Rows + Rows, s.q_len) - 1), t.key",
        "tile * Rows + Rows - 1), t.key",
    ),
    ("keys past the end add, too", _TASK, "min(n0 + Keys, s.keys.key_length) - 1", "n0 + Keys - 1"),
    ("no turns of the prefix", "common/sequence.cuh", "if (n >= begin) return end - 1 - n;", "return end - 1 - n;"),
    ("one tile has two turns", "common/sequence.cuh", "min(prefix, begin) + end", "prefix + end"),
    ("empty windows take turns", "common/sequence.cuh", "(some.begin < some.end ? min", "(true ? min"),
]
_SCOUTS = "sm90/forward_scouts.cuh"
NAN_SM90_FORWARD = [
    ("no look at the values", "sm90/forward.cuh", "if (!Shape::kRanged || !hides) return false;", "return false;"),
    ("a value looked at before it landed", _SCOUTS, "@value_landed", ""),
    ("an answer about the tile before", "sm90/forward.cuh", "@value_known", ""),
    ("an answer read before it is there", _SCOUTS, "@values_seen", ""),
    ("a third of the tile not looked at", _SCOUTS, "return x.y | x.z | x.w;", "return x.y | x.z;"),
    ("half of the tile not looked at", _SCOUTS, "i < Shape::kValueBytes / 512", "i < Shape::kValueBytes / 1024"),
    ("the answer of one lane alone", _SCOUTS, "ptx::any(bad != 0)", "bad != 0"),
    ("a tile released while lanes read on", _SCOUTS, "@tile_looked_at", ""),
    (
        "tiles in part are not named",
        "sm90/forward_producer.cuh",
        "key_tile < whole.x || key_tile >= whole.y",
        "key_tile < whole.x",
    ),
    (
        "tiles of the window's begin are not named",
        "sm90/forward_producer.cuh",
        "key_tile < whole.x || key_tile >= whole.y",
        "key_tile >= whole.y",
    ),
    ("what hides of the next rows", "sm90/forward_producer.cuh", "load_v(round + 3, k_count", "load_v(round, k_count"),
    ("the same step again", "sm90/finite.cuh", "a[i][e] = a[i + 1][e];", ";"),
    ("a value never released", "sm90/forward.cuh", "@value_released", ""),
]
NAN_SM90_WIDE_FORWARD = [  # without scouts
    ("a value looked at before it landed, by all", "sm90/forward.cuh", "@value_known", ""),
    (
        "a quarter of the tile looked at",
        "sm90/finite.cuh",
        "return now[0] | now[1] | now[2] | now[3];",
        "return now[0];",
    ),
]
PADDING = [("rows past the length", "sm90/tma_rows.cuh", "if (end >= min(row + Rows, length)) {", "if (true) {")]
NAN_SM80_BACKWARD = [
    ("a hidden dS", "sm80/backward.cuh", "if (Guarded && weight[e] == 0.f) ds[e] = 0.f;", ""),
    (
        "a gradient that a hidden pair brings",
        "sm80/backward.cuh",
        "accumulate_guarded(dv, weight_tile,",
        "accumulate(dv, weights, weight_tile,",
    ),
]
FP32_FORWARD = [
    ("K read before its copy landed", "fp32/forward.cuh", "@key_landed", ""),
    ("V read before its copy landed", "fp32/forward.cuh", "@value_landed", ""),
    ("no barrier between reading K and refilling it", "fp32/forward.cuh", "@key_read", ""),
    ("a product of low halves left out", "fp32/tiles.cuh", "ptx::mma_m16n8k8(small, a.low, high[0], high[1]);", ""),
    ("a value that is hidden leaks", "fp32/forward.cuh", "if (border) guard(acc, s,", "if (false) guard(acc, s,"),
    ("a value cleared while others look at it", "fp32/forward.cuh", "@values_seen", ""),
]
FP32_BACKWARD = [
    (
        "stage read before its copy landed",
        "fp32/backward.cuh",
        "ptx::cp_async_wait<0>();\n      __syncthreads();",
        "__syncthreads();",
    ),
    ("stage refilled while others read it", "fp32/backward.cuh", "@stage_landed", ""),
    ("dS read before it is complete", "fp32/backward.cuh", "@scores_complete", ""),
    ("a key that is hidden leaks", "fp32/backward.cuh", "finite_keys || !border", "true"),
    ("a row that is not seen leaks", "fp32/backward.cuh", "if (border) guard(", "if (false) guard("),
    ("gradient of lse forgotten", "fp32/passes.cuh", "sum -= p.grad_lse[stat]", "sum -= 0"),
    ("tiles read before they landed", "fp32/mask_gradient.cuh", "      ptx::cp_async_wait<0>();\n", ""),
]
FP32_FORWARD_BLOCKS = [
    ("partial tiles are not looked at", "common/next_tile.cuh", "blocks && !window.whole(n)", "false"),
    ("what was found lies where the flags are", "fp32/forward.cuh", "flags + kFlagBytes / 4", "flags"),
]
FP32_BACKWARD_BLOCKS = [
    ("partial tiles are not looked at", "common/next_tile.cuh", "blocks && !window.whole(n)", "false"),
    ("a turn is not passed on", "common/next_tile.cuh", "n++, at.next()) pass_turn();", "n++, at.next());"),
]
NAN_SM90_BACKWARD = [
    ("keys stay as they are", "sm90/backward.cuh", "if (Ranged) Guard::clean_keys(memory, smem);", ""),
    (
        "bad keys do not show",
        "sm90/backward.cuh",
        "if (Ranged && Guard::found_keys(memory, smem)) Guard::poison_scores",
        "if (false) Guard::poison_scores",
    ),
    (
        "queries and dO stay as they are",
        "sm90/backward.cuh",
        "Guard::clean_queries(pf, memory, smem, query_rows(qs), out_rows(ds));",
        ";",
    ),
    ("a hidden dS", "sm90/backward.cuh", "&= not_zero(pf[i / 4][i % 4]);", "|= 0;"),
    ("a bad row of dO does not show", "sm90/backward_guard.cuh", "x |= mask & not_zero(x);", ""),
    ("hidden weights are poisoned too", "sm90/backward_guard.cuh", "mask & not_zero(x)", "mask"),
    (
        "wgmma reads keys without a proxy fence",
        "sm90/backward_guard.cuh",
        "votes[thread() / 32] = mine;\n    ptx::fence_proxy_async();",
        "votes[thread() / 32] = mine;",
    ),
    ("cleaned while the other warpgroup looks", "sm90/backward_guard.cuh", "@both_looked", ""),
    (
        "read before all is clean",
        "sm90/backward_guard.cuh",
        "ptx::fence_proxy_async();\n    ptx::bar_sync(1, 256);\n    return true;",
        "ptx::fence_proxy_async();\n    return true;",
    ),
]
_ROUNDED = ("weights from a rounded lse", "common/backward_task.cuh", "p.inverse[at] = stats.inverse;")
_ROUNDED += ("p.reference[at] -= ptx::log2(stats.inverse), p.inverse[at] = none ? 0 : 1;",)
LARGE_NUMBERS = [  # family of test_large_numbers.py, fault
    (
        "sm80",
        "far scores multiplied and added in one",
        "sm80/forward.cuh",
        "Options || ptx::any(is_far(base))",
        "Options",
    ),
    ("sm80", "far rows as near ones", "sm80/backward.cuh", "!Options && any_far(", "false && any_far("),
    (
        "sm90-short",
        "far scores multiplied and added in one",
        "sm90/forward_softmax.cuh",
        "!kNatural && ptx::any(",
        "false && ptx::any(",
    ),
    ("sm90-short", "far rows as near ones", "sm90/backward.cuh", "if (far) {", "if (false) {"),
    ("sm90-short", "no headroom", "sm90/forward_softmax.cuh", "ptx::is_bf16<T> ? task.headroom", "false ? 1.f"),
    (
        "fp16x2",
        "references rounded",
        "sm90/fp16x2_forward.cuh",
        "fabsf(top) < 65536.f ? top - kTop : top",
        "top - kTop",
    ),
    ("fp16x2", *_ROUNDED),
    ("sm80-options", *_ROUNDED),
    ("sm90-bias", *_ROUNDED),
    ("fp32", *_ROUNDED),
    (
        "fp32",
        "low masks are one number",
        "common/scores.cuh",
        "? reinterpret_cast<const float*>(h.mask)[at]",
        "? fmax(reinterpret_cast<const float*>(h.mask)[at], -1e38f)",
    ),
    (
        "sm80-options",
        "scores in log2 units",
        "sm80/forward.cuh",
        "const float factor = Options ? scale : 1.f",
        "const float factor = 1.f",
    ),
]

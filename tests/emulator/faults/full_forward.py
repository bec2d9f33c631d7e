"""Faults in the Hopper forward with options; as faults/attention.py, after the kernel that is to find them."""

FORWARD, PRODUCER = "sm90/full_forward.cuh", "sm90/full_producer.cuh"
SCORES, SHAPE, OUTPUT = "sm90/full_scores.cuh", "sm90/full_shape.cuh", "sm90/forward_output.cuh"

PLAIN = [  # without a floating mask
    ("V used before it landed", FORWARD, "ptx::mbarrier_wait(barriers.v_full", "(void)(barriers.v_full"),
    (
        "output read before its products are done",
        FORWARD,
        "const bool moved = softmax(options, tile_count + 1);\n          ptx::wgmma_wait<0>();",
        "const bool moved = softmax(options, tile_count + 1);",
    ),
    ("a tile's number read after it was released", FORWARD, "@tile_read", ""),
    ("a slot released while others wait for it", FORWARD, "@no_tile", ""),
    (
        "Q refilled before its last product",
        FORWARD,
        "ptx::wgmma_wait<0>();\n        ptx::keep(scores);\n        release_k(tile_count);\n        release_q(tile);",
        "release_q(tile);\n        ptx::wgmma_wait<0>();\n        ptx::keep(scores);\n        release_k(tile_count);",
    ),
    (
        "kinds of the other warpgroup",
        FORWARD,
        "if (tile.kind(group) == TileKind::hidden)",
        "if (tile.kind(0) == TileKind::hidden)",
    ),
    ("no look at the values", FORWARD, "if (!border) return false;", "return false;"),
    (
        "the sink counts in every thread of a row",
        FORWARD,
        "t == 0 ? soft.weight_unit(task) : 0.f",
        "soft.weight_unit(task)",
    ),
    ("rows past the length have a sink", FORWARD, "row + 8 * h < slot.q_len && sink", "sink"),
    ("kinds of the first rows for all", PRODUCER, "t.head, row / 64)", "t.head, t.row / 64)"),
    (
        "a word passed over too far",
        PRODUCER,
        "(none ? key_tile & ~31 : key_tile) - 1",
        "(none ? key_tile & ~63 : key_tile) - 1",
    ),
    ("queries of the first sequence for all", PRODUCER, "first.q_begin + first.row", "first.row"),
    ("values of the next sequence leak", PRODUCER, "sequence.k_begin + tiles.key_end", "task.kv_len"),
    ("what the mask hides in part taken for whole", SHAPE, "kinds ? TileKinds::kind(kinds, key_tile) :", ""),
    (
        "what ranges hide in part taken for whole",
        SHAPE,
        "(key_tile < tiles.whole_begin || key_tile >= tiles.whole_end)",
        "key_tile < tiles.whole_begin",
    ),
    (
        "the mask's rows exchanged",
        SCORES,
        "*b = row_at<unsigned char>(slot, row + 8,",
        "*b = row_at<unsigned char>(slot, row,",
    ),
    ("halves of a boolean mask exchanged", SCORES, "pair[16 * i + j]", "pair[16 * (1 - i) + j]"),
    ("words read where rows are odd", SCORES, "options.mask_row % adjacent == 0 && ", ""),
    ("keys of a mask past the end are read", SCORES, "min(key + step, task.kv_len - 1) - key", "step"),
    ("dropout of the first half for both", SCORES, "of(key + 64 * i)", "of(key)"),
    ("distances of the other alignment", SCORES, "row + slot.offset - key", "row - key"),
    ("sinks beside scores that are not scaled", SCORES, "options.slopes || options.sinks ||", "options.slopes ||"),
    ("kept weights not scaled", OUTPUT, "inverse * task.scores.keep_scale", "inverse"),
    ("rows of the next sequence are written", OUTPUT, "Shape::kOptions ? slot.rows : task.q_len", "task.q_len"),
    (
        "lse of the first sequence",
        OUTPUT,
        "int64_t(slot.head) * task.q_len + slot.q_begin",
        "int64_t(slot.head) * task.q_len",
    ),
]
BIAS = [  # with one
    (
        "what is not finite in a bias not noticed",
        SCORES,
        "if (!ptx::any((large & 0x80008000u) != 0)) return lowest;",
        "return lowest;",
    ),
    ("what a bias hides is not looked at", FORWARD, "      if (Shape::kBias)\n", "      if (false)\n"),
    ("a key that a bias hides leaks", SCORES, "lowest = scores[8 * j + 2 * q] = bias.x;", "lowest = bias.x;"),
    ("the bias' rows exchanged", SCORES, "bias_row(row - lane / 4 + lane % 16)", "bias_row(row - lane / 4 + lane % 8)"),
    ("keys of a bias past the end are read", SCORES, "min(key + e, task.kv_len - 1) * task", "(key + e) * task"),
    ("a bias read while others copy it", SCORES, "@bias_there", ""),
    ("a bias read before it landed", SCORES, "ptx::mbarrier_wait(part.full", "(void)(part.full"),
    (
        "a bias released while other lanes read it",
        SCORES,
        "__syncwarp();\n    if (lane == 0) ptx::mbarrier_arrive(part.empty);",
        "if (lane == 0) ptx::mbarrier_arrive(part.empty);",
    ),
    ("one row for all taken for many", SCORES, "maps.mask_tiles && !task.scores.mask_row ? 0 : row", "row"),
    ("a bias refilled while others read it", PRODUCER, "ptx::mbarrier_wait(part.empty", "(void)(part.empty"),
    ("the first head's bias for all", PRODUCER, "task.scores.mask_head ? slot.head : 0", "0"),
    ("the first item's bias for all", PRODUCER, "all.mask_batched ? slot.batch : 0", "0"),
    ("the first rows' bias for all", PRODUCER, "rows > 1 ? slot.row : 0", "0"),
    ("words of a bias read where rows are odd", SCORES, "options.mask_row % adjacent == 0 && ", ""),
]
FP32_BIAS = [  # in float32
    ("second half of a float32 bias is the first", SCORES, "scores + kCount / 2 * half + 4 * j", "scores + 4 * j"),
    ("a key that a float32 bias hides leaks", SCORES, "x == -INFINITY ? x : ", ""),
    ("float32: rows exchanged", SCORES, "bias_row(row + 8 * h)", "bias_row(row)"),
    ("float32: the first half for both", PRODUCER, "(key_tile * kParts + i)", "(key_tile * kParts)"),
    ("float32: a bias refilled while others read it", PRODUCER, "ptx::mbarrier_wait(part.empty", "(void)(part.empty"),
]

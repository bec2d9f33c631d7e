"""Faults in the derivative in a direction; as faults/attention.py, after the kernel that is to find them."""

TASK, SM80_JVP, FP32_JVP = "common/jvp_task.cuh", "sm80/jvp.cuh", "fp32/jvp.cuh"

SM80 = [
    ("K read before its copy landed", SM80_JVP, "@key_landed", ""),
    ("V read before its copy landed", SM80_JVP, "@value_landed", ""),
    ("no barrier between reading K and refilling it", SM80_JVP, "@key_read", ""),
    ("no barrier between reading V and refilling it", SM80_JVP, "@value_read", ""),
    (
        "query's direction left out",
        SM80_JVP,
        "if (p.query_tangent) Products::add_scores(a, query_change, key_tile, warp * 16, 0, at);",
        "",
    ),
    (
        "key's direction by the key's strides",
        SM80_JVP,
        "p.key_tangent, p.key_tangent_strides",
        "p.key_tangent, p.key_strides",
    ),
    (
        "value's direction by the value's strides",
        SM80_JVP,
        "p.value_tangent, p.value_tangent_strides",
        "p.value_tangent, p.value_strides",
    ),
    ("hidden directions leak", SM80_JVP, "value_change, hides, 0, lane, at", "value_change, false, 0, lane, at"),
    (
        "change of the first sequence",
        SM80_JVP,
        "sequence.q_begin * p.out_tangent_strides.row",
        "0 * p.out_tangent_strides.row",
    ),
    ("rows past the end are written", SM80_JVP, "if (r >= sequence.rows) continue;", ""),
    ("columns past v_head_dim are written", SM80_JVP, "if (j * 8 >= p.v_head_dim) break;", ""),
    ("rows by the output's strides", SM80_JVP, "r * p.out_tangent_strides.row", "r * p.out_strides.row"),
    ("the mask's direction by the mask's strides", TASK, "row * p.mask_tangent_row", "row * p.scores.mask_row"),
    ("the cap's slope left out", TASK, "* p.scale * x.slope", "* p.scale"),
    ("distances added", TASK, "changed -= change.slope", "changed += change.slope"),
    (
        "a hidden change counts",
        TASK,
        "changed = counts ? x.weight * (changed - of.pivot) : 0;",
        "changed = x.weight * (changed - of.pivot);",
    ),
    (
        "dropped weights do not count",
        TASK,
        "mu += changed, total += x.weight;",
        "mu += bits >> i & 1 ? changed : 0, total += x.weight;",
    ),
    ("dropped changes meet V", TASK, "bits >> i & 1 ? kept_change[e] : 0", "kept_change[e]"),
    ("dropped weights meet V", TASK, "keep ? x.weight : 0", "x.weight"),
    ("the sink's change left out", TASK, "p.sinks_tangent ? p.sinks_tangent[head] : 0", "Real(0)"),
    ("the sink's weight left out", TASK, "total += weight, mu += changed", "mu += changed"),
    ("the sink does not meet the output", TASK, "mu += changed, rounded += changed;", "mu += changed;"),
    ("kept weights not scaled", TASK, "inverse * p.scores.keep_scale", "inverse"),
    ("a row that sees nothing divides", TASK, "total == 0 ? 0 : 1 / total", "1 / total"),
    ("lse of packed heads as of dense ones", TASK, "p.cu_q ? int64_t(where.head) : ", ""),
    ("sum of a row over two of four threads", TASK, "return x + ptx::shfl_xor(x, 2);", "return x;"),
    ("directions of the first head", TASK, "head * p.mask_tangent_head", "0 * p.mask_tangent_head"),
]
FP32 = [
    ("K read before its copy landed", FP32_JVP, "@key_landed", ""),
    ("V read before its copy landed", FP32_JVP, "@value_landed", ""),
    ("the block's place read before it is there", FP32_JVP, "@place_there", ""),
    ("hidden values leak", FP32_JVP, "if (border && moves) Forward::guard", "if (false) Forward::guard"),
    ("sums of the first walk kept", FP32_JVP, "rows[0].clear_sums(), rows[1].clear_sums();", ""),
    ("the first walk's output kept", FP32_JVP, "clear(acc);", ""),
    ("the pivot's change left out of lse", TASK, "row.pivot + mu * inverse", "mu * inverse"),
    ("rows past the end are written", FP32_JVP, "if (r >= sequence.rows) continue;", ""),
    ("columns past v_head_dim are written", FP32_JVP, "if (chunk * kW >= p.v_head_dim) continue;", ""),
]
ONE_TILE = [
    ("V where K is still read", FP32_JVP, "@key_read", ""),
    ("K where V is still read", FP32_JVP, "@value_read", ""),
]

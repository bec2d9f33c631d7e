"""Faults in the derivative of the backward in a direction; as faults/attention.py, by the kernel that is to find
them."""

TASK, KERNEL, MASK = (f"common/backward_jvp{end}.cuh" for end in ("_task", "", "_mask"))
PASSES, SM80, FP32 = "common/backward_jvp_passes.cuh", "sm80/backward_jvp.cuh", "fp32/backward_jvp.cuh"

FAULTS = {
    "bf16": [
        ("a slice read before its copy landed", KERNEL, "@step_landed", ""),
        ("no barrier between reading a slice and refilling it", KERNEL, "@step_read", ""),
        ("a block's work read before it is known", KERNEL, "@work_known", ""),
        ("columns of the first block in all", KERNEL, "first_slice + i - p.slices", "i - p.slices"),
        ("the own side's direction left out", KERNEL, "if (is_there(side, 1))", "if (false)"),
        ("the directions of V and dO left out", KERNEL, "if (is_there(side ^ 1, 3))", "if (false)"),
        ("statistics of the tile before", KERNEL, "(by_keys ? tile_turn * kOthers : 0), head", "0, head"),
        ("hidden numbers leak", KERNEL, "now.hides,", "false,"),
        ("rows past the end are written", KERNEL, "if (row >= rows) continue;", ""),
        ("kept weights not scaled", KERNEL, "p.scores.seed ? p.scores.keep_scale : Real(1)", "Real(1)"),
        ("columns past head_dim are written", SM80, "if (first + j * 8 >= dim) break;", ""),
        ("d(lse) left out", TASK, "(moved - of.mu)", "moved"),
        ("d(delta) left out", TASK, "(after(grad_change) - of.delta_change)", "after(grad_change)"),
        ("the cap's bend left out", TASK, "y.of_score + bend * move * x.grad", "y.of_score"),
        ("distances added", TASK, "moved -= change.slope", "moved += change.slope"),
        ("a hidden change counts", TASK, "counts ? x.weight * (moved - of.mu) : 0", "x.weight * (moved - of.mu)"),
        ("dropped changes meet dO", TASK, "keep ? weight_change : 0", "weight_change"),
        ("dropped products count", TASK, "keep ? y * keep_scale : 0", "y * keep_scale"),
        ("bits of another octet", TASK, "c / 2 / kTiles : c / 2;", "c / 2 / kTiles : c / 2 + 1;"),
        ("tiles between prefix and window", TASK, "i - tiles.prefix + tiles.begin", "i + tiles.begin"),
        ("d(grad_lse) left out", PASSES, "change - p.grad_lse_tangent[stat]", "change"),
        ("the sink's direction left out", PASSES, "(sink - to.mu)", "(0 - to.mu)"),
        ("mask: slices read before they landed", MASK, "@slice_landed", ""),
        ("mask: no barrier before a slice is refilled", MASK, "@slice_read", ""),
        ("mask: no barrier before the next tile", MASK, "@tiles_read", ""),
    ],
    "fp32": [
        ("cleared while others look", FP32, "@others_seen", ""),
        ("columns past head_dim are written", FP32, "if (column >= dim) continue;", ""),
        ("sums of the slices before count again", FP32, "exact = {};", ""),
    ],
}

"""Faults in the kernels for heads of more than 256 columns; as faults/attention.py."""

WIDE_FORWARD, WIDE_BACKWARD = "sm80/wide_forward.cuh", "sm80/wide_backward.cuh"

FORWARD = [
    ("K read before its copy landed", WIDE_FORWARD, "@key_landed", ""),
    ("V read before its copy landed", WIDE_FORWARD, "@value_landed", ""),
    ("V refilled while it is read", WIDE_FORWARD, "@value_read", ""),
    ("parts added before they are there", WIDE_FORWARD, "@parts_complete", ""),
    ("V read before others' copies landed", WIDE_FORWARD, "@value_seen", ""),
    ("every warp of a row writes the statistics of the first", WIDE_FORWARD, "column == 0 && t == 0", "t == 0"),
    ("columns past v_head_dim are written", WIDE_FORWARD, "if (column + j * 8 >= p.v_head_dim) break;", ""),
    ("rows past the end are written", WIDE_FORWARD, "if (r >= sequence.rows) continue;", ""),
    ("kept weights not scaled", WIDE_FORWARD, "inverse *= p.scores.keep_scale;", ""),
    ("hidden values leak", WIDE_FORWARD, "value_tile, hides, first, lane, at", "value_tile, false, first, lane, at"),
]
BACKWARD = [
    ("tiles read before they landed", WIDE_BACKWARD, "ptx::cp_async_wait<0>();", ""),
    ("P and dS overwritten while dQ reads them", WIDE_BACKWARD, "@tile_landed", ""),
    ("dP read before it is there", WIDE_BACKWARD, "@grads_there", ""),
    ("dP overwritten before it is read", WIDE_BACKWARD, "@grads_read", ""),
    ("P and dS read before they are there", WIDE_BACKWARD, "@scores_complete", ""),
    ("Q and dO refilled while they are read", WIDE_BACKWARD, "@rows_read", ""),
    ("halves of dQ's rows exchanged", WIDE_BACKWARD, "row / 8 * 2;", "(1 - row / 8) * 2;"),
    ("rows past the end are written", WIDE_BACKWARD, "if (first_key + row >= sequence().k_rows) continue;", ""),
    ("the block's place read before it is there", WIDE_BACKWARD, "@place_there", ""),
    ("slopes of the head to come", WIDE_BACKWARD, "own().head, slope_sum", "at.head, slope_sum"),
    ("hidden numbers leak", WIDE_BACKWARD, "own().border = found.hides;", "own().border = false;"),
    ("dV not scaled", WIDE_BACKWARD, "p.scores.seed ? p.scores.keep_scale : 1.f", "1.f"),
]
DETERMINISTIC = [
    (
        "a turn is not passed on",
        WIDE_BACKWARD,
        "if (tid == 0) ptx::turn_pass(p.turn + 2 * own().number, own().turn + 1);",
        "",
    ),
]

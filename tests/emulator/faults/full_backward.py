"""Faults of the Hopper backward with options that the emulator has to find: as faults/attention.py."""

_KERNEL = "sm90/full_backward.cuh"
_RING = "sm90/full_backward_ring.cuh"
_SCORES = "sm90/full_backward_scores.cuh"
_COLUMNS = "sm90/full_backward_columns.cuh"
BACKWARD = [  # found by values, or as races
    (
        "a slot of the ring taken while others read it",
        _RING,
        "ptx::mbarrier_wait(memory.ring_empty",
        "(void)(memory.ring_empty",
    ),
    ("dS read before the other warpgroup wrote it", _KERNEL, "@turn", ""),
    (
        "the last dS read before the other warpgroup wrote it",
        _KERNEL,
        "@last_turn",
        "ptx::bar_sync(10 + group, 128);",
    ),
    ("dS read without a proxy fence", _KERNEL, "@ds_written", ""),
    ("dS overwritten while other warps of the warpgroup read it", _KERNEL, "@dq_read", ""),
    ("dQ read before it is done", _KERNEL, "@dq_done", "ptx::wgmma_wait<3>();"),
    ("scores read before they are done", _KERNEL, "@scores_done", "ptx::wgmma_wait<1>();"),
    (
        "a mask's tile read before it landed",
        _KERNEL,
        "if (maps.mask_tiles)\n        ptx::mbarrier_wait(memory.mask_full",
        "if (false) ptx::mbarrier_wait(memory.mask_full",
    ),
    ("a stage released before its products are done", _KERNEL, "@sums_done", "ptx::wgmma_wait<2>();"),
    (
        "one head's slope goes on in the next",
        _KERNEL,
        "if (lane() == 0) own_slope(memory) = 0.f;\n    if (thread_of",
        "if (thread_of",
    ),
    (
        "the second part of a tile with the mask of the first",
        _KERNEL,
        "panel_of(memory, it, 0) + part * (64 * 128)",
        "panel_of(memory, it, 0)",
    ),
    ("dropped weights count", _SCORES, "keep ? weighted.weight : 0.f", "weighted.weight"),
    ("a hidden key leaks", _KERNEL, "hides(TileRing<Shape>(memory, smem).slot(again)) &&", "false &&"),
    ("kinds of the first rows for all", _RING, "at.head, at.tile), work", "at.head, 0), work"),
    ("rows of the next tile read before they landed", _KERNEL, "wait_query(memory, next);", ""),
    ("a head's slope summed before all warps have theirs", _KERNEL, "@slopes_there", ""),
]
TURNS = [  # at 128 columns dS of two tiles lies side by side
    ("dQ of the tile itself", _KERNEL, "ds_of(memory, now - 1)", "ds_of(memory, now)"),
    ("dS of two tiles in one place", _KERNEL, "it % 2 * Shape::kScoreBytes", "0"),
    ("128 columns: dS read before the other warpgroup wrote it", _KERNEL, "@turn", ""),
]
DETERMINISTIC = [  # there is one stage for a mask's tile
    ("dQ's stage overwritten while it is added", _KERNEL, "@dq_added", ""),
    (
        "a mask's tile refilled while others read it",
        _KERNEL,
        "ptx::mbarrier_wait(memory.mask_empty",
        "(void)(memory.mask_empty",
    ),
    (
        "a turn is not passed on",
        _KERNEL,
        "ptx::turn_wait(turn.at, turn.mine);\n          ptx::turn_pass(turn.at, turn.mine + 1);\n        }",
        "}",
    ),
]
COLUMNS = [
    ("columns: scores read before they are done", _COLUMNS, "@full_scores_done", "ptx::wgmma_wait<1>();"),
    (
        "columns: weights read before both warpgroups wrote them",
        _COLUMNS,
        "@full_scores_written",
        "ptx::bar_sync(10 + group, 128);",
    ),
    (
        "columns: weights overwritten while the other warpgroup reads them",
        _COLUMNS,
        "@full_scores_read",
        "",
    ),
    (
        "columns: weights read without a proxy fence",
        _COLUMNS,
        "        ptx::fence_proxy_async();\n      }",
        "      }",
    ),
    (
        "columns: a mask's tile read before it landed",
        _COLUMNS,
        "if (maps.mask_tiles) ptx::mbarrier_wait(memory.mask_full",
        "if (false) ptx::mbarrier_wait(memory.mask_full",
    ),
    (
        "columns: a stage released before its products are done",
        _COLUMNS,
        "@full_products_done",
        "ptx::wgmma_wait<4>();",
    ),
    ("columns: a hidden row leaks", _COLUMNS, "if (Base::hides(tile) &&", "if (false && Base::hides(tile) &&"),
    (
        "columns: the second warpgroup with the mask of the first",
        _COLUMNS,
        "maps.mask_tiles ? panel + row * 128",
        "maps.mask_tiles ? panel",
    ),
    (
        "columns: the second warpgroup's gradient of the mask in the first's place",
        _COLUMNS,
        "done.tile * kRows, row);",
        "done.tile * kRows, 0);",
    ),
    ("columns: dropped weights not scaled", _COLUMNS, "dv[i] *= task.scores.keep_scale;", ";"),
    ("columns: keys that are not finite reach the products", _COLUMNS, "Guard::clean_keys(Base::memory, smem);", ""),
]
DETERMINISTIC_COLUMNS = [
    ("columns: scores read before they are done", _COLUMNS, "@full_scores_done", "ptx::wgmma_wait<1>();"),
    (
        "columns: delta of another stage",
        _COLUMNS,
        "(memory.delta - memory.k) + os * kRows * 4",
        "(memory.delta - memory.k) + qs * kRows * 4",
    ),
    (
        "columns: dQ's stage overwritten while it is added",
        _COLUMNS,
        "if (Shape::kDeterministic && stored) ptx::bar_sync(8 + group, 160);\n        Base::store_dq",
        "Base::store_dq",
    ),
    (
        "columns: one piece of dQ twice",
        _KERNEL,
        "(kRows * Shape::kD) + piece * 4096",
        "(kRows * Shape::kD) + half * 4096",
    ),
]

"""Faults of the Hopper backward with options that the emulator has to find: as faults/attention.py."""

_KERNEL = "sm90/full_backward.cuh"
_RING = "sm90/full_backward_ring.cuh"
_SCORES = "sm90/full_backward_scores.cuh"
BACKWARD = [  # found by values, or as races
    (
        "a slot of the ring taken while others read it",
        _RING,
        "ptx::mbarrier_wait(memory.ring_empty",
        "(void)(memory.ring_empty",
    ),
    (
        "dS overwritten while the other warpgroup reads it",
        _KERNEL,
        "if (it > 0 && row == 0) ptx::bar_sync(6 + (group ^ 1), 256);",
        "",
    ),
    (
        "dS read before the other warpgroup wrote it",
        _KERNEL,
        "ptx::bar_sync(4 + (group ^ 1), 256);",
        "ptx::bar_sync(10 + group, 128);",
    ),
    (
        "dS read without a proxy fence",
        _KERNEL,
        "ptx::fence_proxy_async();\n      ptx::bar_arrive(4",
        "ptx::bar_arrive(4",
    ),
    (
        "a mask's tile read before it landed",
        _KERNEL,
        "if (maps.mask_tiles)\n        ptx::mbarrier_wait(memory.mask_full",
        "if (false) ptx::mbarrier_wait(memory.mask_full",
    ),
    (
        "a stage released before its products are done",
        _KERNEL,
        "ptx::wgmma_wait<0>();\n      ptx::keep(dq);\n      Base",
        "ptx::wgmma_wait<2>();\n      ptx::keep(dq);\n      Base",
    ),
    ("one head's slope goes on in the next", _KERNEL, "    own_slope(memory) = 0.f;\n#pragma", "#pragma"),
    (
        "the second part of a tile with the mask of the first",
        _KERNEL,
        "panel_of(memory, it) + row * 128,",
        "panel_of(memory, it),",
    ),
    ("dropped weights count", _SCORES, "keep ? weighted.weight : 0.f", "weighted.weight"),
    ("a hidden key leaks", _KERNEL, "if (hides(", "if (false && hides("),
    ("kinds of the first rows for all", _RING, "at.head, at.tile), work", "at.head, 0), work"),
    ("both parts of a tile vote in one place", _KERNEL, "Part::kOutBytes, row / 64);", "Part::kOutBytes, 0);"),
]
DETERMINISTIC = [  # there is one stage for a mask's tile
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

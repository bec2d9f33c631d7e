"""Faults in the kernel that finds out what masks do to tiles; as faults/attention.py."""

KINDS = "common/tile_kinds.cuh"

FAULTS = [
    ("the first head's tiles for all", KINDS, "batch, item) * heads + (heads > 1 ? head : 0)", "batch, item) * heads"),
    ("the first head's mask for all", KINDS, "entry % k.heads * s.mask_head", "0"),
    ("the first item's mask for all", KINDS, "at += item % s.mask_size[d] * s.mask_batch[d];", ""),
    (
        "chunks that are not dense read as such",
        KINDS,
        "s.mask_col == 1 && s.mask_row % 4 == 0 &&",
        "s.mask_col == 1 &&",
    ),
    ("keys past the end are read", KINDS, "key + e < keys ? e * s.mask_col : 0", "e * s.mask_col"),
    ("rows past the end are read", KINDS, "1 : min(k.rows, p.q_len - row)", "1 : k.rows"),
    (
        "only the first key of a chunk counts",
        KINDS,
        "x = not_zero_bytes(x);",
        "x = not_zero_bytes(x & 0xff) * 0x01010101u;",
    ),
    ("some taken for all", KINDS, "all = !ptx::any(seen.y != 0x80808080u)", "all = ptx::any(seen.y == 0x80808080u)"),
    ("read before the other warps wrote", KINDS, "  __syncthreads();\n", ""),
    ("tiles one further", KINDS, "const int tile = word * 32 + warp;", "const int tile = word * 32 + warp + 1;"),
    ("blocks of the whole tile past the end", KINDS, "tile * Keys, keys_of(tile))", "tile * Keys, Keys)"),
]

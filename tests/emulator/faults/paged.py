"""Faults in packed rows over pages that the emulator has to find: as faults/attention.py, by kernel of its tests."""

_PAGES = "common/pages.cuh"
_TASK = "decode/decode_task.cuh"
_SM80 = "sm80/forward.cuh"
PAGED = {
    "64-bf16": [
        ("places read before they are known", _SM80, "@places_known", ""),
        (
            "places of the tile at hand overwritten",
            _SM80,
            "tiles.above(n), turn ^ 1, tiles.key_end",
            "tiles.above(n), turn, tiles.key_end",
        ),
        (
            "values of the tile to come",
            _SM80,
            "p.value_strides.row, page_tiles.places(turn)",
            "p.value_strides.row, page_tiles.places(turn ^ 1)",
        ),
        ("keys past the end are read", _PAGES, "if (key < key_end)", "if (key >= 0)"),
        ("slots of another block", _PAGES, "key - j * block_size", "key - j * (block_size - 1)"),
        ("a block that is not there", _PAGES, "block < blocks ?", "block <= blocks ?"),
        ("a hole is seen", _PAGES, "!(bits >> F::key(i) % 32 & 1)", "false"),
        ("the second word of a tile's keys", _PAGES, "F::key(i) / 32 == w &&", "F::key(i) / 32 == 0 &&"),
        (
            "keys from where packed ones would begin",
            _PAGES,
            "p.cu_k[batch + 1] - p.cu_k[batch], p.kv_len",
            "p.cu_k[batch + 1], p.kv_len",
        ),
        ("rows aligned at the top", _PAGES, "if (p.bottom_right) s.keys.offset", "if (false) s.keys.offset"),
        ("sequences of nobody", _TASK, "rows <= task.few_rows ?", "rows < task.few_rows ?"),
        ("rows of decoding aligned at the bottom", _TASK, "!packed || task.bottom_right", "true"),
        ("tiles of the sequence before", _TASK, "first(middle) <= number", "first(middle) < number"),
        ("rows of the sequence before", _TASK, "row = begin + i % q_len", "row = i % q_len"),
        (
            "queries of the first sequence",
            "decode/decode_mma.cuh",
            "(part.sequence.q_begin + i % q_len)",
            "(i % q_len)",
        ),
        (
            "rows of a merge",
            "decode/decode_merge.cuh",
            "packed.row0 + blockIdx.x % tile_rows",
            "blockIdx.x % tile_rows",
        ),
    ],
    "128-fp16": [
        ("columns past head_dim are read", _PAGES, "at.outer >= 0 && chunk * kLanes < dim", "at.outer >= 0"),
    ],
    "192-bf16-loose": [
        ("numbers behind head_dim", _PAGES, "if (at.outer >= 0 && d < dim)", "if (at.outer >= 0)"),
    ],
    "fp32": [
        (
            "values of the tile to come",
            "fp32/forward.cuh",
            "page_tiles.places(turn), is_key",
            "page_tiles.places(is_key ? turn : turn ^ 1), is_key",
        ),
        ("queries of the first sequence", "decode/decode_fma.cuh", "(sequence.q_begin + row % q_len)", "(row % q_len)"),
    ],
}

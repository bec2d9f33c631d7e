"""Faults in decoding that the emulator has to find: as faults/attention.py, by kernel of emulator/test_decode.py."""

_MMA = "decode/decode_mma.cuh"
_FMA = "decode/decode_fma.cuh"
_BYTES = "common/bytes.cuh"
DECODE = {
    "128-fp16": [
        (
            "tiles read before they landed",
            _MMA,
            "ptx::cp_async_wait<Stages - 2>();",
            "ptx::cp_async_wait<Stages - 1>();",
        ),
        ("tiles that other lanes copied", _MMA, "@tile_landed", ""),
        ("refilled while read", _MMA, "(stage + Stages - 1) % Stages", "stage"),
        ("results over copies in flight", _MMA, "    ptx::cp_async_wait<0>();\n", ""),
        ("results of warps read too early", _MMA, "@results_there", ""),
        ("keys of a row by another lane", _MMA, "(place.slot), row)", "(place.slot), row ^ 1)"),
        ("columns past head_dim are read", _MMA, "at.outer >= 0 && chunk * 8 < dim", "at.outer >= 0"),
        (
            "heads of a group in the wrong order",
            _MMA,
            "head * task.group + i / q_len) * task.q_head",
            "head * task.group + i % task.group) * task.q_head",
        ),
        (
            "a value that is hidden leaks",
            _MMA,
            "if (decltype(guarded)::value && ptx::any(!all_finite<T>(b)))",
            "if (false)",
        ),
        ("whole tiles taken for granted", _MMA, "const bool whole = there == 0xffffu && ", "const bool whole = "),
        ("outputs not brought to the maximum", _MMA, "acc[j][2] *= shrink[1], acc[j][3] *= shrink[1];", ""),
        (
            "a ring that does not turn",
            "decode/decode_task.cuh",
            "task.ring && slot >= task.capacity ? slot - task.capacity : slot",
            "slot",
        ),
        ("lengths past the cache", "decode/decode_task.cuh", "length < task.longest ? length : task.longest", "length"),
        (
            "a window over the prefix again",
            "decode/decode_task.cuh",
            "sequence.total = sequence.seen.count();",
            "sequence.total = sequence.seen.prefix + sequence.seen.end, sequence.seen.begin = 0;",
        ),
        (
            "scores in log2 units beside a floating mask",
            "decode/decode_task.cuh",
            "return task.mask_kind > MaskElement::boolean;",
            "return false;",
        ),
        ("a mask from the first key of a ring", "decode/decode_scores.cuh", " + origin * task.mask_col", ""),
        (
            "keys before those that all rows see",
            "decode/decode_task.cuh",
            "(whole, item, count)",
            "(whole, item + 1, count - 1)",
        ),
        (
            "a tile that begins in the prefix taken for whole",
            "decode/decode_task.cuh",
            "seen.one_piece_of(whole, item, count)",
            "(item < seen.prefix || seen.one_piece_of(whole, item, count))",
        ),
        ("outputs that nobody wrote", "decode/decode_merge.cuh", "if (!(weights[split] < Real(0))) value", "value"),
        (
            "weights read too early",
            "decode/decode_merge.cuh",
            "sums[warp] = sum;\n  __syncthreads();",
            "sums[warp] = sum;",
        ),
    ],
    "128-bf16-64rows": [
        ("tiles that other warps copied", _MMA, "      __syncthreads();\n    else", "      __syncwarp();\n    else"),
        ("rows of another warp", _MMA, "result(Shared ? r / kWarpRows : w)", "result(Shared ? 0 : w)"),
    ],
    "128-fp16-bytes": [
        ("numbers before they are expanded", _MMA, "@expanded", ""),
        ("scales of keys for values", _MMA, "keys ? task.key_scale : task.value_scale;", "task.key_scale;"),
        ("keys without their scale", _MMA, "*= scales[i / 4 * 8 + i % 2];", "*= 1.f;"),
        ("values without their scale", _MMA, "weight * scales[i / 2 * 8 + i % 2];", "weight;"),
        ("a hidden key's scale leaks", _MMA, "weight == 0.f ? 0.f : weight * scales", "weight * scales"),
        ("outputs in a unit of their own", _MMA, "acc[i / 4][i % 4] *= unit[i % 4 / 2];", "acc[i / 4][i % 4] *= 1.f;"),
        ("a unit that does not move", _MMA, "before = unit[h] * shrink[h];", "before = unit[h];"),
        ("a unit for the whole call", _MMA, "shrink[h] = before * inverse;", ""),
        ("columns past head_dim are read", _MMA, "at.outer >= 0 && chunk * 16 < dim", "at.outer >= 0"),
        ("int8 without a sign", _BYTES, "(two ^ 0x00800080u) | 0x6400", "two | 0x6400"),
        ("e4m3 without a sign", _BYTES, "(two & 0x80008000u) | (two >> 1", "(two >> 1"),
        ("a NaN of a byte is lost", _BYTES, "if (nan & 0x80808080u)", "if (false)"),
        ("bytes of a pair exchanged", _BYTES, "half ? 0x4342 : 0x4140", "half ? 0x4243 : 0x4041"),
    ],
    "128-bf16-64rows-bytes": [
        ("numbers before they are expanded", _MMA, "@expanded", ""),
        ("int8 without a sign", _BYTES, "(two & 0x00800080u) | 0xc300c300u", "0xc300c300u"),
        ("e4m3 without a sign", _BYTES, "(two & 0x80008000u) | (two >> 4", "(two >> 4"),
        ("pairs of a word exchanged", _BYTES, "half ? 0x3424 : 0x1404", "half ? 0x1404 : 0x3424"),
    ],
    "fp32-bytes": [
        ("numbers without a sign", _BYTES, "byte & 0x80u ? -size : size", "size"),
        ("a NaN of a byte is lost", _BYTES, "(byte & 0x7fu) == 0x7fu ? NAN : number", "number"),
        ("keys without their scale", _FMA, "dot *= key_scales[tile % 8 * kKeys + score_key];", ""),
        ("a hidden key's scale leaks", _FMA, "score == -Real(INFINITY) ? 0.f : weight * value", "weight * value"),
        ("scales of another key head", _FMA, "part.head * task.value_scale_head", "task.value_scale_head"),
    ],
    "fp32": [
        ("tiles read before they landed", _FMA, "ptx::cp_async_wait<2>();", "ptx::cp_async_wait<3>();"),
        ("refilled while read", _FMA, "@tile_landed", ""),
        ("places overwritten", _FMA, "every tile % 8 * kKeys", "tile % 2 * kKeys"),
        ("weights read too early", _FMA, "= hides;\n      __syncthreads();", "= hides;"),
        (
            "rows of a reduction exchanged",
            _FMA,
            "upper ? sum[r + w] : sum[r], send",
            "upper ? sum[r] : sum[r + w], send",
        ),
        ("a value that is hidden leaks", _FMA, "guarded && weight.x[r] == Real(0)", "false"),
        (
            "a ring without its oldest key",
            "decode/decode_task.cuh",
            "length - task.capacity : 0",
            "length - task.capacity + 1 : 0",
        ),
        ("a ring's first slot", "decode/decode_task.cuh", "slot >= task.capacity ?", "slot > task.capacity ?"),
        ("a block that is not there", "common/pages.cuh", "block < blocks ?", "block <= blocks ?"),
        ("a sink alone", "decode/decode_scores.cuh", "lse = Real(sink);", "lse = -Real(INFINITY);"),
        ("a large sink", "decode/decode_scores.cuh", "inverse = Real(weight / whole);", "inverse = Real(1 / whole);"),
        ("-inf of a mask counts", "decode/decode_scores.cuh", "bias == -Real(INFINITY) ? bias : score", "score"),
        ("low masks are one number", "decode/decode_scores.cuh", "score + bias;", "score + fmax(bias, Real(-1e38));"),
    ],
    "fp16-loose": [
        ("numbers behind head_dim", _FMA, "if (at.outer >= 0 && d < dim)", "if (at.outer >= 0)"),
    ],
}

_ROWS = "cache/cache_rows.cuh"
_PAGED = "cache/paged.cuh"
CACHES = [  # of emulator/test_caches.py
    ("tokens of the padding", _ROWS, "at(batch, head, task.tokens - count + t)", "at(batch, head, t)"),
    (
        "a length that moves on before all have read it",
        _ROWS,
        "    __syncthreads();\n    if (threadIdx.x == 0) task.lengths",
        "    if (threadIdx.x == 0) task.lengths",
    ),
    ("tokens past the capacity", _ROWS, "t < oldest || at >= limit", "t < oldest"),
    (
        "a cycle in place",
        _ROWS,
        "  __syncthreads();\n  each([](const Unit*, Unit* to",
        "  each([](const Unit*, Unit* to",
    ),
    ("every holder copies", _PAGED, "== block) holders--", "== -2) holders--"),
    (
        "free blocks taken twice",
        _PAGED,
        "task.takes[4 * item + 1] = wanted + before",
        "task.takes[4 * item + 1] = wanted",
    ),
    (
        "a shared block kept where none is free",
        _PAGED,
        "to = row[growth.have / task.block_size] = take();",
        "to = take(); if (to >= 0) row[growth.have / task.block_size] = to;",
    ),
    ("counts read while others change them", _PAGED, "@counts_read", ""),
    ("new holders not counted", _PAGED, "if (here >= 0) ptx::atomic_add(task.refs + here, 1);", ""),
    ("a length below 0 moves on", "cache/lengths.cuh", "(have < 0 ? 0 : have) + new_tokens", "have + new_tokens"),
    ("a source behind the last", _ROWS, "index[item] < batch ?", "index[item] <= batch ?"),
    (
        "keys beside the window left out",
        _ROWS,
        "s.seen.between(key, kNear)",
        "s.seen.between(key, kNear) || key >= s.seen.prefix + kNear && key < s.seen.begin",
    ),
    (
        "keys beside the prefix left out",
        _ROWS,
        "s.seen.between(key, kNear)",
        "key >= s.seen.prefix && key < s.seen.begin - kNear",
    ),
    ("blocks that are not there", _PAGED, "return block < task.blocks ? block : -1;", "return block;"),
    (
        "tokens into blocks that are not there",
        _ROWS,
        "if (outer < 0 || outer >= task.blocks) return false;",
        "if (outer < 0) return false;",
    ),
]

BYTE_ROWS = [  # of emulator/test_byte_rows.py
    (
        "the largest number of a few lanes",
        "cache/byte_rows.cuh",
        "w = 1; w < 32; w *= 2) top",
        "w = 1; w < 16; w *= 2) top",
    ),
    ("a row that is not finite taken for one", "cache/byte_rows.cuh", "finite = !ptx::any(!finite);", "finite = true;"),
    ("an infinite number sets the scale", "cache/byte_rows.cuh", "if (size < INFINITY)", "if (size == size)"),
    (
        "scales of the first head",
        "cache/byte_rows.cuh",
        "bytes.scale[i].at(outer, head, slot)",
        "bytes.scale[i].at(outer, 0, slot)",
    ),
    ("numbers cut, not rounded", _BYTES, "(size + 0x7ffffu + (size >> 20 & 1u)) >> 20", "size >> 20"),
    ("small numbers of e4m3", _BYTES, "size < 0x3c800000u ? small", "false ? small"),
    ("a scale too small to divide by", _BYTES, "wanted < 0x1p-126f ? 0x1p-126f : wanted", "wanted"),
    ("a block that is nowhere is read", "cache/byte_rows.cuh", "if (at.outer >= 0)", "if (true)"),
]

"""Faults of gated linear attention's kernels that the emulator has to find: (dtype, what, file in csrc/cuda/kernels,
text there, text instead of it)."""

import torch

_CHUNK, _PAIRS, _WALK, _GRADIENTS, _ROWS, _STEP = (
    f"gated/{x}.cuh" for x in ("chunk", "pairs", "walk", "gradients", "rows", "step")
)
_SIXTEEN_BITS = [
    ("a number that a row does not see goes to tensor cores", _CHUNK, "@not_finite", "if (false) {"),
    ("value heads read the wrong query head", _CHUNK, "int64_t(head) * task.q_heads / task.v_heads", "head"),
    ("a sequence's chunks begin in that before", _CHUNK, "first / rows + n}", "first / rows}"),
    ("a column's scale in place of a row's", _CHUNK, "scales ? scales[row]", "scales ? scales[row ^ 1]"),
    ("parts are put while they are read", _PAIRS, "@parts_read", ""),
    ("parts are scaled while a block reads them", _PAIRS, "@block_read", ""),
    ("what is written without beta", _PAIRS, "if (task.delta) of_w *= gated_beta<Real>(task, batch, head, row);", ""),
    ("a row does not read what it writes", _PAIRS, "every is_key ? j < i : j <= i", "j < i"),
    (
        "gates of the blocks between left out",
        _PAIRS,
        "product *= up[block * kGatedBlock + kGatedBlock - 1];",
        "product *= Real(1);",
    ),
    ("gates a channel of the blocks between left out", _PAIRS, "x *= whole[block * kDepth + k];", "x *= Real(1);"),
    ("a writer's gate counts", _PAIRS, "if (i > j) written *=", "written *="),
    (
        "the inverse leaves a product out",
        _PAIRS,
        "for (int k = c + col; k < r; k++)",
        "for (int k = c + col + 1; k < r; k++)",
    ),
    ("a row's own block is left out of the inverse", _PAIRS, "k <= row; k++)", "k < row; k++)"),
    ("a chunk is put while the one before is read", _WALK, "@chunk_read", ""),
    ("a part is put while it is read", _WALK, "@part_read", ""),
    ("E is kept while it is read", _WALK, "@errors_read", ""),
    ("P becomes results while it is read", _WALK, "@pairs_read", ""),
    ("a chunk is put while the one behind is read", _WALK, "@chunk_read_back", ""),
    ("a part is put while it is read, backwards", _WALK, "@part_read_back", ""),
    ("Z is kept while E is read", _WALK, "@errors_read_back", ""),
    ("the state does not decay", _WALK, "decays && d < task.head_dim ? total[d] : Real(1)", "Real(1)"),
    ("the gradient of the state does not decay", _WALK, "if (kind == 1 && task.kind != Gate::none) decay();", ""),
    ("reads of keys add to the gradient", _WALK, "query ? Real(1) : Real(-1)", "Real(1)"),
    ("rows past the end are written", _WALK, "if (row >= c.count || left <= 0) continue;", "if (left <= 0) continue;"),
    ("rows past the end are read", _WALK, "const int left = row < c.count ? rows", "const int left = true ? rows"),
    ("the state's rows past the keys' columns", _WALK, "from && row < task.head_dim &&", "from &&"),
    ("a further value column of a state", _WALK, "if (first_col + col < task.v_head_dim) x[", "x["),
    ("A is put while it is read", _GRADIENTS, "@tiles_read", ""),
    ("rows are kept while they are read", _GRADIENTS, "@rows_used", ""),
    ("the key reads with the query's sign", _GRADIENTS, "if (is_key) state = -state;", ""),
    ("what others read of a row counts for its gate", _GRADIENTS, "read_sums.acc[i][e] -= w[at] * pair;", ""),
    (
        "a state's gate without those of the chunk",
        _GRADIENTS,
        "state_gate(task.reads, last, d) * through[d]",
        "through[d]",
    ),
    (
        "a number's gate without those of the chunk",
        _GRADIENTS,
        "row_sum(through, 0, 0) * state_gate(task.reads, last, 0)",
        "row_sum(through, 0, 0)",
    ),
    ("the key's gradient as a reader is lost", _GRADIENTS, "(task.delta ? key : Real(0))", "Real(0)"),
    ("a query of the group is lost within a block", _GRADIENTS, "first_time ? writer : sum + writer", "writer"),
    ("a row's own product is left out", _GRADIENTS, "result += own * w[at];", ""),
    (
        "gates between blocks left out backwards",
        _GRADIENTS,
        "product *= whole[block * kCols + col];",
        "product *= Real(1);",
    ),
    ("a norm without its own gradient", _ROWS, "dot = warp_sum(dot) * inverse * inverse;", "dot = Real(0);"),
    ("one head for all that share a row", _ROWS, "there && h < shared; h++", "there && h < 1; h++"),
    ("rows behind the last sequence", _ROWS, "!task.offsets || at < task.offsets[task.sequences];", "true;"),
    ("a row's own gate counts for what it writes", _ROWS, "int k = write ? row + 1 : 0;", "int k = write ? row : 0;"),
    ("one slice for all", _ROWS, "slice < gated_slices(task.head_dim); slice++", "slice < 1; slice++"),
    ("a step without decay", _STEP, "state[j] *= decay[d];", ""),
    ("a step without correction", _STEP, "if (task.delta) error -= over_warps(held);", ""),
    ("columns that are not there", _STEP, "if (!task.state || !there) return;", "if (!task.state) return;"),
]
GATED = [(torch.bfloat16, *fault) for fault in _SIXTEEN_BITS]
GATED += [
    (
        torch.float32,
        "a part of gated linear attention's product left out",
        "linear/products.cuh",
        "ptx::mma_m16n8k8(part, low, x.high, y.high);",
        "",
    ),
    (
        torch.float64,
        "a triangle without its diagonal",
        _CHUNK,
        "k + int(Strict) <= row + r;",
        "k < row + r;",
    ),
]

"""Faults of token-sparse attention's kernels that the emulator has to find, by the program of test_sparse.py: (what,
file in csrc/cuda/kernels, text there, text instead of it)."""

_FORWARD, _QUERY, _KEY, _TASK, _ROW, _LISTS, _SUMS, _MMA, _FMA = (
    f"sparse/{x}.cuh"
    for x in (
        "forward", "query_gradient", "key_gradient", "task", "backward_row", "lists", "key_sums", "mma_tiles",
        "fma_tiles",
    )
)  # fmt: skip
SPARSE = {
    "64-bf16": [
        ("a tile read before it has landed", _TASK, "@tile_landed", ""),
        ("scores read before they are there", _FORWARD, "@scores_there", ""),
        ("weights read before they are there", _FORWARD, "@weights_there", ""),
        ("factors written while they are read", _FORWARD, "@factors_read", ""),
        ("a row sees what only others of its block see", _FORWARD, " && named[key] < limit;", ";"),
        ("a slot without a name counts", _FORWARD, "named[key] >= 0 && named[key] < limit", "named[key] < limit"),
        ("the sum is not shrunk", _FORWARD, "sum = sum * shrink + added;", "sum += added;"),
        ("outputs are not shrunk", _FORWARD, "sums.shrink(factors);", ""),
        ("no tile behind an empty one", _TASK,
         "if (any(named)) f(tile, stage, named);", "if (!any(named)) break;\n      f(tile, stage, named);"),
        ("items past the end are written", _FORWARD, "if (first + r >= unit.items) return;", ""),
        ("an index past the keys is read", _TASK, "key >= 0 && key < most", "key >= 0"),
        ("another head's query", _TASK, "head * t.group + item / rows;", "head * t.group + item % t.group;"),
        ("a sink alone is not in lse", _TASK, "lse = Real(sink);", ""),
        ("the next tile over the one that is read", _TASK, "start(fetched, stage ^ 1);", "start(fetched, stage);"),
        ("products read before they are there", _QUERY, "@products_there", ""),
        ("gradients read before they are there", _QUERY, "@gradients_there", ""),
        ("softcap's slope is left out", _ROW, "(of_values - delta) * slope;", "(of_values - delta);"),
        ("a row's delta is left out", _ROW, "(of_values - delta) * slope;", "of_values * slope;"),
        ("the gradient of lse has the wrong sign", _ROW, "sum -= static_cast<const Real*>(task.grad_lse)[place];",
         "sum += static_cast<const Real*>(task.grad_lse)[place];"),
        ("sinks of the first batch item alone", _ROW, "task.shared_sinks ? task.batch : first + 1", "first + 1"),
        ("a sink that is alone has no gradient", _ROW, "sink == -Real(INFINITY) ? 0 : 1;", "Real(0);"),
        ("rows read before they have landed", _TASK, "@rows_landed", ""),
        ("keys: products read before they are there", _KEY, "@products_there", ""),
        ("keys: weights read before they are there", _KEY, "@weights_there", ""),
        ("a key named twice adds once", _KEY, "scale * static_cast<Real>(times[k])", "scale"),
        ("a key named twice is written twice", _KEY, "return ptx::any(earlier) ? -1 : times;", "return times;"),
        ("a pair in its neighbour's place", _LISTS, "((1u << row % 32) - 1)", "((2u << row % 32) - 1)"),
        ("the sums of warps written while they are read", _LISTS, "@parts_read", ""),
        ("the list has no end", _LISTS, "if (first + i == size - 1) begins[size] = at;", ""),
        ("blocks before are not counted", _LISTS, "BlockCount(earlier, parts).total", "earlier"),
        ("rows that name a key twice are not known", _LISTS,
         "if (before & bit) ptx::atomic_or(lists.repeats + int64_t{list} * lists.words + row / 32, bit);", ""),
        ("a part of the rows replaces the one before", _SUMS, "pairs.begins ? sum : to + sum", "sum"),
        ("columns past the end are read", _MMA, "valid && c * 8 < dim", "valid"),
        ("the last columns are left out", _MMA, "kk * 32 >= dim", "kk * 32 + 32 > dim"),
        ("a hidden NaN leaks", _MMA, "if (!guarded || !ptx::any(!all_finite<T>(y)))", "if (true)"),
    ],
    "fma-fp32": [
        ("the tile that is read is written", _TASK, "@tile_read", ""),
        ("the rows that are read are written", _TASK, "@rows_read", ""),
        ("a slice of the product is left out", _FMA, "w = kSlices / 2; w > 0", "w = kSlices / 4; w > 0"),
        ("a hidden NaN leaks", _FMA, "guarded && weight[r] == Real(0) ? Real(0) : weight[r] * y", "weight[r] * y"),
        ("columns past the end are read", _FMA, "valid && d < dim ?", "valid ?"),
    ],
}  # fmt: skip

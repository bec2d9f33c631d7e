"""Faults of linear attention's kernels that the emulator has to find: (dtype, what, file in csrc/cuda/kernels, text
there, text instead of it)."""

import torch

_WALK, _ROWS, _PRODUCTS, _PASSES, _PLAN = (
    f"linear/{x}.cuh" for x in ("walk", "row_tiles", "products", "passes", "plan")
)
_SIXTEEN_BITS = [
    (
        "A and B read before all have put them",
        _WALK,
        "        __syncthreads();\n        read_flags();\n        if (kPrefetch",
        "if (kPrefetch",
    ),
    ("the state moves while it is read", _WALK, "@state_read", ""),
    ("C is put while the chunk before reads it", _WALK, "@chunk_read", ""),
    (
        "P read before all have put it",
        _WALK,
        "        write_flag();\n        __syncthreads();\n        read_flags();\n        add",
        "add",
    ),
    (
        "X put where P is still read",
        _WALK,
        "g = lane / 4, t = lane % 4;\n    __syncthreads();",
        "g = lane / 4, t = lane % 4;",
    ),
    ("what is hidden counts", _WALK, "x = band.seen(row, col) ? x : Real(0);", ""),
    ("a row does not see its own key", _PRODUCTS, "col >= row : col <= row);", "col > row : col < row);"),
    ("the state moves before the last head of a group has read it", _WALK, "@state_moves", "const bool moves = joins;"),
    ("rows past the end are written", _WALK, "if (at >= end || left <= 0)", "if (left <= 0)"),
    ("every slice writes the one vector", _WALK, "(task.extra == LinearExtra::value_column && first_col)", "false"),
    ("the gradient without scale", _WALK, " * Real(task.slope_of.factor)", ""),
    ("rows past the end are read", _ROWS, "row < end && col < rows.cols", "col < rows.cols"),
    ("keys that do not exist count", _ROWS, "&& !(head.blocked && head.blocked[row])", ""),
    (
        "phi of columns that are not there",
        _ROWS,
        "j < left ? feature(rows.map, x[j]) * factor : Real(0)",
        "feature(rows.map, x[j]) * factor",
    ),
    ("the state is not rounded", _PRODUCTS, "if constexpr (RoundB)", "if constexpr (false)"),
    (
        "an element of A in another's place",
        _PRODUCTS,
        "{a(g, k + t), a(g + 8, k + t)",
        "{a(g, k + t), a(g + 8, k + t + 1)",
    ),
    ("an infinity goes to tensor cores", _WALK, "if (!bad)", "if (true)"),
    (
        "a piece begins with its own sum",
        _PASSES,
        "if (!task.total) s = sum;\n    sum += own;",
        "sum += own;\n    if (!task.total) s = sum;",
    ),
    ("pieces from the wrong end", _PASSES, "task.reverse ? task.pieces - 1 - k : k", "k"),
    ("no denominator, no zero", _PASSES, "denominator == Real(0) ? Real(0) : ", ""),
]
LINEAR = [(torch.bfloat16, *fault) for fault in _SIXTEEN_BITS]
LINEAR += [
    (
        torch.float32,
        "a part of the product left out",
        _PRODUCTS,
        "ptx::mma_m16n8k8(part, low, x.high, y.high);",
        "",
    ),
    (
        torch.float64,
        "the further column of C left out",
        _PRODUCTS,
        "if (has_more) add(sums.more, more(k), Real(0));",
        "",
    ),
]

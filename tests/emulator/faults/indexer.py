"""Faults of the lightning indexer's kernels that the emulator has to find, by the program of test_indexer.py: (what,
file in csrc/cuda/kernels, text there, text instead of it)."""

_LIST, _TOPK, _COLUMNS, _GRADIENTS, _TASK = (
    f"sparse/{x}.cuh" for x in ("topk_list", "topk", "indexer_columns", "indexer_gradients", "task")
)
TOPK = {
    "64-bf16": [
        ("keys read before they have landed", _TOPK, "@keys_landed", ""),
        ("scores read before they are there", _TOPK, "@scores_there", ""),
        ("the next keys over those that are read", _TOPK, "kKeys, stage ^ 1)", "kKeys, stage)"),
        ("a row takes keys that it does not see", _TOPK, "first + i < limit);", "first + i < end);"),
        ("heads that are not there", _TOPK, "if (head >= heads) break;", ""),
        ("no relu", _TOPK, "weight * (x <= Real(0) ? Real(0) : x)", "weight * x"),
        ("sums of the first heads alone", _TOPK, "for (int w = 4; w < 32; w *= 2)", "for (int w = 4; w < 16; w *= 2)"),
        ("too many of the same score", _LIST, "left -= min(equal, left);", ""),
        ("a NaN is the lowest", _LIST, "score == score ? score + Real(0) : Real(INFINITY)", "score + Real(0)"),
        ("a digit too high", _LIST, "if (all >= left)", "if (all + 1 >= left)"),
        ("a list is not cut", _LIST, "if (count > capacity - 32) cut();", ""),
        ("sums of warps written while they are read", _LIST, "@list_parts_read", ""),
        ("all of the lowest score", _TOPK, "(same && earlier < left)", "same"),
        ("what is left over is not written", _TOPK, "scores[i] = -Real(INFINITY), indices[i] = -1;", "{}"),
        ("the first part alone", _TOPK, "lists.indices[int64_t{p} * task.capacity + i]", "lists.indices[i]"),
    ],
    "fma-fp32": [
        ("tiles written while they are read", _TOPK, "@products_read", ""),
        ("tiles read before they are there", _TOPK, "@tiles_there", ""),
        ("products read before they are there", _TOPK, "@products_there", ""),
    ],
}  # fmt: skip
LOSS = {
    "64-bf16": [
        ("rows read before they have landed", _COLUMNS, "@rows_landed", ""),
        ("products read before they are there", _COLUMNS, "@products_there", ""),
        ("sums read before they are there", _COLUMNS, "@sums_there", ""),
        ("a thread's heads alone", _COLUMNS, "for (int s = 1; s < kShare; s++)", "for (int s = 1; s < 1; s++)"),
        ("parts of the row written while they are read", _COLUMNS, "@loss_parts_read", ""),
        ("the target's entropy is left out", _COLUMNS, "(ptx::log2(p) - logit)", "-logit"),
        ("the target is not divided by its sum", _COLUMNS, "factor - target[i] * inverse", "factor - target[i]"),
        ("a slot without a name has a gradient", _COLUMNS, "scores[i] = there ?", "scores[i] = true ?"),
        ("keys read before they have landed", _TASK, "@tile_landed", ""),
        ("gradient: products read before they are there", _GRADIENTS, "@products_there", ""),
        ("gradients read before they are there", _GRADIENTS, "@gradients_there", ""),
        ("a score below 0 has a gradient", _GRADIENTS, "score <= Real(0) ? Real(0) : d * weight", "d * weight"),
        ("the weights' gradient without grad_loss", _GRADIENTS, "weighed(d, score)", "weighed(d / grad, score)"),
        ("of a row's threads one sums", _GRADIENTS,
         "for (int w = kPer / 2; w > 0; w /= 2) of_weight += ptx::shfl_xor(of_weight, w);", ""),
        ("keys: rows read before they have landed", _TASK, "@rows_landed", ""),
        ("keys: products read before they are there", _GRADIENTS, "@key_products_there", ""),
        ("keys: gradients read before they are there", _GRADIENTS, "@key_gradients_there", ""),
        ("a key named twice adds once", _GRADIENTS, "valid) own = of_all(", "valid) of_all("),
        ("a key named twice is written twice", _GRADIENTS, "first = !ptx::any(earlier);", "first = true;"),
        ("keys: a score below 0 has a gradient", _GRADIENTS,
         "!(products[row * kPitch + k] * scale <= Real(0))", "true"),
    ],
    "fma-fp32": [
        ("the tile that is read is written", _TASK, "@tile_read", ""),
        ("keys: the rows that are read are written", _TASK, "@rows_read", ""),
    ],
}  # fmt: skip

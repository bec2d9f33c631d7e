"""Runs the emulator's caches (kv_cache.cpp): operators that change a state of tensors."""

import torch

from . import run

OPERATORS = ("append", "truncate", "reorder", "paged_append", "paged_truncate", "paged_reorder", "gather")
PROGRAM = ("kv_cache", ())


def call(program, operator, state, *, key=None, value=None, counts=None, wanted=None, lowest=None, order="forward",
         unit=2, parts=1, width=3, ring=False, left=-1, prefix=0):  # fmt: skip
    """The state after an operator: lengths (batch,), block_table (batch, max_blocks), block_refs (blocks,), key_cache,
    value_cache (float16), as dict; before them, of a gather, keys and values (batch, heads, capacity, dim) and held.

    wanted: new_lengths or batch_index. unit: bytes of the pieces that rows are copied in. parts, width: as the
    launches have them."""
    batch, blocks, table = len(state["lengths"]), len(state["block_refs"]), state["block_table"]
    _, heads, slots, dim = state["key_cache"].shape
    v_dim = state["value_cache"].shape[3]
    capacity = slots * table.shape[1] if blocks else slots
    arguments = {
        "operator": OPERATORS.index(operator), "batch": batch, "heads": heads, "dim": dim, "v_dim": v_dim,
        "tokens": 0 if key is None else key.shape[2], "capacity": capacity, "blocks": blocks,
        "block_size": slots if blocks else 0, "max_blocks": table.shape[1], "counts": counts is not None,
        "wanted": wanted is not None, "lowest": lowest is not None, "unit": unit, "parts": parts, "width": width,
        "ring": ring, "left": left, "prefix": prefix,
    }  # fmt: skip
    given = [*state.values(), *(torch.tensor(x) for x in (counts, wanted, lowest) if x is not None)]
    given += [x for x in (key, value) if x is not None]
    outputs = [(tuple(x.shape), x.dtype) for x in state.values()]
    if operator == "gather":
        outputs = [((batch, heads, capacity, d), torch.float16) for d in (dim, v_dim)] + [
            ((batch,), torch.int64),
            *outputs,
        ]
    results = run.run(program, given, outputs, arguments | run.order_arguments(order))[0]
    after = dict(zip(state, results[-len(state) :]))
    return after if operator != "gather" else (*results[:3], after)

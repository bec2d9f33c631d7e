"""trace_state: linear attention with gates and the delta rule, what each row does to the state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops.gated_linear_attention import UPDATES, gated_linear_attention
from ._stages_gated import gated_stages
from .records import Rows, indices
from .trace import Trace


@torch.no_grad()
def trace_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    update: str = "gated_delta",
    scale: float | None = None,
    qk_l2norm: bool = False,
    initial_state: Tensor | None = None,
    rows: Rows = None,
    heads: Sequence[int] | Tensor | None = None,
) -> Trace:
    """Every step of attnjourney.gated_linear_attention by name.

        seen = attnjourney.trace_state(query, key, value, gate, beta, rows=[-1])
        seen.predicted  # (B, heads, 1, Dv): what the state said of the last key
        print(seen)     # a table

    In float32 (float64 for float64), in the order of the formula, without those that an update rule does not have:

        query, key, value    of the rows and heads wanted, of norm 1 with qk_l2norm: (B, heads, rows, D or Dv)
        state_before         (B, heads, rows, D, Dv), as each row finds it
        decay, decayed_state e^gate, (B, heads, rows) or by channel (B, heads, rows, D); the state after it
        predicted            S^T k, what the state says of the key: (B, heads, rows, Dv)
        error                value - predicted
        beta, written        (B, heads, rows); beta * error, or the value where there is no delta rule
        state_after          with k written^T added: (B, heads, rows, D, Dv)
        output               scale S^T q: (B, heads, rows, Dv), in query's dtype

    Args:
        rows, heads: those wanted, of the output, all by default: memory is O(heads * rows * D * Dv).
        the others: as in attnjourney.gated_linear_attention. Packed sequences are traced one at a time.

    Returns:
        Trace, a mapping; not differentiable. Its `result` is what the operator itself gives: the output of all rows
        and heads, and the states after the last row.

    Raises:
        as attnjourney.gated_linear_attention; ValueError for a row or a head that is not there, and for no rows.
    """
    result = gated_linear_attention(
        query, key, value, gate, beta, update=update, scale=scale, qk_l2norm=qk_l2norm, initial_state=initial_state,
        return_state=True,
    )  # fmt: skip
    call = {
        "query": query,
        "key": key,
        "value": value,
        "gate": gate,
        "beta": beta,
        "initial_state": initial_state,
        "cu_seqlens": None,
        "update": UPDATES.index(update),
        "scale": max(1, query.shape[-1]) ** -0.5 if scale is None else scale,
        "qk_l2norm": qk_l2norm,
    }
    heads = indices("heads", heads, result[0].shape[1])
    rows = indices("rows", rows, query.shape[2])
    return Trace("gated_linear_attention", gated_stages(call, heads, rows), heads, rows, result)

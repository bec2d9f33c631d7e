"""The stages of linear attention with gates and the delta rule, row after row, for chosen heads and rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._dtypes import accumulation_dtype
from ...ops.gated_linear_attention import UPDATES


def by_head(x: Tensor, heads: Tensor, count: int) -> Tensor:
    """x (N, Hx, ...) -> (N, heads, ...): of these heads among `count`, a multiple of Hx."""
    return x.index_select(1, heads.to(x.device) // max(1, count // max(1, x.shape[1])))


def gated_by_head(call: dict, heads: Tensor) -> dict[str, Any]:
    """The arguments of reference.gated_linear_attention of a call of the operator, with a query, a key and a state for
    each of these heads of its output."""
    states = call["value"].shape[1]
    count = max(call["query"].shape[1], states)
    own = heads // max(1, count // max(1, states))
    named: dict[str, Any] = {"query": by_head(call["query"], heads, count)}
    for name in ("key", "value", "gate", "beta", "initial_state"):
        named[name] = None if call[name] is None else by_head(call[name], own, states)
    others = {name: call[name] for name in ("scale", "qk_l2norm", "cu_seqlens")}
    return named | others | {"update": UPDATES[call["update"]]}


def gated_stages(call: dict, heads: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """name -> (B, heads, rows, ...), those of trace_state: O(heads * rows * D * Dv) memory."""
    if not len(rows):
        raise ValueError("rows: expected at least one, got none")
    named = gated_by_head(call, heads)
    dtype, wide = named["query"].dtype, accumulation_dtype(named["query"].dtype)
    q, k, v = (named[name].to(wide) for name in ("query", "key", "value"))
    if named["qk_l2norm"]:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    gate, beta, state = (None if named[n] is None else named[n].to(wide) for n in ("gate", "beta", "initial_state"))
    if state is None:
        state = q.new_zeros(*q.shape[:2], k.shape[3], v.shape[3])
    seen: dict[int, dict[str, Tensor]] = dict.fromkeys(rows.tolist(), {})
    for i in range(max(seen) + 1):
        now = {"query": q[:, :, i], "key": k[:, :, i], "value": v[:, :, i], "state_before": state}
        if gate is not None:
            decay = now["decay"] = gate[:, :, i].exp()
            state = now["decayed_state"] = state * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
        written = now["value"]
        if beta is not None:
            now["predicted"] = torch.einsum("bhd,bhde->bhe", now["key"], state)
            now["error"] = now["value"] - now["predicted"]
            now["beta"] = beta[:, :, i]
            written = now["beta"][..., None] * now["error"]
        now["written"] = written
        state = now["state_after"] = state + now["key"][..., None] * written[..., None, :]
        if i in seen:
            now["output"] = (named["scale"] * torch.einsum("bhd,bhde->bhe", now["query"], state)).to(dtype)
            seen[i] = now
    chosen = [seen[i] for i in rows.tolist()]
    return {name: torch.stack([row[name] for row in chosen], 2) for name in chosen[0]}

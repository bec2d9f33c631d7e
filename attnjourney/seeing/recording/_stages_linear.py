"""The stages of linear attention, for chosen heads and rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dtypes import accumulation_dtype
from ...ops.linear_attention import FEATURE_MAPS as NUMBERS
from ...reference.linear_attention import FEATURE_MAPS


def linear_stages(call: dict, heads: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """weights = phi(q) . phi(k) / (their sum + eps): never computed by the operator, which keeps a state instead."""
    query, key, value = call["query"], call["key"], call["value"]
    heads, rows = heads.to(query.device), rows.to(query.device)
    wide = accumulation_dtype(query.dtype)
    group = query.shape[1] // key.shape[1]
    phi = FEATURE_MAPS[next(name for name, n in NUMBERS.items() if n == call["feature_map"])]
    q = phi(query.index_select(1, heads).index_select(2, rows)).to(wide)
    k, v = (x.index_select(1, heads // group) for x in (phi(key).to(wide), value.to(wide)))
    seen = torch.ones(len(rows), key.shape[2], dtype=torch.bool, device=query.device)
    if call["is_causal"]:
        seen = torch.arange(key.shape[2], device=query.device) <= rows[:, None]
    seen = seen.expand(query.shape[0], 1, -1, -1)
    if call["key_padding_mask"] is not None:
        seen = seen & ~call["key_padding_mask"][:, None, None, :]
    seen = seen.expand(-1, len(heads), -1, -1)
    scores = q @ k.mT * call["scale"]
    weights = scores.masked_fill(~seen, 0.0)
    stages = {"phi_query": q, "phi_key": k, "value": v, "scores": scores, "mask": seen}
    state, normalizer = call["initial_state"], call["initial_normalizer"]
    past = torch.zeros((), device=query.device)
    if state is not None:
        past = stages["state_output"] = (q * call["scale"]) @ state.to(wide).index_select(1, heads // group)
    if call["normalize"]:
        total = weights.sum(-1, keepdim=True) + call["eps"]
        if normalizer is not None:
            total = total + (q * call["scale"]) @ normalizer.to(wide).index_select(1, heads // group).unsqueeze(-1)
        stages["normalizer"] = total.squeeze(-1)
        inverse = torch.where(total == 0, 0, 1 / total)
        weights, past = weights * inverse, past * inverse
    stages["weights"] = weights
    hidden = v.masked_fill(call["key_padding_mask"][:, None, :, None], 0) if call["key_padding_mask"] is not None else v
    stages["output"] = (weights @ hidden + past).to(query.dtype)
    return stages

"""The stages of Longformer's attention, for chosen heads and rows: those of local and of global tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...nn import LongformerSelfAttention
from ...nn._parts import split_heads
from ._stages import attention_stages


def longformer_stages(
    module: LongformerSelfAttention, heads: Tensor, rows: Tensor, *, x: Tensor, global_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    if module.training and module.dropout > 0:
        raise ValueError(
            "module: expected a LongformerSelfAttention in evaluation or without dropout, which it draws part by part"
        )
    names = ("query", "key", "value", "query_global", "key_global", "value_global")
    inputs: list[Any] = [split_heads(getattr(module, name)(x), module.num_heads) for name in names]
    inputs += [module.window, module.dilation, global_mask, key_padding_mask]
    return longformer_scores(*inputs, is_causal=module.is_causal, scale=None, heads=heads, rows=rows)


def longformer_scores(
    query: Tensor, key: Tensor, value: Tensor, global_query: Tensor | None, global_key: Tensor | None,
    global_value: Tensor | None, window: int, dilation: int | Sequence[int], global_mask: Tensor | None,
    key_padding_mask: Tensor | None, *, is_causal: bool, scale: float | None, heads: Tensor, rows: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """Local rows see the window and the global keys, by the first three tensors; global rows all, by the others."""
    batch, n_heads, length = query.shape[:3]
    heads, rows = heads.to(query.device), rows.to(query.device)
    keys, at = torch.arange(length, device=query.device), rows[:, None]
    everywhere = torch.ones(batch, length, dtype=torch.bool, device=query.device)
    exists = everywhere if key_padding_mask is None else ~key_padding_mask
    is_global = torch.zeros_like(exists) if global_mask is None else global_mask & exists
    d = torch.tensor([dilation] * n_heads if isinstance(dilation, int) else list(dilation))
    d = d.to(query.device).index_select(0, heads)[:, None, None]
    near = ((keys - at) % d == 0) & ((keys - at).abs() <= d * window)  # (heads, rows, S)
    past = keys <= at if is_causal else everywhere.new_ones(len(rows), length)
    everything = past & exists[:, None, None, :] & exists[:, rows][:, None, :, None]  # (B, 1, rows, S)
    seen = (near | is_global[:, None, None, :]) & everything

    def part(*inputs: Tensor, mask: Tensor) -> dict[str, Tensor]:
        q, k, v = (x.index_select(1, heads) for x in inputs)
        numbers = torch.arange(len(heads)), torch.arange(len(rows))
        return attention_stages(q.index_select(2, rows), k, v, *numbers, attn_mask=mask, scale=scale)

    stages = part(query, key, value, mask=seen)
    if is_global.any() and global_query is not None and global_key is not None and global_value is not None:
        by_global = part(global_query, global_key, global_value, mask=everything.expand_as(seen))
    elif is_global.any():
        by_global = part(query, key, value, mask=everything.expand_as(seen))
    else:
        return stages
    row = is_global[:, rows][:, None, :]  # (B, 1, rows)
    for name, mine in by_global.items():
        if name in ("key", "value"):
            stages[f"global_{name}"] = mine
        else:
            stages[name] = torch.where(row if name == "lse" else row.unsqueeze(-1), mine, stages[name])
    return stages

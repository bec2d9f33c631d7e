"""Which row sees which key, and products in which hidden numbers have no part."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def per_item(x: Tensor, query: Tensor) -> Tensor:
    """(B,) -> (batch dims..., 1, 1, 1), for the heads, rows and keys of each."""
    return x.reshape(*query.shape[:-3], *(1,) * min(3, query.dim()))


def per_head(x: Tensor, query: Tensor) -> Tensor:
    """(Hq,) or (B, Hq) -> (..., Hq, 1, 1)."""
    if x.dim() == 1:
        return x.reshape(*x.shape[: query.dim() - 2], 1, 1)
    return x.reshape(*query.shape[:-2], 1, 1)


def visibility(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    causal_alignment: str,
    window_size: tuple[int, int],
    prefix_length: int,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(..., Hq, L, S): True where the row may see the key; and |row position - key|. With `rows` of these rows alone,
    to which attn_mask then belongs."""
    rows = (torch.arange(query.shape[-2], device=query.device) if rows is None else rows)[:, None]
    keys = torch.arange(key.shape[-2], device=query.device)
    q_len = query.shape[-2] if query_lengths is None else per_item(query_lengths, query)
    kv_len = key.shape[-2] if key_lengths is None else per_item(key_lengths, query)
    position = rows + (kv_len - q_len if causal_alignment == "bottom_right" else 0)  # top-left: key j <= row i
    left, right = (min(w, 1 << 40) for w in window_size)  # position + right must not overflow
    visible = torch.ones(len(rows), key.shape[-2], dtype=torch.bool, device=query.device)
    if is_causal:
        visible = visible & (keys <= position)
    if left >= 0:
        visible = visible & (keys >= position - left)
    if right >= 0:
        visible = visible & (keys <= position + right)
    visible = (visible | (keys < prefix_length)) & (keys < kv_len) & (rows < q_len)
    if attn_mask is not None:
        visible = visible & (attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf)
    return visible.expand(*query.shape[:-2], len(rows), key.shape[-2]), (position - keys).abs()


# A product with 0 still passes on NaN and infinity, so where there are any, every pair (row, key) gets vectors of its
# own, zero where the key is hidden: (..., L, S, E). Then nothing hidden reaches a result or a gradient.


def masked_scores(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    if _finite(query, key):
        return query @ key.mT
    pair = visible.unsqueeze(-1)
    return (torch.where(pair, query.unsqueeze(-2), 0.0) * torch.where(pair, key.unsqueeze(-3), 0.0)).sum(-1)


def weighted_values(weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    if _finite(value):
        return weights @ value
    return (weights.unsqueeze(-1) * torch.where(visible.unsqueeze(-1), value.unsqueeze(-3), 0.0)).sum(-2)


def _finite(*tensors: Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)

"""Longformer's attention in plain PyTorch: the N x N mask of who sees whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .attention import attention


def longformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    global_query: Tensor | None = None,
    global_key: Tensor | None = None,
    global_value: Tensor | None = None,
    window: int = 256,
    dilation: int | Sequence[int] = 1,
    global_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """attnjourney.longformer_attention without dropout."""
    of_globals: tuple[Any, Any, Any] = (global_query, global_key, global_value)
    if global_query is None:
        of_globals = (query, key, value)
    local, everything, is_global, exists = visible(query, window, dilation, global_mask, key_padding_mask, is_causal)
    out = attention(query, key, value, local, scale=scale)
    own = attention(*of_globals, everything, scale=scale)
    out = torch.where(is_global[:, None, :, None], own, out)
    return torch.where(exists[:, None, :, None], out, 0)


def visible(
    query: Tensor,
    window: int,
    dilation: int | Sequence[int],
    global_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor, ...]:
    """What a local token sees (B, H, N, N) and a global one (B, 1, N or 1, N); which tokens are global, which exist
    (both (B, N))."""
    batch, heads, length, _ = query.shape
    none = torch.zeros(batch, length, dtype=torch.bool)
    exists = ~none if key_padding_mask is None else ~key_padding_mask
    is_global = exists & (none if global_mask is None else global_mask)
    distance = torch.arange(length) - torch.arange(length)[:, None]  # j - i
    d = torch.tensor([dilation] * heads if isinstance(dilation, int) else list(dilation))[:, None, None]
    near = (distance % d == 0) & (distance.abs() <= d * window)  # (H, N, N)
    past = (distance <= 0) if is_causal else torch.ones_like(distance, dtype=torch.bool)
    everything = past & exists[:, None, None, :]
    return (near | is_global[:, None, None, :]) & everything, everything, is_global, exists

"""The layer of torch.nn.MultiheadAttention in plain PyTorch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import attention


def mha(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor | None,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    *,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """As attnjourney.ops.mha.mha, all (L, S) weights in memory."""
    weights = in_proj_weight.chunk(3)  # (embed, embed)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (  # (batch, heads, seq, head_dim)
        F.linear(x, weight, bias).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases)
    )
    mask = attention_mask(attn_mask, key_padding_mask, num_heads)
    out = attention(q, k, v, mask, dropout_p=dropout_p, is_causal=is_causal)
    return F.linear(out.transpose(1, 2).flatten(-2), out_proj_weight, out_proj_bias)  # (batch, L, embed)


def attention_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int) -> Tensor | None:
    """The masks of mha (bool True: blocked) as the one mask of attention (bool True: visible).

    attn_mask (L, S) or (batch * num_heads, L, S) and key_padding_mask (batch, S) -> broadcasts to
    (batch, heads, L, S); bool if both are, else their sum with -inf where a bool one blocks.
    """
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, num_heads)))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    added = [mask for mask in masks if mask.dtype != torch.bool]
    blocked = [mask for mask in masks if mask.dtype == torch.bool]
    if not masks:
        return None
    if not added:
        return ~blocked[0] if len(blocked) == 1 else ~(blocked[0] | blocked[1])
    bias = added[0] if len(added) == 1 else added[0] + added[1]
    return torch.where(blocked[0], -math.inf, bias) if blocked else bias

"""The attention layer of GPT in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .attention import attention


def gpt_attention(
    x: Tensor,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    *,
    dropout_p: float = 0.0,
) -> Tensor:
    """As attnjourney.ops.gpt_attention.gpt_attention, all (seq, seq) weights in memory."""
    q, k, v = F.linear(x, qkv_weight, qkv_bias).chunk(3, dim=-1)  # (batch, seq, embed)
    q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))  # (batch, heads, seq, head_dim)
    out = attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    return F.linear(out.transpose(1, 2).flatten(-2), out_weight, out_bias)  # (batch, seq, embed)

from __future__ import annotations

import torch
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention, as in GPT: (batch, seq, embed) -> (batch, seq, embed).

    Args:
        embed_dim: width of the input and the output.
        num_heads: divides embed_dim.
        dropout: probability of dropping an attention weight; in training only.
        bias: whether the two projections have one.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, dropout: float = 0.0, bias: bool = True, device=None, dtype=None
    ):
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads: expected a divisor of embed_dim, {embed_dim}, got {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim, bias, device=device, dtype=dtype)  # query, key, value
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.attnjourney.gpt_attention(  # (batch, seq, embed)
            x,
            self.num_heads,
            self.qkv_proj.weight,  # (3 * embed, embed)
            self.qkv_proj.bias,  # (3 * embed,)
            self.out_proj.weight,  # (embed, embed)
            self.out_proj.bias,  # (embed,)
            dropout_p=self.dropout if self.training else 0.0,
        )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, dropout={self.dropout}"

from __future__ import annotations

import torch
from torch import Tensor, nn

from .rotary import rotary_tables


class GroupedQueryAttention(nn.Module):
    """Grouped-query self-attention, as in Llama: (batch, seq, embed) -> (batch, seq, embed). One key/value head serves
    num_heads / num_kv_heads query heads; num_kv_heads = 1 is multi-query attention. Parameters are named as in
    transformers' Llama: q_proj, k_proj, v_proj, o_proj.

    Args:
        embed_dim: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of num_heads.
        head_dim: embed_dim / num_heads by default.
        bias: whether the four projections have one.
        is_causal: position i sees positions 0 .. i.
        rope_theta: base of the rotary position embedding of queries and keys (10000.0 in Llama 2); None: no rotation.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        is_causal: bool = True,
        rope_theta: float | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads, {num_heads}, got {num_kv_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"num_heads: expected a divisor of embed_dim, {embed_dim}, got {num_heads}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.is_causal = is_causal
        self.rope_theta = rope_theta
        like = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias, **like)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias, **like)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias, **like)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias, **like)

    def forward(self, x: Tensor, *, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """rotary: cos, sin (seq, rotary_dim / 2) in place of those of rope_theta; layers may share them."""
        if rotary is None and self.rope_theta is not None:
            rotary = rotary_tables(x.shape[1], self.head_dim, self.rope_theta, device=x.device)
        cos, sin = (None, None) if rotary is None else rotary
        return torch.ops.attnjourney.gqa(  # (batch, seq, embed)
            x,
            self.num_heads,
            self.num_kv_heads,
            self.q_proj.weight,  # (num_heads * head_dim, embed)
            self.k_proj.weight,  # (num_kv_heads * head_dim, embed)
            self.v_proj.weight,  # (num_kv_heads * head_dim, embed)
            self.o_proj.weight,  # (embed, num_heads * head_dim)
            self.q_proj.bias,
            self.k_proj.bias,
            self.v_proj.bias,
            self.o_proj.bias,
            cos=cos,
            sin=sin,
            is_causal=self.is_causal,
        )

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, is_causal={self.is_causal}, rope_theta={self.rope_theta}"

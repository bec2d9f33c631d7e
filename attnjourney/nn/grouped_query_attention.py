from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import attention
from ._parts import (
    check_divides,
    check_positive,
    check_probability,
    check_sequence,
    is_plain,
    merge_heads,
    padding_as_mask,
    split_heads,
)
from .rotary import Rotary, Tables, rotate


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention, as in Llama (Ainslie et al. 2023, arXiv 2305.13245): (batch, seq, embed) -> (batch, seq,
    embed). One key/value head serves num_heads / num_kv_heads query heads; num_kv_heads = 1 is multi-query attention,
    num_heads multi-head attention. Parameters are named as in transformers' Llama and Qwen3: q_proj, k_proj, v_proj,
    o_proj, q_norm, k_norm.

    Args:
        embed_dim: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of num_heads.
        head_dim: embed_dim / num_heads by default.
        kv_dim: width of what keys and values are made of, the second argument of forward: cross-attention.
        bias: whether the four projections have one.
        is_causal: position i sees positions 0 .. i (in cross-attention keys 0 .. i).
        rope: rotary position embedding of queries and keys. None: no rotation; a number: its base theta; a dict:
            "method" and parameters of attnjourney.rope_frequencies, "theta", "rotary_dim".
        qk_norm: an RMS norm of every query and key head before the rotation, as in Qwen3.
        eps: of that norm.
        dropout: probability of dropping an attention weight; in training only.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int | None = None,
        kv_dim: int | None = None,
        bias: bool = False,
        is_causal: bool = True,
        rope: float | dict | None = None,
        qk_norm: bool = False,
        eps: float = 1e-6,
        dropout: float = 0.0,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_positive(embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim, kv_dim=kv_dim)
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads, {num_heads}, got {num_kv_heads}")
        if head_dim is None:
            check_divides(embed_dim, num_heads)
        check_probability("dropout", dropout)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.kv_dim = kv_dim
        self.is_causal = is_causal
        self.dropout = dropout
        self.rotary = Rotary(rope, self.head_dim)
        like = {"device": device, "dtype": dtype}
        memory_dim = embed_dim if kv_dim is None else kv_dim
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias, **like)
        self.k_proj = nn.Linear(memory_dim, num_kv_heads * self.head_dim, bias, **like)
        self.v_proj = nn.Linear(memory_dim, num_kv_heads * self.head_dim, bias, **like)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias, **like)
        self.q_norm = nn.RMSNorm(self.head_dim, eps, **like) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps, **like) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        key_value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        rotary: Tables | None = None,
    ) -> Tensor:
        """
        Args:
            x: (batch, seq, embed).
            key_value: (batch, keys, kv_dim) with kv_dim, else None: keys and values come from x.
            key_padding_mask: (batch, keys). bool: True is a key that nobody sees. Floating: added to its scores.
            position_ids: (seq,) or (batch, seq) integers, 0 .. seq - 1 by default; of the queries in
                cross-attention, whose keys are at 0 .. keys - 1.
            rotary: cos, sin (seq, rotary_dim / 2) or (batch, seq, ...) in place of those of rope; layers may share
                them. Not in cross-attention.
        """
        if (key_value is None) != (self.kv_dim is None):
            expected = "None, this layer has no kv_dim" if self.kv_dim is None else "a tensor, this layer has a kv_dim"
            got = "None" if key_value is None else f"shape {tuple(key_value.shape)}"
            raise ValueError(f"key_value: expected {expected}, got {got}")
        dropout_p = self.dropout if self.training else 0.0
        check_sequence("x", x, self.q_proj.in_features)
        tables = self.rotary.tables(x, position_ids) if rotary is None else rotary
        projections = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        special = key_value is not None or key_padding_mask is not None or self.q_norm is not None or dropout_p > 0
        if not special and is_plain(*projections):
            cos, sin = tables
            return torch.ops.attnjourney.gqa(  # (batch, seq, embed)
                x,
                self.num_heads,
                self.num_kv_heads,
                *(p.weight for p in projections),
                *(p.bias for p in projections),
                cos=cos,
                sin=sin,
                is_causal=self.is_causal,
            )

        key_tables = tables
        if key_value is not None:
            check_sequence("key_value", key_value, self.kv_dim)
            key_tables = self.rotary.tables(key_value, None)
        memory = x if key_value is None else key_value
        query = split_heads(self.q_proj(x), self.num_heads)  # (batch, H, seq, D)
        key = split_heads(self.k_proj(memory), self.num_kv_heads)  # (batch, Hkv, keys, D)
        value = split_heads(self.v_proj(memory), self.num_kv_heads)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, tables), rotate(key, key_tables)
        mask = padding_as_mask(key_padding_mask, *memory.shape[:2])
        out = attention(query, key, value, mask, dropout_p, self.is_causal, enable_gqa=True)
        return self.o_proj(merge_heads(out))

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, is_causal={self.is_causal}, rope={self.rotary.rope}, dropout={self.dropout}"

"""Infini-attention with its projections and its gates, as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.infini_attention import Memory, infini_attention
from ._parts import check_divides, check_positive, check_sequence, leaf, merge_heads, split_heads
from .rotary import Rotary, Tables


class InfiniAttention(nn.Module):
    """Infini-attention with its projections (Munkhdalai et al. 2024, arXiv 2404.07143): (batch, seq, embed) ->
    (batch, seq, embed). Causal over any length in bounded memory: what lies before a segment is in the memory, of one
    size whatever the length.

    Args:
        embed_dim: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of num_heads; num_heads by default.
        segment_length: rows of a segment, inside which attention is local.
        head_dim: embed_dim / num_heads by default.
        bias: whether the four projections have one.
        rope: as in GroupedQueryAttention; rotates the local part, by the position in the segment.
        update: "linear" or "delta".
        truncate: gradients do not pass from one group of this many segments to the one before. None: they do.

    beta (num_heads,) holds the gates: sigmoid(beta) of the memory, the rest of the local attention.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        segment_length: int,
        head_dim: int | None = None,
        bias: bool = False,
        rope: float | dict | None = None,
        update: str = "linear",
        truncate: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(
            embed_dim=embed_dim,
            num_heads=num_heads,
            head_dim=head_dim,
            segment_length=segment_length,
            truncate=truncate,
        )
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads, {num_heads}, got {num_kv_heads}")
        if head_dim is None:
            check_divides(embed_dim, num_heads)
            head_dim = embed_dim // num_heads
        if update not in ("linear", "delta"):
            raise ValueError(f"update: expected 'linear' or 'delta', got {update!r}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.segment_length, self.update, self.truncate = segment_length, update, truncate
        self.rotary = Rotary(rope, head_dim)
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias, **like)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias, **like)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias, **like)
        self.o_proj = nn.Linear(num_heads * head_dim, embed_dim, bias, **like)
        self.beta = nn.Parameter(torch.zeros(num_heads, **like))

    @leaf
    def forward(
        self, x: Tensor, *, memory: Memory | None = None, return_memory: bool = False
    ) -> Tensor | tuple[Tensor, Memory]:
        """x (batch, seq, embed), beginning with a segment; memory (M, z) as in attnjourney.infini_attention: given back
        it continues the sequence after whole segments."""
        check_sequence("x", x, self.q_proj.in_features)
        cos, sin = self.tables(x)
        out: Any = infini_attention(
            *self.heads_of(x),
            self.beta,
            segment_length=self.segment_length,
            memory=memory,
            update=self.update,
            cos=cos,
            sin=sin,
            truncate=self.truncate,
            return_memory=return_memory,
        )
        if not return_memory:
            return self.o_proj(merge_heads(out))
        out, memory = out
        return self.o_proj(merge_heads(out)), memory

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query (batch, H, seq, D), key and value (batch, Hkv, seq, D)."""
        key, value = (split_heads(p(x), self.num_kv_heads) for p in (self.k_proj, self.v_proj))
        return split_heads(self.q_proj(x), self.num_heads), key, value

    def tables(self, x: Tensor) -> Tables:
        """By positions in the segment: attention inside it depends on distances alone, and pieces get the same
        numbers."""
        return self.rotary.tables(x, torch.arange(x.shape[1], device=x.device) % self.segment_length)

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, segment_length={self.segment_length}, update={self.update!r}, rope={self.rotary.rope}"

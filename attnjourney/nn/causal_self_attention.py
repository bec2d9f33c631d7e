"""Causal self-attention with its projections, as in GPT: a module over torch.ops.attnjourney.gpt_attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import attention, gpt_attention
from ._cached import NewTokens, check_cache
from ._parts import (
    check_divides,
    check_positive,
    check_probability,
    check_sequence,
    is_plain,
    leaf,
    merge_heads,
    padding_as_mask,
    split_packed,
)
from .cache import KeyValueCache


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention, as in GPT: (batch, seq, embed) -> (batch, seq, embed).

    Args:
        embed_dim: width of the input and the output.
        num_heads: divides embed_dim.
        dropout: probability of dropping an attention weight; in training only.
        bias: whether the two projections have one.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive(embed_dim=embed_dim, num_heads=num_heads)
        check_divides(embed_dim, num_heads)
        check_probability("dropout", dropout)
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim, bias, device=device, dtype=dtype)  # query, key, value
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)

    @leaf
    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """
        Args:
            x: (batch, seq, embed).
            key_padding_mask: (batch, seq). bool: True hides a key. Floating: added to its scores.
            position_ids: for the sake of one signature: this layer has no rotation that would read them.
            cache: of num_heads heads of embed_dim / num_heads: x are the tokens that follow those in it, and are added
                to it, but for those that key_padding_mask (bool) hides. Without gradients only.
        """
        dropout_p = self.dropout if self.training else 0.0
        if cache is not None:
            return self._cached(x, key_padding_mask, cache, dropout_p)
        qkv, out = self.qkv_proj, self.out_proj
        if key_padding_mask is None and is_plain(qkv, out):
            return gpt_attention(  # (batch, seq, embed)
                x,
                self.num_heads,
                qkv.weight,  # (3 * embed, embed)
                qkv.bias,  # (3 * embed,)
                out.weight,  # (embed, embed)
                out.bias,  # (embed,)
                dropout_p=dropout_p,
            )
        check_sequence("x", x, qkv.in_features)
        mask = padding_as_mask(key_padding_mask, *x.shape[:2])
        query, key, value = split_packed(self.qkv_proj(x), self.num_heads)
        return self.out_proj(merge_heads(attention(query, key, value, mask, dropout_p, True)))

    def _cached(self, x: Tensor, key_padding_mask: Tensor | None, cache: KeyValueCache, dropout_p: float) -> Tensor:
        check_cache(cache, KeyValueCache, dropout_p)
        check_sequence("x", x, self.qkv_proj.in_features)
        new = NewTokens(cache, x, key_padding_mask)
        query, key, value = split_packed(self.qkv_proj(new.x), self.num_heads)
        return self.out_proj(new.restore(merge_heads(cache.step(query, key, value, new.counts))))

    @torch.no_grad()
    def load_gpt2(self, state: dict[str, Tensor]) -> None:
        """Copies the attention of a GPT-2 block: c_attn.weight (embed, 3 * embed), c_attn.bias, c_proj.weight
        (embed, embed), c_proj.bias, as transformers has them in Conv1D, whose matrices are transposed. Other keys are
        ignored. Raises KeyError where one is missing, ValueError for a shape."""
        for ours, theirs in ((self.qkv_proj, "c_attn"), (self.out_proj, "c_proj")):
            for name in ("weight",) if ours.bias is None else ("weight", "bias"):
                parameter, value = getattr(ours, name), state[f"{theirs}.{name}"]
                expected = tuple(reversed(parameter.shape))
                if tuple(value.shape) != expected:
                    raise ValueError(f"{theirs}.{name}: expected shape {expected}, got {tuple(value.shape)}")
                parameter.copy_(value.T if name == "weight" else value)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, dropout={self.dropout}"

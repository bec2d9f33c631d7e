"""Longformer's self-attention with its six projections, as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.longformer_attention import longformer_attention
from ._parts import check_divides, check_positive, check_probability, check_sequence, leaf, merge_heads, split_heads


class LongformerSelfAttention(nn.Module):
    """Longformer's self-attention (Beltagy et al. 2020, arXiv 2004.05150): (batch, seq, embed) -> (batch, seq, embed),
    without an output projection. Parameters are named as in transformers' LongformerSelfAttention: query, key, value
    and, for the global tokens, query_global, key_global, value_global.

    Args:
        embed_dim: width of the input and the output.
        num_heads: divides embed_dim.
        window: one-sided: a token sees `window` tokens on either side.
        dilation: the window's steps, a number or one a head.
        is_causal: a token sees no later one.
        dropout: probability of dropping an attention weight; in training only.
        bias: whether the six projections have one.
    """

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    query_global: nn.Linear
    key_global: nn.Linear
    value_global: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: int,
        *,
        dilation: int | Sequence[int] = 1,
        is_causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_positive(embed_dim=embed_dim, num_heads=num_heads)
        check_divides(embed_dim, num_heads)
        check_probability("dropout", dropout)
        if window < 0:
            raise ValueError(f"window: expected a number of at least 0, got {window}")
        self.num_heads, self.window, self.dilation = num_heads, window, dilation
        self.is_causal, self.dropout = is_causal, dropout
        for name in ("query", "key", "value", "query_global", "key_global", "value_global"):
            setattr(self, name, nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype))

    @classmethod
    def from_transformers(cls, module: Any) -> LongformerSelfAttention:
        """The same layer as a transformers LongformerSelfAttention, with its weights copied. Its attention_window is
        the total width, twice ours."""
        weight = module.query.weight
        own = cls(
            module.embed_dim,
            module.num_heads,
            module.one_sided_attn_window_size,
            dropout=module.dropout,
            device=weight.device,
            dtype=weight.dtype,
        )
        own.load_state_dict(module.state_dict())
        return own.train(module.training)

    @leaf
    def forward(
        self, x: Tensor, *, global_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """x (batch, seq, embed); global_mask (batch, seq) bool, True where a token sees and is seen by all;
        key_padding_mask (batch, seq) bool, True where a token does not exist: its row is 0. Whether there are global
        tokens, and how many, is read on the host."""
        check_sequence("x", x, self.query.in_features)
        names = ["query", "key", "value"]
        if global_mask is not None and bool(global_mask.any()):
            names += ["query_global", "key_global", "value_global"]
        # each (batch, H, seq, D)
        arguments: list[Any] = [split_heads(getattr(self, name)(x), self.num_heads) for name in names]
        arguments += [None] * (6 - len(arguments))
        arguments += [self.window, self.dilation, global_mask, key_padding_mask]
        dropout_p = self.dropout if self.training else 0.0
        out = longformer_attention(*arguments, is_causal=self.is_causal, dropout_p=dropout_p)
        return merge_heads(out)

    def extra_repr(self) -> str:
        options = f"num_heads={self.num_heads}, window={self.window}, dilation={self.dilation}"
        return f"{options}, is_causal={self.is_causal}, dropout={self.dropout}"

"""Linear attention with its projections, as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.linear_attention import State, linear_attention
from ._parts import check_divides, check_positive, check_sequence, leaf, merge_heads, split_heads


class LinearAttention(nn.Module):
    """Linear attention with its projections (Katharopoulos et al. 2020, arXiv 2006.16236): (batch, seq, embed) ->
    (batch, seq, embed), in time linear in seq. With the state of the tokens before, a step costs the same wherever it
    stands.

    Args:
        embed_dim: width of the input and the output.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of num_heads; num_heads by default.
        head_dim: embed_dim / num_heads by default.
        bias: whether the four projections have one.
        is_causal, feature_map, scale, normalize, eps: as in attnjourney.linear_attention.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = True,
        is_causal: bool = True,
        feature_map: str | Callable[[Tensor], Tensor] | None = "elu+1",
        scale: float | None = None,
        normalize: bool = True,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(embed_dim=embed_dim, num_heads=num_heads, head_dim=head_dim)
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads, {num_heads}, got {num_kv_heads}")
        if head_dim is None:
            check_divides(embed_dim, num_heads)
            head_dim = embed_dim // num_heads
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.options: dict[str, Any] = dict(
            is_causal=is_causal, feature_map=feature_map, scale=scale, normalize=normalize, eps=eps
        )
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias, **like)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias, **like)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias, **like)
        self.o_proj = nn.Linear(num_heads * head_dim, embed_dim, bias, **like)

    @leaf
    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        initial_state: State | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """x (batch, seq, embed); key_padding_mask (batch, seq), bool, True hides a key; states as in
        attnjourney.linear_attention: a state that is given back continues the sequence."""
        check_sequence("x", x, self.q_proj.in_features)
        out, state = linear_attention(
            split_heads(self.q_proj(x), self.num_heads),  # (batch, H, seq, D)
            split_heads(self.k_proj(x), self.num_kv_heads),  # (batch, Hkv, seq, D)
            split_heads(self.v_proj(x), self.num_kv_heads),
            key_padding_mask=key_padding_mask,
            initial_state=initial_state,
            return_state=True,
            **self.options,
        )
        out = self.o_proj(merge_heads(out))
        return (out, state) if return_state else out

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, " + ", ".join(f"{name}={value!r}" for name, value in self.options.items())

"""Grouped-query attention as one layer, in plain PyTorch; see attnjourney.ops.gqa for the arguments."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import linear

from .attention import attention
from .rotary import rotate_half_split


def gqa(
    x: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    o_weight: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    o_bias: Tensor | None = None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    is_causal: bool = True,
) -> Tensor:
    """The same layer as attnjourney.ops.gqa, differentiable to every order."""
    weights = (q_weight, k_weight, v_weight, o_weight, q_bias, k_bias, v_bias, o_bias)
    return grouped_query_layer(attention, x, num_heads, num_kv_heads, *weights, cos=cos, sin=sin, is_causal=is_causal)


def grouped_query_layer(
    attention: Callable[..., Tensor],
    x: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    o_weight: Tensor,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    v_bias: Tensor | None,
    o_bias: Tensor | None,
    *,
    cos: Tensor | None,
    sin: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """The layer over any attention function that is called as F.scaled_dot_product_attention is."""
    query = linear(x, q_weight, q_bias).unflatten(-1, (num_heads, -1)).transpose(1, 2)  # (batch, H, seq, D)
    key = linear(x, k_weight, k_bias).unflatten(-1, (num_kv_heads, -1)).transpose(1, 2)  # (batch, Hkv, seq, D)
    value = linear(x, v_weight, v_bias).unflatten(-1, (num_kv_heads, -1)).transpose(1, 2)  # (batch, Hkv, seq, Dv)
    query, key = rotate_half_split(query, cos, sin), rotate_half_split(key, cos, sin)
    out = attention(query, key, value, is_causal=is_causal, enable_gqa=True)  # (batch, H, seq, Dv)
    return linear(out.transpose(1, 2).flatten(2), o_weight, o_bias)

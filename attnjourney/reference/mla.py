"""Multi-head latent attention as one layer, in plain PyTorch; see attnjourney.ops.mla for the arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from .attention import attention
from .rotary import rotate_interleaved


def mla(
    x: Tensor,
    num_heads: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
    q_a_weight: Tensor | None,
    q_a_norm_weight: Tensor | None,
    q_b_weight: Tensor,
    kv_a_weight: Tensor,
    kv_a_norm_weight: Tensor,
    kv_b_weight: Tensor,
    o_weight: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The same layer as attnjourney.ops.mla, differentiable to every order."""
    dims = (num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
    of_query: tuple[Any, ...] = (q_a_weight, q_a_norm_weight, q_b_weight)
    weights = (*of_query, kv_a_weight, kv_a_norm_weight, kv_b_weight, o_weight)
    return latent_layer(attention, x, *dims, *weights, cos=cos, sin=sin, is_causal=is_causal, scale=scale, eps=eps)


def latent_layer(
    attention: Callable[..., Tensor],
    x: Tensor,
    num_heads: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
    q_a_weight: Tensor | None,
    q_a_norm_weight: Tensor | None,
    q_b_weight: Tensor,
    kv_a_weight: Tensor,
    kv_a_norm_weight: Tensor,
    kv_b_weight: Tensor,
    o_weight: Tensor,
    *,
    cos: Tensor | None,
    sin: Tensor | None,
    is_causal: bool,
    scale: float | None,
    eps: float,
) -> Tensor:
    """The layer over any attention function that is called as F.scaled_dot_product_attention is."""
    query, latent, shared_key = query_and_latent(
        x, num_heads, qk_nope_head_dim, qk_rope_head_dim, q_a_weight, q_a_norm_weight, q_b_weight, kv_a_weight,
        kv_a_norm_weight, partial(rotate_interleaved, cos=cos, sin=sin), eps,
    )  # fmt: skip
    key, value = key_and_value(latent, shared_key, kv_b_weight, num_heads, qk_nope_head_dim, v_head_dim)
    out = attention(query, key, value, is_causal=is_causal, scale=scale)  # (batch, H, seq, v)
    return linear(out.transpose(1, 2).flatten(2), o_weight)


def query_and_latent(
    x: Tensor, num_heads: int, nope: int, rope: int, q_a_weight: Tensor | None, q_a_norm_weight: Tensor | None,
    q_b_weight: Tensor, kv_a_weight: Tensor, kv_a_norm_weight: Tensor, rotate: Callable[[Tensor], Tensor], eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """query (batch, H, seq, nope + rope), and what keys and values are made of: the latent (batch, seq, kv_lora) and
    the key that all heads share (batch, 1, seq, rope)."""
    query = x
    if q_a_weight is not None:
        norm: Any = q_a_norm_weight
        query = rms_norm(linear(x, q_a_weight), norm.shape, norm, eps)  # (batch, seq, q_lora)
    query = linear(query, q_b_weight).unflatten(-1, (num_heads, nope + rope)).transpose(1, 2)
    query_nope, query_rope = query.split([nope, rope], -1)
    query = torch.cat([query_nope, rotate(query_rope)], -1)
    latent, shared_key = linear(x, kv_a_weight).split([kv_a_weight.shape[0] - rope, rope], -1)
    latent = rms_norm(latent, kv_a_norm_weight.shape, kv_a_norm_weight, eps)
    return query, latent, rotate(shared_key.unsqueeze(1))


def key_and_value(
    latent: Tensor, shared_key: Tensor, kv_b_weight: Tensor, num_heads: int, nope: int, v_dim: int
) -> tuple[Tensor, Tensor]:
    """(batch, H, seq, nope + rope) and (batch, H, seq, v)."""
    both = linear(latent, kv_b_weight).unflatten(-1, (num_heads, nope + v_dim)).transpose(1, 2)
    key_nope, value = both.split([nope, v_dim], -1)
    return torch.cat([key_nope, shared_key.expand(-1, num_heads, -1, -1)], -1), value

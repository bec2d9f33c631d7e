"""Attention over caches in plain PyTorch; see attnjourney.ops.decode and attnjourney.ops.mla_decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import linear

from .attention import attention
from .quantization import dequantize

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._options import DecodeOptions


@overload
def decode(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, block_table: Tensor | None = ..., ring: bool = ...,
    key_scale: Tensor | None = ..., value_scale: Tensor | None = ...,
    return_lse: Literal[False] = ..., **options: Unpack[DecodeOptions],
) -> Tensor: ...  # fmt: skip
@overload
def decode(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, block_table: Tensor | None = ..., ring: bool = ...,
    key_scale: Tensor | None = ..., value_scale: Tensor | None = ...,
    return_lse: Literal[True], **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def decode(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, block_table: Tensor | None = ..., ring: bool = ...,
    key_scale: Tensor | None = ..., value_scale: Tensor | None = ...,
    return_lse: bool, **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    ring: bool = False,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    is_causal: bool = True,
    window_size: tuple[int, int] | None = (-1, -1),
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    prefix_length: int = 0,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attnjourney.decode, one sequence at a time: its keys put in order, then attention with a mask."""
    if key_scale is not None and value_scale is not None:
        key, value = dequantize(key, key_scale, query.dtype), dequantize(value, value_scale, query.dtype)
    results = []
    for b, length in enumerate(lengths.tolist()):
        first = max(0, length - key.shape[2]) if ring else 0  # older keys of a ring are gone
        k, v = (_sequence(x, b, first, length, block_table, ring) for x in (key, value))
        row = torch.arange(query.shape[2], device=query.device).unsqueeze(1) + length - query.shape[2]  # its position
        column = torch.arange(first, length, device=query.device)
        visible = torch.ones(row.shape[0], column.shape[0], dtype=torch.bool, device=query.device)
        left, right = window_size or (-1, -1)
        if left >= 0:
            visible = visible & (column >= row - left)
        if is_causal or right >= 0:
            visible = visible & (column <= row + (0 if is_causal else right))
        visible = visible | (column < prefix_length)
        bias = None
        if attn_mask is not None:
            mask = attn_mask.expand(*query.shape[:3], attn_mask.shape[-1])[b]
            mask = mask.expand(-1, -1, length) if mask.shape[-1] == 1 else mask[..., first:length]
            bias, visible = (
                (None, visible & mask) if mask.dtype == torch.bool else (mask, visible & (mask != -torch.inf))
            )
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
            distance = (row - column).abs().to(query.dtype)
            bias = -slopes[:, None, None].to(query.dtype) * distance + (0 if bias is None else bias)
        if bias is not None:
            visible = torch.where(visible, bias, -torch.inf)
        own_sinks = sinks if sinks is None or sinks.dim() == 1 else sinks[b]
        results.append(
            attention(
                query[b], k, v, visible, scale=scale, enable_gqa=True, softcap=softcap, sinks=own_sinks, return_lse=True
            )
        )
    out, lse = (torch.stack(parts) for parts in zip(*results))
    return (out, lse) if return_lse else out


def _sequence(cache: Tensor, b: int, first: int, length: int, block_table: Tensor | None, ring: bool) -> Tensor:
    """Keys or values first .. length - 1 of a sequence, (heads, length - first, dim)."""
    at = torch.arange(first, length, device=cache.device)
    if block_table is not None:
        return cache[block_table[b, at // cache.shape[2]].long(), :, at % cache.shape[2]].transpose(0, 1)
    return cache[b][:, at % cache.shape[2] if ring else at]


def mla_decode(
    query: Tensor,
    latent: Tensor,
    lengths: Tensor,
    kv_b_weight: Tensor,
    *,
    block_table: Tensor | None = None,
    latent_scale: Tensor | None = None,
    is_causal: bool = True,
    window_size: tuple[int, int] | None = (-1, -1),
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    prefix_length: int = 0,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attnjourney.mla_decode in its expanded form: every head's keys and values are made from the latents."""
    if latent_scale is not None:
        latent = dequantize(latent, latent_scale, query.dtype)
    heads, kv_lora = query.shape[1], kv_b_weight.shape[1]
    c, shared_key = latent.split([kv_lora, latent.shape[-1] - kv_lora], -1)
    nope = query.shape[-1] - shared_key.shape[-1]
    kv = linear(c, kv_b_weight).unflatten(-1, (heads, -1)).transpose(1, 2)  # (batch, heads, capacity, nope + v)
    key = torch.cat([kv[..., :nope], shared_key.unsqueeze(1).expand(-1, heads, -1, -1)], -1)
    return decode(
        query, key, kv[..., nope:], lengths, block_table=block_table, is_causal=is_causal, window_size=window_size,
        scale=scale, attn_mask=attn_mask, prefix_length=prefix_length, softcap=softcap, sinks=sinks,
        alibi_slopes=alibi_slopes, return_lse=return_lse,
    )  # fmt: skip

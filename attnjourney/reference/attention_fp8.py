"""Attention over numbers in e4m3 in plain PyTorch; see attnjourney.ops.attention_fp8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import attention

BLOCK = 128  # rows that share a scale


def dequantize_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x (B, H, L, E) in e4m3 times scale, which broadcasts to (B, H, ceil(L / 128)), as dtype."""
    blocks = -(-x.shape[2] // BLOCK)
    rows = scale.to(dtype).expand(*x.shape[:2], blocks).repeat_interleave(BLOCK, 2)[:, :, : x.shape[2]]
    return x.to(dtype) * rows.unsqueeze(3)


def attention_fp8(
    query: Tensor, key: Tensor, value: Tensor, query_scale: Tensor, key_scale: Tensor, value_scale: Tensor,
    is_causal: bool = False, *, out_dtype: torch.dtype = torch.bfloat16, dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:  # fmt: skip
    """attnjourney.attention_fp8, computed in `dtype`: attention over the numbers that the bytes stand for."""
    inputs = zip((query, key, value), (query_scale, key_scale, value_scale))
    q, k, v = (dequantize_fp8(x, s, dtype) for x, s in inputs)
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].to(dtype)
    result = attention(q, k, v, is_causal=is_causal, **options)
    if isinstance(result, tuple):
        return result[0].to(out_dtype), result[1]
    return result.to(out_dtype)

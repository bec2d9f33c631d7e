"""Rows of numbers as bytes with a scale, in plain PyTorch: what caches of int8 and float8_e4m3fn hold."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(bytes, scale): x (..., dim) as dtype (int8 or float8_e4m3fn), and float32 (...): a number for each row, which
    takes its largest magnitude to the largest byte.

    What is not finite is a NaN afterwards: with float8_e4m3fn that number, with int8, which has no NaN, the whole row.
    """
    x = x.float()
    finite = x.isfinite()
    top = torch.where(finite, x.abs(), 0.0).amax(-1)
    scale = torch.where(top == 0, 1.0, (top / LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).tiny))
    y = x / scale.unsqueeze(-1)
    if dtype != torch.int8:
        return torch.where(finite, y, torch.nan).to(dtype), scale
    rounded = y.clamp(-127, 127).nan_to_num(0.0).round().to(torch.int8)
    return rounded, scale.where(finite.all(-1), torch.nan)


def dequantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x (..., dim) of bytes times scale (...), as dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return (x.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)

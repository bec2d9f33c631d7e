"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) in plain PyTorch.

x (..., seq, dim); cos, sin (seq, rotary_dim / 2), or (batch, seq, rotary_dim / 2) with x (batch, ..., seq, dim);
rotary_dim <= dim: the first rotary_dim numbers turn in pairs, the rest passes through. Computed in the wider dtype of x
and the tables, returned in x's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_half_split(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Pair j is (x[j], x[j + rotary_dim / 2]), as in GPT-NeoX and Llama. Without tables x itself."""
    if cos is None:
        return x
    half = cos.shape[-1]
    cos, sin = _for_heads_of(x, cos), _for_heads_of(x, sin)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def rotate_interleaved(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Pair j is (x[2 j], x[2 j + 1]), as in GPT-J and DeepSeek. Without tables x itself."""
    if cos is None:
        return x
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = _for_heads_of(x, cos), _for_heads_of(x, sin)
    first, second, rest = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2], x[..., rotary_dim:]
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _for_heads_of(x: Tensor, table: Tensor | None) -> Tensor:
    """A table (batch, seq, half) with a dimension for the heads of x where x has one."""
    if table is None:
        raise ValueError("cos, sin: expected both tables or none")
    return table.unsqueeze(1) if table.dim() == 3 and x.dim() == 4 else table

"""Infini-attention in plain PyTorch: the paper's equations, a segment and a head at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attention


def infini_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    segment_length: int,
    memory: tuple[Tensor, Tensor] | None = None,
    update: str = "linear",
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    truncate: int | None = None,
    return_memory: bool = False,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
    """attnjourney.infini_attention, equations (1) to (7) of arXiv 2404.07143."""

    def phi(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())

    def turn(x: Tensor, rows: slice) -> Tensor:
        if cos is None or sin is None:
            return x
        c, s = (t[..., rows, :] if t.dim() == 2 else t[:, None, rows] for t in (cos, sin))
        half = c.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

    batch, heads, length, dim = query.shape
    group = heads // key.shape[1]
    if memory is None:
        memory = (key.new_zeros(*key.shape[:2], dim, value.shape[3]), key.new_zeros(*key.shape[:2], dim))
    m, z = memory

    def read(x: Tensor, group: int) -> Tensor:
        top = phi(x) @ m.repeat_interleave(group, 1)
        bottom = phi(x) @ z.repeat_interleave(group, 1)[..., None]
        return torch.where(bottom == 0, 0, top / torch.where(bottom == 0, 1, bottom))

    gate, outs = torch.sigmoid(beta)[:, None, None], []
    for index, first in enumerate(range(0, length, segment_length)):
        if truncate and index and index % truncate == 0:
            m, z = m.detach(), z.detach()
        rows = slice(first, min(length, first + segment_length))
        q, k, v = query[:, :, rows], key[:, :, rows], value[:, :, rows]
        dot = attention(turn(q, rows), turn(k, rows), v, is_causal=True, enable_gqa=True)
        outs.append(gate * read(q, group) + (1 - gate) * dot)
        new = v - read(k, 1) if update == "delta" else v
        m, z = m + phi(k).transpose(-1, -2) @ new, z + phi(k).sum(-2)
    out = torch.cat(outs, 2) if outs else query.new_zeros(batch, heads, 0, value.shape[3])
    return (out, (m, z)) if return_memory else out

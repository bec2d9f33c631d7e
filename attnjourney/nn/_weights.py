"""Attention weights from queries and keys, differentiable as torch's module has them and averaged over heads block by
block; attnjourney.attention_weights has more options and no gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._dtypes import accumulation_dtype
from ..ops._registry.fakes import known_at_run_time

BLOCK = 1 << 20  # weights of all heads that exist at one time


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, average: bool) -> Tensor:
    """softmax(scores), before dropout: (N, H, L, S), or their mean over the heads, (N, L, S), in query's dtype.

    query (N, H, L, D), key (N, H, S, D), mask as attention takes it. A block of queries at a time, so
    that besides the result there are no more than BLOCK weights (the backward computes each block again).
    """
    batch, heads, length, dim = query.shape
    columns = batch * heads * key.shape[2]
    rows = max(1, length if known_at_run_time(columns) else BLOCK // max(1, columns))
    wide = accumulation_dtype(query.dtype)
    key = key.to(wide)
    if mask is not None:
        mask = mask.expand(torch.broadcast_shapes(mask.shape, (length, key.shape[2])))

    def block(begin: int, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        scores = q.to(wide) @ k.mT * float(dim) ** -0.5  # a size is a float32 tensor to torch.jit.trace
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        if is_causal:
            visible = visible.tril(begin)  # key j <= row begin + i
        if mask is not None and mask.dtype == torch.bool:
            visible = visible & mask
        elif mask is not None:
            visible = visible & (mask != -torch.inf)
            scores = scores + mask
        sees = visible.any(-1, keepdim=True)
        weights = scores.masked_fill(~visible & sees, -torch.inf).softmax(-1).masked_fill(~visible, 0.0)
        return (weights.mean(1) if average else weights).to(query.dtype)

    blocks = []
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, key, mask))
    recompute = needs_grad and rows < length and not torch._C._are_functorch_transforms_active()
    for begin in range(0, max(1, length), rows):
        part = slice(begin, begin + rows)
        arguments = begin, query[:, :, part], key, None if mask is None else mask[..., part, :]
        if recompute:
            blocks.append(checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            blocks.append(block(*arguments))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, -2)

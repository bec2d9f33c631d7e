"""Packed query rows over paged caches, varlen_attention with a block_table: torch.ops.attnjourney.paged_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._attention_checks import check_caches, check_sequences
from ._registry.derivatives import one_call_a_sample
from ._registry.fakes import empty_lse, need, same_size
from ._registry.inference import register_inference
from ._registry.operator import Signature


def _fake(
    *, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_table: Tensor,
    scale: float | None, window_size: Sequence[int], softcap: float, sinks: Tensor | None,
    alibi_slopes: Tensor | None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    need(query.dim() == 3, "query: expected 3 dimensions", query)
    check_caches(query, key, value)
    batch = check_sequences(query, cu_seqlens_q, cu_seqlens_k, scale, window_size, softcap, sinks, alibi_slopes)
    if block_table.dtype != torch.int32:
        raise RuntimeError(f"block_table: expected dtype torch.int32, got {block_table.dtype}")
    fits = block_table.dim() == 2 and same_size(block_table.shape[0], batch)
    need(fits, f"block_table: expected shape ({batch}, max_blocks)", block_table)
    return query.new_empty((*query.shape[:2], value.shape[3])), empty_lse(query, query.shape[1], query.shape[0])


def _flops(*, query: torch.Size, key: torch.Size, value: torch.Size, block_table: torch.Size, **_: Any) -> int:
    """As if every sequence were as long as its blocks: its length is not known from shapes."""
    rows, heads, dim = query
    return 2 * rows * heads * key[2] * block_table[1] * (dim + value[3])


def _vmap(signature: Signature, info: Any, in_dims: tuple, *flat: Any) -> tuple[tuple, tuple]:
    return one_call_a_sample(signature, info, in_dims, flat)


paged_attention = register_inference("paged_attention", fake=_fake, flops=_flops, autocast={"query": "key"}, vmap=_vmap)

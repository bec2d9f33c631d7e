"""Attention under a mask of blocks: torch.ops.attnjourney.block_attention, behind attnjourney.attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..block_mask import BlockMask
from ._attention_checks import CHECKED, check
from ._attention_rules import empty_results, vmap_forward, vmap_gradients, vmap_jvp
from ._registry.fakes import broadcasts, need, same_size
from ._registry.flops import attention_flops
from ._registry.registration import register

BLOCKS = ("block_offsets", "block_index", "block_partial", "block_elements")


def of_call(mask: BlockMask, query: Tensor, key: Tensor) -> BlockMask:
    """The mask with offsets that broadcast to the leading dimensions of that query and key."""
    if (mask.q_len, mask.kv_len) != (query.shape[-2], key.shape[-2]):
        raise ValueError(
            f"attn_mask: expected a BlockMask for {query.shape[-2]} rows and {key.shape[-2]} keys, "
            f"got one for {mask.q_len} and {mask.kv_len}"
        )
    rank = query.dim()
    pairs = zip(query.shape[: rank - 3], key.shape[: rank - 3]) if rank > 4 else ()  # asked for there alone
    return mask.for_rank(tuple(max(a, b) if 0 not in (a, b) else 0 for a, b in pairs), rank)


def block_tensors(mask: BlockMask, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """The operators' tensors of a mask, for that query and key."""
    return of_call(mask, query, key).tensors


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, dropout_p: float, is_causal: bool, return_lse: bool,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """attnjourney.attention with a BlockMask; `options`: those of the operator."""
    blocks = block_tensors(mask, query, key)
    if not return_lse:
        return _block_attention(query, key, value, *blocks, dropout_p, is_causal, **options)
    forward = torch.ops.attnjourney.block_attention_forward.default
    return forward(query, key, value, *blocks, dropout_p, is_causal, **options)[:2]


def _fake(
    *, query: Tensor, key: Tensor, value: Tensor, block_offsets: Tensor, block_elements: Tensor, scale: float | None,
    enable_gqa: bool, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    lead = check(query, key, value, None, scale, enable_gqa, **{name: options[name] for name in CHECKED})
    need(
        block_elements.dim() == 3 and block_elements.shape[1] == block_elements.shape[2] > 0,
        "block_elements: expected shape (blocks, size, size)",
        block_elements,
    )
    need(block_offsets.dim() > 0, "block_offsets: expected at least 1 dimension", block_offsets)
    size = block_elements.shape[-1]
    want = (*lead, -(-query.shape[-2] // size) + 1)
    fits = block_offsets.dim() <= len(want) and same_size(block_offsets.shape[-1], want[-1])
    fits = fits and all(broadcasts(n, w) for n, w in zip(reversed(block_offsets.shape[:-1]), reversed(lead)))
    if not fits:
        raise ValueError(
            f"block_offsets: expected a shape that broadcasts to {want} for blocks of {size}, "
            f"got shape {tuple(block_offsets.shape)}"
        )
    return empty_results(query, value, lead)


def _flops(
    *, query: torch.Size, key: torch.Size, value: torch.Size, block_offsets: torch.Size, block_index: torch.Size,
    block_elements: torch.Size, **others: Any,
) -> tuple[int, ...]:  # fmt: skip
    """Of the visible blocks."""
    batch_heads = math.prod(max(n, key[d], value[d]) for d, n in enumerate(query[:-2]))
    pairs = batch_heads * block_index[0] * block_elements[-1] ** 2 // max(1, math.prod(block_offsets[:-1]))
    return attention_flops(pairs, query, value, others)


def _shared_blocks(rule: Callable, operator: OpOverload) -> Callable:
    """The rule of attention; masks that differ between samples are one call a sample."""
    names = [a.name for a in operator._schema.arguments]
    at = [names.index(name) for name in BLOCKS]

    def shared(info, in_dims, *arguments):
        return None if any(in_dims[i] is not None for i in at) else rule(operator, info, in_dims, *arguments)

    return shared


_ops = torch.ops.attnjourney
_block_attention = register(
    "block_attention",
    fake=_fake,
    vmap=(
        _shared_blocks(vmap_forward, _ops.block_attention_forward.default),
        _shared_blocks(vmap_gradients, _ops.block_attention_backward.default),
        _shared_blocks(vmap_jvp, _ops.block_attention_jvp.default),
        _shared_blocks(vmap_gradients, _ops.block_attention_backward_jvp.default),
    ),
    autocast=("query", "key", "value"),
    flops=_flops,
)

"""Attention over the keys that indices name: torch.ops.attnjourney.sparse_attention."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from .._dtypes import accumulation_dtype
from ._attention_checks import (
    ALIGNMENTS,
    alignment_index,
    check_index,
    check_per_head,
    check_scale,
    check_scores,
)
from ._registry.fakes import empty_lse, empty_stats, need, same_size
from ._registry.registration import register


@overload
def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, *, scale: float | None = ..., enable_gqa: bool = ...,
    is_causal: bool = ..., causal_alignment: str = ..., key_lengths: Tensor | None = ..., softcap: float = ...,
    sinks: Tensor | None = ..., query_block_size: int = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, *, scale: float | None = ..., enable_gqa: bool = ...,
    is_causal: bool = ..., causal_alignment: str = ..., key_lengths: Tensor | None = ..., softcap: float = ...,
    sinks: Tensor | None = ..., query_block_size: int = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    key_lengths: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    query_block_size: int = 1,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which each row sees only the keys that its indices name: softmax(scale q K[indices]^T) V[indices].

    Time follows the pairs that are seen, and nothing has a size of L times S. The keys of a row are read once for all
    query heads that share them. Beside absorbed multi-head latent attention there is one key head, the latents:
    key (B, 1, S, 576) and value = key[..., :512], the same memory.

    Papers: DeepSeek-AI 2025 (DeepSeek-V3.2, arXiv 2512.02556), whose `lightning_indexer` makes the indices.

    Args:
        query: (B, H, L, D). float32, float64, bfloat16 or float16; computed in float32 (float64 for float64).
        key: (B, Hk, S, D). Hk is H or 1, with enable_gqa any divisor of H.
        value: (B, Hk, S, Dv). May be a slice of key.
        indices: (B, n, k) for all heads or (B, Hk, n, k), int32 or int64: the keys of each row, in any order. -1 (any
            number below 0) names none. A key that is named twice counts twice, as in a gather: it has twice the weight.
            n = ceil(L / query_block_size).
        scale: 1 / sqrt(D) by default.
        enable_gqa: several query heads read one key head.
        is_causal: an index past the row's position names none.
        causal_alignment: the position of row i: i ("top_left") or i + S - L ("bottom_right"; key_lengths in place of
            S), as for new rows at the end of a cache.
        key_lengths: (B,) int32 or int64: an index at or past it names none.
        softcap: scores become softcap * tanh(score / softcap); 0: they stay.
        sinks: (H,) or (B, H), query's dtype or float32: a logit of each head that joins the sum alone.
        query_block_size: so many consecutive rows share a row of indices.
        return_lse: also return the logarithm of each row's sum of exponentials.

    Returns:
        (B, H, L, Dv) in query's dtype, 0 for a row that sees no key; with return_lse also (B, H, L), float32 (float64
        for float64), -inf for such a row. Gradients for all but indices, also of lse, and second ones.

    Raises:
        ValueError: a shape or a number that does not fit; on the CPU an index at or past S (on CUDA it names none).
        RuntimeError: a dtype or a device that does not fit.
    """
    arguments: dict[str, Any] = {
        "scale": scale, "enable_gqa": enable_gqa, "is_causal": is_causal,
        "causal_alignment": alignment_index(causal_alignment), "key_lengths": key_lengths, "softcap": softcap,
        "sinks": sinks, "query_block_size": query_block_size,
    }  # fmt: skip
    if return_lse:
        results = torch.ops.attnjourney.sparse_attention_forward.default(query, key, value, indices, **arguments)
        return results[0], results[1]
    return _sparse_attention(query, key, value, indices, **arguments)


def check_indices(indices: Tensor, batch: int, kv_heads: int, rows: int) -> None:
    """(B, rows, k) or (B, Hk, rows, k)."""
    if indices.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"indices: expected dtype torch.int32 or torch.int64, got {indices.dtype}")
    want = (batch, kv_heads, rows) if indices.dim() == 4 else (batch, rows)
    fits = indices.dim() == len(want) + 1 and all(same_size(n, w) for n, w in zip(indices.shape, want))
    need(fits, f"indices: expected shape ({batch}, {rows}, k) or ({batch}, {kv_heads}, {rows}, k)", indices)


def check_grouped_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    heads, own = query.shape[1], key.shape[1]
    divides = heads > 0 and heads % own == 0 if own > 0 else heads == 0
    need(divides, f"key: expected a head count that divides query's, {heads}", key)
    if not enable_gqa:
        need(own in (heads, 1), f"key: expected {heads} heads (dimension -3) or 1; grouped heads need enable_gqa", key)


def _fake(
    *, query: Tensor, key: Tensor, value: Tensor, indices: Tensor, scale: float | None, enable_gqa: bool,
    causal_alignment: int, key_lengths: Tensor | None, softcap: float, sinks: Tensor | None, query_block_size: int,
    **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    for name, x in (("query", query), ("key", key), ("value", value)):
        need(x.dim() == 4, f"{name}: expected 4 dimensions", x)
        need(x.shape[3] > 0, f"{name}: expected a head_dim (last dimension) of at least 1", x)
        if x.dtype != query.dtype:
            raise RuntimeError(f"{name}: expected the dtype of query, {query.dtype}, got {x.dtype}")
    batch, heads, length, dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    fits = same_size(key.shape[0], batch) and key.shape[3] == dim
    need(fits, f"key: expected shape ({batch}, kv_heads, kv_len, {dim})", key)
    fits = all(same_size(n, w) for n, w in zip(value.shape, (batch, kv_heads, kv_len)))
    need(fits, f"value: expected shape ({batch}, {kv_heads}, {kv_len}, v_head_dim)", value)
    check_grouped_heads(query, key, enable_gqa)
    if isinstance(query_block_size, int) and not 1 <= query_block_size <= 2**40:
        raise ValueError(f"query_block_size: expected a number from 1 to 2^40, got {query_block_size}")
    check_indices(indices, batch, kv_heads, -(-length // query_block_size))
    check_scale(scale)
    check_scores((-1, -1), softcap)
    if causal_alignment not in (0, 1):
        raise ValueError(f"causal_alignment: expected 0 (top-left) or 1 (bottom-right), got {causal_alignment}")
    if key_lengths is not None:
        check_index("key_lengths", key_lengths, batch)
    if sinks is not None:
        check_per_head("sinks", sinks, query, batch, heads)
    lead = (batch, heads, length)
    return query.new_empty((*lead, value.shape[3])), empty_lse(query, *lead), empty_stats(query, *lead)


def _composite(
    *, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, causal_alignment: int, **options: Any
) -> tuple[Tensor, ...]:
    from ..reference.sparse_attention import sparse_attention_and_stats

    del enable_gqa
    wide = accumulation_dtype(query.dtype)
    out, *rest = sparse_attention_and_stats(
        query.to(wide), key.to(wide), value.to(wide), causal_alignment=ALIGNMENTS[causal_alignment], **options
    )
    return out.to(query.dtype), *rest


def _flops(*, query: torch.Size, value: torch.Size, indices: torch.Size, **_: Any) -> tuple[int, ...]:
    """As if every index named a key. Forwards two products, backwards five."""
    pairs = 2 * query[0] * query[1] * query[2] * indices[-1]
    return pairs * (query[3] + value[3]), pairs * (3 * query[3] + 2 * value[3])


_sparse_attention = register(
    "sparse_attention",
    fake=_fake,
    composite=_composite,
    autocast=("query", "key", "value"),
    flops=_flops,
)

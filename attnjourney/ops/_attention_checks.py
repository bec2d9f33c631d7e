"""The checks of attention for tensors without data (meta tensors, tracing); csrc/attention checks the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._registry.fakes import broadcasts, is_one, need, or_float32, same_size

ALIGNMENTS = ("top_left", "bottom_right")  # their indices are the operators' int
CHECKED = ("window_size", "key_lengths", "query_lengths", "softcap", "sinks", "alibi_slopes")  # options of `check`


def alignment_index(causal_alignment: str) -> int:
    if causal_alignment not in ALIGNMENTS:
        raise ValueError(f"causal_alignment: expected 'top_left' or 'bottom_right', got {causal_alignment!r}")
    return ALIGNMENTS.index(causal_alignment)


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    enable_gqa: bool,
    *,
    window_size: Sequence[int] = (-1, -1),
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> list[int]:
    """Raises what the C++ operator raises; returns the leading dimensions of the result."""
    rank = query.dim()
    for name, t in (("query", query), ("key", key), ("value", value)):
        need(t.dim() >= 2, f"{name}: expected at least 2 dimensions (..., length, head_dim)", t)
        need(t.dim() == rank, f"{name}: expected the rank of query, {rank}", t)
        need(t.shape[-1] > 0, f"{name}: expected a head_dim (last dimension) of at least 1", t)
    need(rank <= 19, "query: expected at most 19 dimensions", query)
    check_scale(scale)
    need(same_size(key.shape[-1], query.shape[-1]), f"key: expected the head_dim of query, {query.shape[-1]}", key)
    need(same_size(value.shape[-2], key.shape[-2]), f"value: expected the length of key, {key.shape[-2]}", value)

    lead = list(query.shape[:-2])
    for d in range(rank - 2):
        if d == rank - 3 and enable_gqa:
            for name, t in (("key", key), ("value", value)):
                n = t.shape[d]
                divides = lead[d] > 0 and lead[d] % n == 0 if n > 0 else lead[d] == 0
                need(divides, f"{name}: expected a head count that divides query's, {lead[d]}", t)
            continue
        for t in (key, value):
            if is_one(lead[d]):
                lead[d] = t.shape[d]
        where = "heads (dimension -3)" if d == rank - 3 else f"entries in batch dimension {d}"
        for name, t in (("key", key), ("value", value)):
            need(broadcasts(t.shape[d], lead[d]), f"{name}: expected {lead[d]} or 1 {where}", t)

    if attn_mask is not None:
        want = [*lead, query.shape[-2], key.shape[-2]]
        fits = attn_mask.dim() <= len(want) and all(
            broadcasts(n, w) for n, w in zip(reversed(attn_mask.shape), reversed(want))
        )
        need(fits, f"attn_mask: expected a shape that broadcasts to {tuple(want)}", attn_mask)

    batch, heads = math.prod(lead[:-1]), lead[-1] if lead else 1
    check_scores(window_size, softcap)
    for name, lengths in (("key_lengths", key_lengths), ("query_lengths", query_lengths)):
        if lengths is not None:
            check_index(name, lengths, batch)
    for name, numbers in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if numbers is not None:
            check_per_head(name, numbers, query, batch, heads)
    return lead


def check_scale(scale: float | None) -> None:
    if scale is not None and not -math.inf < scale < math.inf:
        raise ValueError(f"scale: expected a finite number, got {scale}")


def check_scores(window_size: Sequence[int], softcap: float) -> None:
    if len(window_size) != 2 or any(isinstance(w, int) and w < -1 for w in window_size):
        raise ValueError(f"window_size: expected two numbers from -1 (unbounded), got {tuple(window_size)}")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap: expected a finite number from 0, got {softcap}")


def check_index(name: str, t: Tensor, count: int) -> None:
    if t.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name}: expected dtype torch.int64 or torch.int32, got {t.dtype}")
    need(t.dim() == 1 and same_size(t.shape[0], count), f"{name}: expected shape ({count},)", t)


def check_per_head(name: str, t: Tensor, query: Tensor, batch: int, heads: int) -> None:
    if t.dtype not in (query.dtype, torch.float32):
        raise RuntimeError(f"{name}: expected dtype {or_float32(query.dtype, 'query')}, got {t.dtype}")
    fits = (t.dim() == 1 and same_size(t.shape[0], heads)) or (
        t.dim() == 2 and same_size(t.shape[0], batch) and same_size(t.shape[1], heads)
    )
    need(fits, f"{name}: expected shape ({heads},) or ({batch}, {heads})", t)


def check_sequences(
    query: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float | None, window_size: Sequence[int],
    softcap: float, sinks: Tensor | None, alibi_slopes: Tensor | None,
) -> int:  # fmt: skip
    """Of packed sequences, query (total, heads, dim): returns how many there are."""
    check_scale(scale)
    check_scores(window_size, softcap)
    need(cu_seqlens_q.dim() == 1, "cu_seqlens_q: expected shape (sequences + 1,)", cu_seqlens_q)
    batch = cu_seqlens_q.shape[0] - 1
    check_index("cu_seqlens_q", cu_seqlens_q, batch + 1)
    check_index("cu_seqlens_k", cu_seqlens_k, batch + 1)
    for name, numbers in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if numbers is not None:
            check_per_head(name, numbers, query, batch, query.shape[1])
    return batch


def check_caches(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Of caches (batch or blocks, heads, capacity or block size, dim) beside query, whose dimension 1 is heads."""
    for name, x in (("key", key), ("value", value)):
        need(x.dim() == 4, f"{name}: expected 4 dimensions", x)
    heads, dim = query.shape[1], query.shape[-1]
    need(dim == key.shape[3], f"key: expected the head_dim of query, {dim}", key)
    need(value.shape[:3] == key.shape[:3], "value: expected the shape of key but for the last dimension", value)
    need(heads % max(1, key.shape[1]) == 0, f"key: expected a head count that divides {heads}", key)

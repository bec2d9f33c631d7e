"""The checks of attention for tensors without data (meta tensors, tracing); csrc/attention.cpp checks the others."""

from __future__ import annotations

import math

from torch import Tensor


def check(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> list[int]:
    """Raises what the C++ operator raises; returns the leading dimensions of the result."""
    rank = query.dim()
    for name, t in (("query", query), ("key", key), ("value", value)):
        _need(t.dim() >= 2, f"{name}: expected at least 2 dimensions (..., length, head_dim)", t)
        _need(t.dim() == rank, f"{name}: expected the rank of query, {rank}", t)
        _need(t.shape[-1] > 0, f"{name}: expected a head_dim (last dimension) of at least 1", t)
    _need(rank <= 19, "query: expected at most 19 dimensions", query)
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    _need(key.shape[-1] == query.shape[-1], f"key: expected the head_dim of query, {query.shape[-1]}", key)
    _need(value.shape[-2] == key.shape[-2], f"value: expected the length of key, {key.shape[-2]}", value)

    lead = list(query.shape[:-2])
    for d in range(rank - 2):
        if d == rank - 3 and enable_gqa:
            for name, t in (("key", key), ("value", value)):
                n = t.shape[d]
                divides = lead[d] > 0 and lead[d] % n == 0 if n > 0 else lead[d] == 0
                _need(divides, f"{name}: expected a head count that divides query's, {lead[d]}", t)
            continue
        for t in (key, value):
            if lead[d] == 1:
                lead[d] = t.shape[d]
        where = "heads (dimension -3)" if d == rank - 3 else f"entries in batch dimension {d}"
        for name, t in (("key", key), ("value", value)):
            _need(t.shape[d] == lead[d] or t.shape[d] == 1, f"{name}: expected {lead[d]} or 1 {where}", t)

    if attn_mask is not None:
        want = [*lead, query.shape[-2], key.shape[-2]]
        fits = attn_mask.dim() <= len(want) and all(
            n == 1 or n == w for n, w in zip(reversed(attn_mask.shape), reversed(want))
        )
        _need(fits, f"attn_mask: expected a shape that broadcasts to {tuple(want)}", attn_mask)
    return lead


def _need(ok: bool, expected: str, got: Tensor) -> None:
    if not ok:
        raise ValueError(f"{expected}, got shape {tuple(got.shape)}")

"""Attention maps of any length in bounded memory: weights pooled by tiles while they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..._dtypes import accumulation_dtype
from ._blocks import WeightBlocks

POOLS = ("share", "mean", "max")


@dataclass(frozen=True)
class AttentionMaps:
    """Weights of one layer, pooled by tiles of query rows and keys (of 1 x 1 where the sequences are short).

    values: (*batch, heads, ceil(q_len / tile[0]), ceil(kv_len / tile[1])), float32, or float64 for float64 inputs.
    heads: the indices of the query heads shown. tile: (query rows, keys). pool: see attention_maps.
    """

    values: Tensor
    heads: tuple[int, ...]
    q_len: int
    kv_len: int
    tile: tuple[int, int]
    pool: str

    def sequence(self, index: int) -> AttentionMaps:
        """Of one sequence of a batch."""
        return replace(self, values=self.values.flatten(0, -4)[index])

    def of_one_sequence(self) -> AttentionMaps:
        """Itself with values (heads, rows, cols). ValueError where there are more sequences."""
        if self.values.dim() == 3:
            return self
        if self.values.shape[:-3].numel() != 1:
            raise ValueError(
                f"maps: expected one sequence, got values of shape {tuple(self.values.shape)}; take maps.sequence(0)"
            )
        return self.sequence(0)


def attention_maps(
    query: Tensor,
    key: Tensor,
    *args: Any,
    size: int = 512,
    pool: str = "share",
    heads: Sequence[int] | Tensor | None = None,
    **options: Any,
) -> AttentionMaps:
    """The weights of attention as pictures of at most size x size cells, for sequences of any length.

    A block of rows is computed by attnjourney.attention_weights and pooled at once, so besides query and key the memory
    is that of the result and of a few blocks of 1 MiB (or of one row of each sequence, if that is more), whatever q_len
    is.

    Args:
        query, key: as in attnjourney.attention: (batch, heads, q_len, head_dim), (batch, kv_heads, kv_len, head_dim),
            or any number of leading dimensions.
        args, options: attn_mask, is_causal and every option of attnjourney.attention_weights but lse and rows.
        size: the largest number of cells a side; the tiles are the smallest that suffice.
        pool: what a cell shows. "share": of the attention of its query rows, the part that its keys get (summed over
            keys, averaged over rows: rows of the map still sum to 1). "mean" and "max": of the weights in the tile.
        heads: the query heads wanted, all by default.

    Raises ValueError for size or pool, otherwise what attnjourney.attention_weights raises.
    """
    if size < 1:
        raise ValueError(f"size: expected at least 1, got {size}")
    if pool not in POOLS:
        raise ValueError(f"pool: expected one of {', '.join(map(repr, POOLS))}, got {pool!r}")
    blocks = WeightBlocks(query, key, *args, heads=heads, **options)
    tile_q, tile_k = (max(1, -(-length // size)) for length in (blocks.q_len, blocks.kv_len))
    n_rows, n_cols = -(-blocks.q_len // tile_q), -(-blocks.kv_len // tile_k)

    dtype = accumulation_dtype(query.dtype)
    values = torch.zeros(*blocks.batch, len(blocks.heads), n_rows, n_cols, dtype=dtype, device=query.device)
    for head, first, weights in blocks:
        pooled = _pool_keys(weights, tile_k, n_cols, pool, dtype)  # (*batch, rows, n_cols)
        into = torch.arange(first, first + weights.shape[-2], device=query.device) // tile_q
        if pool == "max":
            values[..., head, :, :].scatter_reduce_(-2, into[:, None].expand_as(pooled), pooled, "amax")
        else:
            values[..., head, :, :].index_add_(-2, into, pooled)
    if pool != "max":
        values /= _lengths(blocks.q_len, tile_q, n_rows).to(values)[:, None]
    if pool == "mean":
        values /= _lengths(blocks.kv_len, tile_k, n_cols).to(values)
    return AttentionMaps(values, tuple(blocks.heads), blocks.q_len, blocks.kv_len, (tile_q, tile_k), pool)


def _pool_keys(weights: Tensor, tile: int, n_cols: int, pool: str, dtype: torch.dtype) -> Tensor:
    """(..., kv_len) -> (..., n_cols): sums, or maxima, of `tile` keys each; the last may have fewer."""
    if tile == 1:
        return weights.to(dtype)
    whole = weights.shape[-1] // tile
    parts = [weights[..., : whole * tile].unflatten(-1, (whole, tile)), weights[..., whole * tile :].unsqueeze(-2)]
    parts = parts[: 1 + (whole < n_cols)]
    if pool == "max":
        return torch.cat([part.amax(-1) for part in parts], -1).to(dtype)
    return torch.cat([part.sum(-1, dtype=dtype) for part in parts], -1)


def _lengths(length: int, tile: int, count: int) -> Tensor:
    """How many of `length` rows or keys each of `count` tiles holds, (count,)."""
    return (length - tile * torch.arange(count)).clamp(max=tile)

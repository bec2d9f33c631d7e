"""Attention of the last rows of each sequence over a cache: torch.ops.attnjourney.decode."""

from __future__ import annotations

import torch
from torch import Tensor

from ._inference import need, register_inference


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    ring: bool = False,
    is_causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""softmax(scale * query key^T + mask) value over a cache of keys and values, any number of query rows.

    Sequence b has the keys 0 .. lengths[b] - 1, and its query rows are its last ones: row i stands at position
    p = lengths[b] - Sq + i. What lies beyond a length is never read. Few rows are split over keys as well as over
    sequences and heads (Flash-Decoding), and every key is read once, in its own dtype, for all heads of its group.

    Args:
        query: (B, Hq, Sq, E), float32, float64, bfloat16 or float16.
        key: (B, Hkv, capacity, E), or with a block_table (num_blocks, Hkv, block_size, E); query's dtype; any strides
            with a dense last dimension. Hq is a multiple of Hkv: query head h reads key/value head h // (Hq / Hkv).
        value: the same with Ev in place of E.
        lengths: (B,) int64.
        block_table: (B, max_blocks) int32: key j of sequence b is row j % block_size of block
            block_table[b, j // block_size] (PagedAttention, arXiv 2309.06180).
        ring: key j lies at j % capacity and only the last `capacity` keys are there; needs a left window.
        is_causal: a row sees the keys up to its own position.
        window_size: (left, right), inclusive: a row sees the keys p - left .. p + right; -1 is unbounded.
        scale: E^-0.5 by default.
        return_lse: also return the natural logarithm of each row's sum of exponentials.

    Returns:
        (B, Hq, Sq, Ev) in query's dtype, and with return_lse (B, Hq, Sq), float32 (float64 for float64). A row that
        sees no key is 0 with lse -inf.

    Raises:
        ValueError: a shape or a number that does not fit, a length past the capacity, a block table out of range.
        RuntimeError: a dtype or device that does not fit, or an input that requires grad: there is no backward.
    """
    out, lse = _decode(
        query, key, value, lengths, block_table=block_table, ring=ring, is_causal=is_causal, window_size=window_size,
        scale=scale,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _fake(*, query, key, value, lengths, block_table, **_):
    need(query.dim() == 4, "query: expected 4 dimensions", query)
    for name, x in (("key", key), ("value", value)):
        need(x.dim() == 4, f"{name}: expected 4 dimensions", x)
        need(block_table is not None or x.shape[0] == query.shape[0], f"{name}: expected query's batch size", x)
    need(query.shape[3] == key.shape[3], f"key: expected the head_dim of query, {query.shape[3]}", key)
    need(value.shape[:3] == key.shape[:3], "value: expected the shape of key but for the last dimension", value)
    need(query.shape[1] % max(1, key.shape[1]) == 0, f"key: expected a head count that divides {query.shape[1]}", key)
    need(lengths.shape == query.shape[:1], f"lengths: expected shape ({query.shape[0]},)", lengths)
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty((*query.shape[:3], value.shape[3])), query.new_empty(query.shape[:3], dtype=lse_dtype)


def _flops(*, query, key, value, block_table, **_):
    """As if every sequence were as long as the cache: its length is not known from shapes."""
    batch, heads, rows, dim = query
    keys = key[2] * (block_table[1] if block_table is not None else 1)
    return 2 * batch * heads * rows * keys * (dim + value[3])


_decode = register_inference("decode", fake=_fake, flops=_flops)

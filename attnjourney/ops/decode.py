"""Attention of the last rows of each sequence over a cache: torch.ops.attnjourney.decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from .._dtypes import BYTE_DTYPES
from ._attention_checks import check_caches, check_per_head, check_scores
from ._decode_vmap import vmap_decode
from ._registry.fakes import broadcasts, empty_lse, need, same_size
from ._registry.inference import as_index, register_inference

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._options import DecodeOptions

UNBOUNDED = (-1, -1)


@overload
def decode(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, block_table: Tensor | None = ..., ring: bool = ...,
    key_scale: Tensor | None = ..., value_scale: Tensor | None = ...,
    return_lse: Literal[False] = ..., **options: Unpack[DecodeOptions],
) -> Tensor: ...  # fmt: skip
@overload
def decode(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, block_table: Tensor | None = ..., ring: bool = ...,
    key_scale: Tensor | None = ..., value_scale: Tensor | None = ...,
    return_lse: Literal[True], **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def decode(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, block_table: Tensor | None = ..., ring: bool = ...,
    key_scale: Tensor | None = ..., value_scale: Tensor | None = ...,
    return_lse: bool, **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    ring: bool = False,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    is_causal: bool = True,
    window_size: tuple[int, int] | None = UNBOUNDED,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    prefix_length: int = 0,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""softmax(scale * query key^T + mask) value over a cache of keys and values, any number of query rows.

    Sequence b has the keys 0 .. lengths[b] - 1, and its query rows are its last ones: row i stands at position
    p = lengths[b] - Sq + i. What lies beyond a length is never read. Few rows are split over keys as well as over
    sequences and heads (Flash-Decoding), and every key is read once, in its own dtype, for all heads of its group.
    Options mean what they mean in :func:`attnjourney.attention`, at these positions.

    Args:
        query: (B, Hq, Sq, E), float32, float64, bfloat16 or float16.
        key: (B, Hkv, capacity, E), or with a block_table (num_blocks, Hkv, block_size, E); query's dtype, or bytes
            beside key_scale; any strides with a dense last dimension. Hq is a multiple of Hkv: query head h reads
            key/value head h // (Hq / Hkv).
        value: the same with Ev in place of E.
        lengths: (B,) int64 or int32.
        block_table: (B, max_blocks) int32: key j of sequence b is row j % block_size of block
            block_table[b, j // block_size] (PagedAttention, arXiv 2309.06180).
        ring: key j lies at j % capacity and only the last `capacity` keys are there; needs a left window.
        key_scale: of keys and values in bytes (int8 or float8_e4m3fn), which are read as they lie: key's
            shape but for the last dimension, float32; each key is its bytes times its number. A query of float32,
            bfloat16 or float16.
        value_scale: the same of value.
        is_causal: a row sees the keys up to its own position.
        window_size: (left, right), inclusive: a row sees the keys p - left .. p + right; -1 is unbounded, None both.
        scale: E^-0.5 by default.
        attn_mask: broadcasts to (B, Hq, Sq, S), S the longest length, or the capacity (not of a ring): column j is key
            j. bool: True where a key may be attended to; floating (query's dtype or float32): added to the scores.
        prefix_length: the first keys, visible whatever causality and window say. Not of a ring.
        softcap: scores become softcap * tanh(score / softcap); 0 or None: they stay.
        sinks: (Hq,) or (B, Hq), float32 or query's dtype: a logit that joins each head's denominator.
        alibi_slopes: (Hq,) or (B, Hq), float32 or query's dtype: -slope * |p - j| is added.
        return_lse: also return the natural logarithm of each row's denominator.

    Returns:
        (B, Hq, Sq, Ev) in query's dtype, and with return_lse (B, Hq, Sq), float32 (float64 for float64). A row that
        sees no key is 0 with lse -inf (the sink, where there is one).

    Raises:
        ValueError: a shape or a number that does not fit, a length past the capacity, a block table out of range.
        RuntimeError: a dtype or device that does not fit, or an input that requires grad: there is no backward.

    On CUDA nothing waits for the device, and calls can be captured in a graph; so no value is checked there: a length
    counts as one from 0 to the capacity (to attn_mask's last dimension, which may be anything up to the capacity), and
    a key whose block_table entry is no block is hidden. Head dimensions up to 256.
    """
    options = decode_options(
        is_causal, window_size, scale, attn_mask, prefix_length, softcap, sinks, alibi_slopes
    )  # what is not the default: each one costs time
    if block_table is not None:
        options["block_table"] = block_table
    if ring:
        options["ring"] = True
    if key_scale is not None:
        options["key_scale"] = key_scale
    if value_scale is not None:
        options["value_scale"] = value_scale
    out, lse = _decode(query, key, value, as_index(lengths), **options)
    return (out, lse) if return_lse else out


def decode_options(
    is_causal: bool, window_size: tuple[int, int] | None, scale: float | None, attn_mask: Tensor | None,
    prefix_length: int, softcap: float | None, sinks: Tensor | None, alibi_slopes: Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    """Those that are not the default."""
    options: dict[str, Any] = {}
    if not is_causal:
        options["is_causal"] = False
    if window_size is not None and window_size != UNBOUNDED:
        options["window_size"] = window_size
    if scale is not None:
        options["scale"] = scale
    if attn_mask is not None:
        options["attn_mask"] = attn_mask
    if prefix_length != 0:
        options["prefix_length"] = prefix_length
    if softcap is not None and softcap != 0.0:
        options["softcap"] = softcap
    if sinks is not None:
        options["sinks"] = sinks
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    return options


def check_options(
    query: Tensor, *, window_size: Sequence[int], attn_mask: Tensor | None, prefix_length: int, softcap: float,
    sinks: Tensor | None, alibi_slopes: Tensor | None, **_: Any,
) -> None:  # fmt: skip
    """The checks of the options that shapes allow."""
    check_scores(window_size, softcap)
    if isinstance(prefix_length, int) and prefix_length < 0:
        raise ValueError(f"prefix_length: expected a number from 0, got {prefix_length}")
    for name, t in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if t is not None:
            check_per_head(name, t, query, query.shape[0], query.shape[1])
    if attn_mask is not None:
        want = (*query.shape[:3], attn_mask.shape[-1] if attn_mask.dim() else 1)
        sizes = zip(reversed(attn_mask.shape), reversed(want))
        fits = 1 <= attn_mask.dim() <= 4 and all(broadcasts(n, w) for n, w in sizes)
        need(fits, f"attn_mask: expected a shape that broadcasts to {want[:3]} and the keys", attn_mask)


def check_scale(name: str, scale: Tensor | None, cache_name: str, cache: Tensor) -> None:
    """A scale beside a cache of bytes, and beside no other."""
    if scale is None:
        if cache.dtype in BYTE_DTYPES:
            raise ValueError(f"{name}: expected a tensor beside {cache_name} of {cache.dtype}, got None")
        return
    if cache.dtype not in BYTE_DTYPES:
        expected = "dtype torch.int8 or torch.float8_e4m3fn"
        raise RuntimeError(f"{cache_name}: expected {expected} beside {name}, got {cache.dtype}")
    if scale.dtype != torch.float32:
        raise RuntimeError(f"{name}: expected dtype torch.float32, got {scale.dtype}")
    fits = scale.shape == cache.shape[:-1]
    need(fits, f"{name}: expected the shape of {cache_name} but for its last dimension", scale)


def _fake(
    *, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, block_table: Tensor | None,
    key_scale: Tensor | None, value_scale: Tensor | None, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    need(query.dim() == 4, "query: expected 4 dimensions", query)
    check_caches(query, key, value)
    fits = block_table is not None or same_size(key.shape[0], query.shape[0])
    need(fits, "key: expected query's batch size", key)
    check_scale("key_scale", key_scale, "key", key)
    check_scale("value_scale", value_scale, "value", value)
    need(lengths.shape == query.shape[:1], f"lengths: expected shape ({query.shape[0]},)", lengths)
    check_options(query, **options)
    return query.new_empty((*query.shape[:3], value.shape[3])), empty_lse(query, *query.shape[:3])


def _flops(*, query: torch.Size, key: torch.Size, value: torch.Size, block_table: torch.Size | None, **_: Any) -> int:
    """As if every sequence were as long as the cache: its length is not known from shapes."""
    batch, heads, rows, dim = query
    keys = key[2] * (block_table[1] if block_table is not None else 1)
    return 2 * batch * heads * rows * keys * (dim + value[3])


_decode = register_inference(
    "decode", fake=_fake, flops=_flops, autocast={"query": "key", "attn_mask": "key"}, vmap=vmap_decode
)

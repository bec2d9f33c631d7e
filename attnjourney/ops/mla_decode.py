"""Decoding of multi-head latent attention in the latent space: torch.ops.attnjourney.mla_decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ._decode_vmap import vmap_mla_decode
from ._registry.fakes import empty_lse, need
from ._registry.inference import as_index, register_inference
from .decode import UNBOUNDED, check_options, check_scale, decode_options
from .sparse_attention import check_indices, sparse_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._options import DecodeOptions


@overload
def mla_decode(
    query: Tensor, latent: Tensor, lengths: Tensor, kv_b_weight: Tensor, *, block_table: Tensor | None = ...,
    latent_scale: Tensor | None = ..., indices: Tensor | None = ...,
    return_lse: Literal[False] = ..., **options: Unpack[DecodeOptions],
) -> Tensor: ...  # fmt: skip
@overload
def mla_decode(
    query: Tensor, latent: Tensor, lengths: Tensor, kv_b_weight: Tensor, *, block_table: Tensor | None = ...,
    latent_scale: Tensor | None = ..., indices: Tensor | None = ...,
    return_lse: Literal[True], **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def mla_decode(
    query: Tensor, latent: Tensor, lengths: Tensor, kv_b_weight: Tensor, *, block_table: Tensor | None = ...,
    latent_scale: Tensor | None = ..., indices: Tensor | None = ...,
    return_lse: bool, **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def mla_decode(
    query: Tensor,
    latent: Tensor,
    lengths: Tensor,
    kv_b_weight: Tensor,
    *,
    block_table: Tensor | None = None,
    latent_scale: Tensor | None = None,
    indices: Tensor | None = None,
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
    r"""Attention of the last rows of each sequence over a cache of latents (DeepSeek-V2, arXiv 2405.04434).

    scores = (q_nope W_UK . c + q_rope . k_rope) * scale, u = softmax(scores) c, out = u W_UV^T: equal to attention over
    the keys [c W_UK^T, k_rope] and values c W_UV^T. Those are made, for a few heads at a time, only where the query
    rows are so many that it costs less. Rows, lengths, windows as in :func:`attnjourney.decode`.

    Args:
        query: (B, H, Sq, nope + rope), a head's nope part first, its rope part turned.
        latent: (B, capacity, kv_lora + rope), for each token its normed latent, then its rotary key, turned; the one
            layout of the rotary part (interleaved or half-split) that query has too. With block_table
            (num_blocks, block_size, kv_lora + rope).
        lengths: (B,) int64 or int32.
        kv_b_weight: (H * (nope + v), kv_lora), for each head nope rows W_UK, then v rows W_UV, as in transformers'
            deepseek_v3.
        latent_scale: of latents in bytes (int8 or float8_e4m3fn): latent's shape but for the last
            dimension, float32, as key_scale of :func:`attnjourney.decode`.
        indices: (B, Sq, k) int32 or int64: each row sees of its latents those of these tokens alone (below 0: none),
            as `lightning_indexer` chooses them; by :func:`attnjourney.sparse_attention`, with gradients. Not with
            latent_scale, window_size, attn_mask, prefix_length or alibi_slopes.
        block_table, is_causal, window_size, attn_mask, prefix_length, softcap, sinks, alibi_slopes, return_lse: as
            in :func:`attnjourney.decode`.
        scale: (nope + rope)^-0.5 by default.

    Returns:
        (B, H, Sq, v), and with return_lse (B, H, Sq).

    Raises:
        ValueError, RuntimeError: as :func:`attnjourney.decode`.
    """
    options = decode_options(is_causal, window_size, scale, attn_mask, prefix_length, softcap, sinks, alibi_slopes)
    if indices is not None:
        alone: dict[str, Any] = dict(latent_scale=latent_scale, attn_mask=attn_mask, alibi_slopes=alibi_slopes)
        alone |= dict(window_size=None if window_size in (None, UNBOUNDED) else window_size)
        for name, given in (*alone.items(), ("prefix_length", prefix_length or None)):
            if given is not None:
                raise ValueError(f"{name}: expected none beside indices, got {given!r}")
        out, lse = _over_chosen(
            query, latent, as_index(lengths), kv_b_weight, indices, block_table, is_causal=is_causal, scale=scale,
            softcap=softcap or 0.0, sinks=sinks,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    if latent_scale is not None:
        options["latent_scale"] = latent_scale
    out, lse = _mla_decode(query, latent, as_index(lengths), kv_b_weight, block_table=block_table, **options)
    return (out, lse) if return_lse else out


def _over_chosen(
    query: Tensor, latent: Tensor, lengths: Tensor, kv_b_weight: Tensor, indices: Tensor, block_table: Tensor | None, *,
    is_causal: bool, scale: float | None, softcap: float, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """W_UK goes to the query's side, W_UV behind the sum: one head of keys, the latents, for all heads."""
    need(query.dim() == 4, "query: expected 4 dimensions", query)
    need(latent.dim() == 3, "latent: expected 3 dimensions", latent)
    need(kv_b_weight.dim() == 2, "kv_b_weight: expected 2 dimensions", kv_b_weight)
    (batch, heads, rows, dim), (per_head, rank) = (
        query.shape,
        (kv_b_weight.shape[0] // query.shape[1], kv_b_weight.shape[1]),
    )
    nope = dim - (latent.shape[2] - rank)
    fits = kv_b_weight.shape[0] == heads * per_head and 0 < nope <= dim and per_head > nope
    need(fits, f"kv_b_weight: expected shape (heads * (nope + v), kv_lora) for {heads} heads of {dim}", kv_b_weight)
    weight = kv_b_weight.view(heads, per_head, rank)
    absorbed = torch.cat([query[..., :nope] @ weight[:, :nope], query[..., nope:]], -1)
    options: dict[str, Any] = dict(is_causal=is_causal, causal_alignment="bottom_right", key_lengths=lengths)
    key = latent.unsqueeze(1)
    if block_table is not None:
        # what is named are tokens of a sequence: those it may not see are left out, the rest are rows of the pool
        capacity = block_table.shape[1] * latent.shape[1]
        check_indices(indices, batch, 1, rows)
        end = lengths[:, None, None].to(indices.device)
        if is_causal:
            end = end - rows + 1 + torch.arange(rows, device=indices.device)[:, None]
        there = (indices >= 0) & (indices < end) & (indices < capacity)
        token = torch.where(there, indices, 0).long()
        block = block_table.long().gather(1, (token // latent.shape[1]).flatten(1)).view(token.shape)
        indices = torch.where(there, block * latent.shape[1] + token % latent.shape[1], -1)
        key = latent.reshape(1, 1, -1, latent.shape[2]).expand(batch, 1, -1, -1)
        options = {}
    scale = dim**-0.5 if scale is None else scale
    out, lse = sparse_attention(
        absorbed, key, key[..., :rank], indices, scale=scale, softcap=softcap, sinks=sinks, return_lse=True, **options
    )
    return out @ weight[:, nope:].mT, lse


def _fake(
    *, query: Tensor, latent: Tensor, lengths: Tensor, kv_b_weight: Tensor, block_table: Tensor | None,
    latent_scale: Tensor | None, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    need(query.dim() == 4, "query: expected 4 dimensions", query)
    if block_table is None:
        need(latent.dim() == 3 and latent.shape[0] == query.shape[0], "latent: expected (batch, capacity, dim)", latent)
    else:
        need(latent.dim() == 3, "latent: expected (num_blocks, block_size, dim)", latent)
        shape_ok = block_table.dim() == 2 and block_table.shape[0] == query.shape[0]
        need(shape_ok, "block_table: expected (batch, max_blocks)", block_table)
    check_scale("latent_scale", latent_scale, "latent", latent)
    need(kv_b_weight.dim() == 2, "kv_b_weight: expected 2 dimensions", kv_b_weight)
    need(lengths.shape == query.shape[:1], f"lengths: expected shape ({query.shape[0]},)", lengths)
    _, _, v = _dims(query.shape, latent.shape, kv_b_weight.shape)
    need(v > 0, "kv_b_weight: expected query's heads times (nope + v) rows", kv_b_weight)
    check_options(query, **options)
    return query.new_empty((*query.shape[:3], v)), empty_lse(query, *query.shape[:3])


def _dims(query: torch.Size, latent: torch.Size, weight: torch.Size) -> tuple[int, int, int]:
    """kv_lora, nope, v from the shapes."""
    nope = query[3] - (latent[2] - weight[1])
    return weight[1], nope, weight[0] // query[1] - nope


def _flops(
    *, query: torch.Size, latent: torch.Size, kv_b_weight: torch.Size, block_table: torch.Size | None, **_: Any,
) -> int:  # fmt: skip
    """As if every sequence were as long as the cache; the products with W_UK and W_UV included."""
    kv_lora, nope, v = _dims(query, latent, kv_b_weight)
    batch, heads, rows = query[:3]
    capacity = latent[1] if block_table is None else latent[1] * block_table[1]
    return 2 * batch * heads * rows * (kv_lora * (nope + v) + capacity * (latent[2] + kv_lora))


_mla_decode = register_inference(
    "mla_decode",
    fake=_fake,
    flops=_flops,
    autocast={"query": "latent", "kv_b_weight": "latent", "attn_mask": "latent"},
    vmap=vmap_mla_decode,
)

"""Scaled dot-product attention written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from .._dtypes import accumulation_dtype
from ..block_mask import BlockMask
from ._visibility import masked_scores, per_head, per_item, visibility, weighted_values
from .dropout import dropout_keep_mask, keep_mask_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._options import AttentionOptions


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | BlockMask | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., *, keep_mask: Tensor | None = ..., return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | BlockMask | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., *, keep_mask: Tensor | None = ..., return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] | None = (-1, -1),
    prefix_length: int = 0,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    keep_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attnjourney.attention in plain PyTorch, in the dtype of the inputs and O(L * S) memory.

    Args: as attnjourney.attention, and
        keep_mask: bool, broadcasts to (..., Hq, L, S): the weights that dropout keeps. Without it they are drawn as
            attnjourney.attention draws them: the same ones after the same torch.manual_seed.
        return_lse: also return the logarithm of each row's sum of exponentials, (..., Hq, L), float32 (float64 for
            float64); -inf where a row sees no key.
    """
    query, key, value = expand_heads(query, key, value, enable_gqa)
    if isinstance(attn_mask, BlockMask):
        attn_mask = attn_mask.to_dense().reshape(_mask_shape(attn_mask, query))
    visible, distance = visibility(
        query,
        key,
        attn_mask,
        is_causal,
        causal_alignment,
        window_size or (-1, -1),
        prefix_length,
        key_lengths,
        query_lengths,
    )
    empty = ~visible.any(-1, keepdim=True)

    scores = masked_scores(query, key, visible) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = with_modifiers(scores, query, distance, attn_mask, softcap, alibi_slopes)
    scores = scores.masked_fill(~visible, -math.inf)
    wide = accumulation_dtype(query.dtype)
    if sinks is None:
        scores = scores.masked_fill(empty, 0.0)  # softmax of -inf alone would be NaN
        weights = scores.softmax(-1)
        lse = scores.to(wide).logsumexp(-1) if key.shape[-2] else scores.to(wide).sum(-1)
        lse = lse.masked_fill(empty.squeeze(-1), -math.inf)
    else:
        logits = per_head(sinks, query).expand(*scores.shape[:-1], 1)
        real = logits > -math.inf  # a sink of -inf is none
        alone = empty & ~real
        logits = torch.cat([scores, logits.to(scores.dtype)], -1).masked_fill(alone, 0.0)
        weights = logits.softmax(-1)[..., :-1]
        lse = logits.to(wide).logsumexp(-1).masked_fill(alone.squeeze(-1), -math.inf)
        if query_lengths is not None:
            rows = torch.arange(query.shape[-2], device=query.device) < per_item(query_lengths, query).squeeze(-1)
            lse = lse.masked_fill(~rows, -math.inf)
    weights = weights.masked_fill(~visible, 0.0).to(value.dtype)

    if dropout_p > 0:
        if keep_mask is None:
            seed = dropout_seed
            if seed is None:
                seed = torch.randint(1 << 62, (), dtype=torch.int64, device=query.device)
            keep_mask = keep_mask_of(weights.shape, seed, dropout_p).to(query.device)
        weights = weights.masked_fill(~keep_mask, 0.0) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)

    out = weighted_values(weights, value, visible)
    return (out, lse) if return_lse else out


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    block_table: Tensor | None = None,
    keep_masks: list[Tensor] | None = None,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """attnjourney.varlen_attention as a loop over the sequences. keep_masks: what dropout keeps, (Hq, L, S) of each."""
    if block_table is not None:
        key, value = (packed_blocks(x, cu_seqlens_k, block_table) for x in (key, value))
    outs, lses = [], []
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if dropout_p > 0 and keep_masks is None:
        if dropout_seed is None:
            dropout_seed = torch.randint(1 << 62, (), dtype=torch.int64, device=query.device)
        q_len, kv_len = (max((b - a for a, b in zip(x, x[1:])), default=0) for x in (q_ends, k_ends))
        keep_masks = list(dropout_keep_mask(dropout_seed, len(q_ends) - 1, query.shape[1], q_len, kv_len, dropout_p))
    for i, (q0, q1, k0, k1) in enumerate(zip(q_ends, q_ends[1:], k_ends, k_ends[1:])):
        q, k, v = query[q0:q1].transpose(0, 1), key[k0:k1].transpose(0, 1), value[k0:k1].transpose(0, 1)
        own: dict[str, Any] = {
            name: x if x is None or x.dim() == 1 else x[i]
            for name, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes))
        }
        keep = None if keep_masks is None else keep_masks[i][..., : q1 - q0, : k1 - k0].to(query.device)
        out, lse = attention(
            q, k, v, None, dropout_p, is_causal, enable_gqa=True, keep_mask=keep, return_lse=True, **own, **options
        )
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    rest = query.shape[0] - q_ends[-1]
    outs.append(query.new_zeros(rest, query.shape[1], value.shape[2]))
    wide = accumulation_dtype(query.dtype)
    lses.append(query.new_full((query.shape[1], rest), -math.inf, dtype=wide))
    out = torch.cat(outs)
    return (out, torch.cat(lses, -1)) if return_lse else out


def packed_blocks(cache: Tensor, cu_seqlens: Tensor, block_table: Tensor) -> Tensor:
    """The rows of a cache (num_blocks, heads, block_size, dim) as packed sequences, (total, heads, dim)."""
    size, rows = cache.shape[2], [cache.new_empty(0, cache.shape[1], cache.shape[3])]
    for blocks, length in zip(block_table.long(), cu_seqlens.diff().tolist()):
        at = torch.arange(length, device=cache.device)
        rows.append(cache[blocks[at // size], :, at % size])
    return torch.cat(rows)


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    is_causal: bool = False,
    *,
    rows: Tensor | None = None,
    heads: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """attnjourney.attention_weights as the result of attention over the identity matrix."""
    eye = torch.eye(key.shape[-2], dtype=query.dtype, device=query.device)
    value = eye.expand(*key.shape[:-2], *eye.shape)
    weights = attention(query, key, value, attn_mask, 0.0, is_causal, **options)
    if heads is not None:
        weights = weights.index_select(-3, torch.as_tensor(heads))
    return weights if rows is None else weights.index_select(-2, torch.as_tensor(rows))


def with_modifiers(
    scores: Tensor, query: Tensor, distance: Tensor, attn_mask: Tensor | None, softcap: float | None,
    alibi_slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """What is done to scaled scores: softcap, then a floating mask, then ALiBi."""
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
    return scores if alibi_slopes is None else scores - per_head(alibi_slopes, query) * distance


def differentiable_weights(
    query: Tensor, key: Tensor, attn_mask: Tensor | BlockMask | None, is_causal: bool, lse: Tensor | None,
    rows: Tensor | Sequence[int] | None, *, scale: float | None, enable_gqa: bool, causal_alignment: str,
    window_size: tuple[int, int], prefix_length: int, key_lengths: Tensor | None, query_lengths: Tensor | None,
    softcap: float, sinks: Tensor | None, alibi_slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """The weights of the rows wanted, exp(score - lse) where lse is given: (..., Hq, rows, S) in query's dtype."""
    wide, dtype = accumulation_dtype(query.dtype), query.dtype
    query, key, _ = expand_heads(query, key, key, enable_gqa)
    if isinstance(attn_mask, BlockMask):
        attn_mask = attn_mask.to_dense().reshape(_mask_shape(attn_mask, query))
    chosen = torch.arange(query.shape[-2], device=query.device)
    if rows is not None:
        chosen = torch.as_tensor(rows, device=query.device)
        if attn_mask is not None and attn_mask.dim() >= 2 and attn_mask.shape[-2] > 1:
            attn_mask = attn_mask.index_select(-2, chosen)
    visible, distance = visibility(
        query, key, attn_mask, is_causal, causal_alignment, window_size, prefix_length, key_lengths, query_lengths,
        chosen,
    )  # fmt: skip
    query = query.index_select(-2, chosen)
    scores = masked_scores(query.to(wide), key.to(wide), visible)
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = with_modifiers(scores, query, distance, attn_mask, softcap, alibi_slopes)
    if lse is None:
        return softmax_of_visible(scores, visible, sinks, query).to(dtype)
    lse = lse.index_select(-1, chosen).unsqueeze(-1)
    lse = torch.where(lse == -math.inf, 0.0, lse)  # a row that sees no key: all its scores are hidden
    return (scores - lse).masked_fill(~visible, -math.inf).exp().to(dtype)


def softmax_of_visible(scores: Tensor, visible: Tensor, sinks: Tensor | None, query: Tensor) -> Tensor:
    """0 where a key is hidden; a sink joins the sum."""
    keys = scores.shape[-1]
    scores = scores.masked_fill(~visible & visible.any(-1, keepdim=True), -math.inf)
    if sinks is not None:
        sink = per_head(sinks, query).to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1)[..., :keys].masked_fill(~visible, 0.0)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """attnjourney.merge_states by the definition: weights are the softmax of the two lse."""
    lses = torch.stack([lse_a, lse_b], -1)
    empty = (lses == -math.inf).all(-1, keepdim=True)
    weights = lses.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).unsqueeze(-2)
    out = weights[..., 0] * out_a + weights[..., 1] * out_b
    return out.to(out_a.dtype), lses.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty.squeeze(-1), -math.inf)


def expand_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """All with the same batch and head dimensions."""
    if enable_gqa and query.dim() >= 3 and query.shape[-3] > 0:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    return query, key, value


def _mask_shape(mask: BlockMask, query: Tensor) -> tuple[int, ...]:
    """Of its dense form, to broadcast to (..., Hq, L, S)."""
    batch, heads, *lengths = mask.shape
    batch_sizes = query.shape[:-3] if batch != 1 else (1,) * (query.dim() - 3)
    return (*batch_sizes, *(heads,)[: query.dim() - 2], *lengths)

"""The stages of one attention in plain PyTorch, for chosen heads and rows: O(heads * rows * S) memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..._dtypes import accumulation_dtype
from ...block_mask import BlockMask
from ...ops._attention_checks import ALIGNMENTS
from ...reference._visibility import per_head, visibility, weighted_values
from ...reference.dropout import kept


def attention_stages(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    heads: Tensor,
    rows: Tensor,
    *,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal_alignment: str | int = "top_left",
    window_size: tuple[int, int] = (-1, -1),
    prefix_length: int = 0,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_seed: Tensor | None = None,
) -> dict[str, Tensor]:
    """name -> (..., heads, rows, S) and the like; the names are those of trace. Without a value: up to the weights.

    Scores, softmax and sums are in float32 (float64 for float64), as in the kernels.
    """
    alignment = causal_alignment if isinstance(causal_alignment, str) else ALIGNMENTS[causal_alignment]
    dtype, wide = query.dtype, accumulation_dtype(query.dtype)
    lead, q_heads = _lead(query, key, value), number_of_heads(query, key, enable_gqa)
    device = query.device
    own_heads, rows = heads.to(device), rows.to(device)
    blocks = isinstance(attn_mask, BlockMask)
    mask = attn_mask.dense_rows(rows) if isinstance(attn_mask, BlockMask) else attn_mask
    if query.dim() >= 3:
        group = q_heads // key.shape[-3] if enable_gqa and key.shape[-3] else 1
        query = _pick(query, -3, own_heads)
        key = _pick(key, -3, own_heads // group)
        value = None if value is None else _pick(value, -3, own_heads // group)
        if mask is not None and mask.dim() >= 3:
            mask = _pick(mask, -3, own_heads)
        sinks, alibi_slopes = (None if x is None else x.index_select(-1, own_heads) for x in (sinks, alibi_slopes))
        query, key = (x.expand(*lead, len(heads), *x.shape[-2:]) for x in (query, key))
        value = None if value is None else value.expand(*lead, len(heads), *value.shape[-2:])
    if mask is not None and mask.dim() >= 2 and not blocks:
        mask = _pick(mask, -2, rows)
    seen, distance = visibility(
        query, key, mask, is_causal, alignment, window_size, prefix_length, key_lengths, query_lengths, rows
    )
    stages = {"query": query.index_select(-2, rows), "key": key}
    if value is not None:
        stages["value"] = value

    scores = stages["query"].to(wide) @ key.to(wide).mT
    scores = stages["scores"] = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if softcap > 0:
        scores = stages["softcapped"] = softcap * (scores / softcap).tanh()
    if mask is not None and mask.dtype != torch.bool:
        stages["bias"] = mask.to(wide).expand(scores.shape)
        scores = scores + stages["bias"]
    if alibi_slopes is not None:
        stages["alibi"] = (-per_head(alibi_slopes, query).to(wide) * distance).expand(scores.shape)
        scores = scores + stages["alibi"]
    stages["mask"] = seen
    scores = stages["masked_scores"] = scores.masked_fill(~seen, -math.inf)

    lse = scores.logsumexp(-1) if key.shape[-2] else scores.new_full(scores.shape[:-1], -math.inf)
    if sinks is not None:
        sink = per_head(sinks, query).to(wide).squeeze(-1).expand(lse.shape)
        if query_lengths is not None:
            real = rows < query_lengths.reshape(*lead, *(1,) * min(2, query.dim() - 1))
            sink = sink.masked_fill(~real, -math.inf)
        stages["sinks"] = sink
        lse = torch.logaddexp(lse, sink)
    stages["lse"] = lse
    row = lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
    weights = stages["weights"] = (scores - row).exp().masked_fill(~seen, 0.0)
    if value is None:
        return stages

    if dropout_p > 0:
        assert dropout_seed is not None
        numbers = own_heads if query.dim() >= 3 else torch.zeros(1, dtype=torch.int64)
        batch = torch.arange(math.prod(lead))[:, None] * q_heads
        keep = kept(dropout_seed, (batch + numbers.cpu()).flatten(), rows.cpu(), key.shape[-2], dropout_p)
        keep = stages["kept"] = keep.reshape(weights.shape).to(device)
        weights = weights.masked_fill(~keep, 0.0) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
        stages["dropped_weights"] = weights
    stages["output"] = weighted_values(weights, value.to(wide), seen).to(dtype)
    return stages


def number_of_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> int:
    if query.dim() < 3:
        return 1
    return query.shape[-3] if enable_gqa else max(query.shape[-3], key.shape[-3])


def _lead(*tensors: Tensor | None) -> tuple[int, ...]:
    """The batch dimensions of all together."""
    return torch.broadcast_shapes(*(x.shape[:-3] for x in tensors if x is not None))


def _pick(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """x at these places of a dimension; where its size is 1, it broadcasts. A view where all are picked in order."""
    size = x.shape[dim]
    if size == 1 or (len(index) == size and torch.equal(index, torch.arange(size, device=index.device))):
        return x
    return x.index_select(dim, index)

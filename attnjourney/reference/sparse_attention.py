"""Token-sparse attention and its indexer in plain PyTorch: the keys that the indices name, gathered."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._dtypes import accumulation_dtype


def visible_indices(
    indices: Tensor, q_len: int, kv_len: int, *, query_block_size: int = 1, is_causal: bool = False,
    causal_alignment: str = "top_left", key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Per row: indices (B, Hk or 1, L, k) of keys that exist, and where they are those of a key that the row sees."""
    rows = torch.arange(q_len, device=indices.device)
    own = (indices if indices.dim() == 4 else indices.unsqueeze(1)).long()
    if query_block_size != 1:
        own = own.index_select(2, rows // query_block_size)
    length: Tensor | int = kv_len if key_lengths is None else key_lengths.reshape(-1, 1, 1, 1)
    seen = (own >= 0) & (own < length) & (own < kv_len)
    if is_causal:
        position = rows[:, None] + (length - q_len if causal_alignment == "bottom_right" else 0)
        seen = seen & (own <= position)
    return torch.where(seen, own, 0), seen


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
    """attnjourney.sparse_attention in plain PyTorch, in the dtype of the inputs; every row's keys are copied, in
    O(L * k * D) memory. An index past the keys names none."""
    out, lse, _ = sparse_attention_and_stats(
        query, key, value, indices, scale=scale, is_causal=is_causal, causal_alignment=causal_alignment,
        key_lengths=key_lengths, softcap=softcap, sinks=sinks, query_block_size=query_block_size,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def sparse_attention_and_stats(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, *, scale: float | None, is_causal: bool,
    causal_alignment: str, key_lengths: Tensor | None, softcap: float, sinks: Tensor | None, query_block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse and, without gradients, the sum of exponentials against the largest score."""
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    wide = accumulation_dtype(query.dtype)
    if min(batch, heads, q_len, kv_len, indices.shape[-1]) == 0:
        key, value = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) for x in (key, value))
        indices = torch.cat([indices, indices.new_full((*indices.shape[:-1], 1), -1)], -1)
    at, seen = visible_indices(
        indices, q_len, kv_len, query_block_size=query_block_size, is_causal=is_causal,
        causal_alignment=causal_alignment, key_lengths=key_lengths,
    )  # fmt: skip
    at, seen = (x.expand(batch, kv_heads, *x.shape[2:]) for x in (at, seen))

    def rows_of(x: Tensor) -> Tensor:  # (B, Hk, L, k, D), 0 where hidden
        width = x.shape[-1]
        flat = at.reshape(batch, kv_heads, -1, 1).expand(-1, -1, -1, width)
        found = x.gather(2, flat).reshape(*at.shape, width)
        return torch.where(seen.unsqueeze(-1), found, 0.0)

    group = heads // max(1, kv_heads)
    grouped = query.reshape(batch, kv_heads, group, q_len, dim)
    scores = torch.einsum("bhgld,bhlkd->bhglk", grouped, rows_of(key))
    scores = scores * (1 / math.sqrt(dim) if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    hidden = ~seen.unsqueeze(2)
    scores = scores.masked_fill(hidden, -math.inf)
    alone = hidden.all(-1, keepdim=True).expand(*scores.shape[:-1], 1)
    if sinks is not None:
        of_head = sinks.reshape(-1, kv_heads, group, 1, 1).to(scores.dtype)
        logit = of_head.expand(batch, kv_heads, group, q_len, 1)
        alone = alone & (logit == -math.inf)
        scores = torch.cat([scores, logit], -1)
    scores = scores.masked_fill(alone, 0.0)  # softmax of -inf alone would be NaN
    weights = scores.softmax(-1)
    lse = scores.to(wide).logsumexp(-1).masked_fill(alone.squeeze(-1), -math.inf)
    weights = weights[..., : at.shape[-1]].masked_fill(hidden, 0.0)
    out = torch.einsum("bhglk,bhlkd->bhgld", weights.to(value.dtype), rows_of(value))
    reference = scores.detach().to(wide).amax(-1)
    stats = torch.stack([reference, (reference - lse.detach()).exp()], -1)
    shape = (batch, heads, q_len)
    return out.reshape(*shape, value.shape[-1]), lse.reshape(shape), stats.reshape(*shape, 2)


def indexer_scores(query: Tensor, key: Tensor, weights: Tensor, *, scale: float = 1.0) -> Tensor:
    """(B, L, S): sum over the heads of weights * relu(scale query key^T)."""
    products = torch.einsum("bhld,bsd->bhls", query, key) * scale
    return (weights.to(products.dtype).unsqueeze(-1) * products.relu()).sum(1)


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    topk: int,
    *,
    is_causal: bool = True,
    causal_alignment: str = "top_left",
    key_lengths: Tensor | None = None,
    scale: float = 1.0,
    return_scores: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attnjourney.lightning_indexer by all scores, (B, L, S), in the inputs' accumulation dtype, and a stable sort."""
    wide = accumulation_dtype(query.dtype)
    scores = indexer_scores(query.detach().to(wide), key.detach().to(wide), weights.detach().to(wide), scale=scale)
    batch, q_len, kv_len = scores.shape
    every = torch.arange(kv_len, device=query.device).expand(batch, q_len, kv_len)
    _, seen = visible_indices(
        every, q_len, kv_len, is_causal=is_causal, causal_alignment=causal_alignment, key_lengths=key_lengths
    )
    seen = seen.squeeze(1)
    rank = torch.where(scores.isnan(), math.inf, scores)  # a NaN shows: it is chosen first
    order = rank.masked_fill(~seen, -math.inf).sort(stable=True, dim=-1, descending=True).indices
    order = order[..., :topk]
    chosen = torch.where(seen.gather(-1, order), order, kv_len).sort(-1).values  # ascending, those that are not last
    there = chosen < kv_len
    found = scores.gather(-1, chosen.clamp(max=max(0, kv_len - 1))) if kv_len else scores
    missing = topk - chosen.shape[-1]
    indices = torch.nn.functional.pad(torch.where(there, chosen, -1), (0, missing), value=-1).int()
    found = torch.nn.functional.pad(found.masked_fill(~there, -math.inf), (0, missing), value=-math.inf)
    return (indices, found) if return_scores else indices


def lightning_indexer_loss(
    index_query: Tensor,
    index_key: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    *,
    index_scale: float = 1.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """attnjourney.lightning_indexer_loss in plain PyTorch: both distributions over the chosen keys, (B, L, k)."""
    loss, _ = indexer_loss_and_gradient(
        index_query, index_key, weights, query, key, indices, index_scale=index_scale, scale=scale
    )
    return loss


def indexer_loss_and_gradient(
    index_query: Tensor, index_key: Tensor, weights: Tensor, query: Tensor, key: Tensor, indices: Tensor, *,
    index_scale: float, scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss, and its derivative by the scores without gradients."""
    wide = accumulation_dtype(query.dtype)
    query, key = query.detach().to(wide), key.detach().to(wide)
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    if kv_len == 0:
        key = key.new_zeros(batch, kv_heads, 1, dim)
        index_key = torch.cat([index_key, index_key.new_zeros(batch, 1, index_key.shape[-1])], 1)
    at, seen = (x.squeeze(1) for x in visible_indices(indices, q_len, kv_len))

    def rows_of(x: Tensor) -> Tensor:  # (B, ..., S, D) -> (B, ..., L, k, D), 0 where hidden
        extra = x.dim() - 3
        flat = at.reshape(batch, *(1,) * extra, -1, 1).expand(*x.shape[:-2], -1, x.shape[-1])
        found = x.gather(-2, flat).reshape(*x.shape[:-2], *at.shape[1:], x.shape[-1])
        return torch.where(seen.reshape(batch, *(1,) * extra, *seen.shape[1:], 1), found, 0.0)

    grouped = query.reshape(batch, kv_heads, heads // max(1, kv_heads), q_len, dim)
    scores = torch.einsum("bhgld,bhlkd->bhglk", grouped, rows_of(key))
    scores = scores * (1 / math.sqrt(dim) if scale is None else scale)
    alone = ~seen.any(-1, keepdim=True)
    hide = ~seen & ~alone
    target = scores.masked_fill(hide[:, None, None], -math.inf).softmax(-1).sum((1, 2))
    target = (target / target.sum(-1, keepdim=True)).masked_fill(~seen, 0.0)

    products = torch.einsum("bhld,blkd->bhlk", index_query.to(wide), rows_of(index_key.to(wide))) * index_scale
    index = (weights.to(wide).unsqueeze(-1) * products.relu()).sum(1)
    logits = index.masked_fill(hide, -math.inf).log_softmax(-1)
    terms = torch.special.xlogy(target, target) - target * torch.where(seen, logits, 0.0)
    gradient = (logits.exp().masked_fill(~seen, 0.0) - target).detach()
    return terms.sum(-1), gradient

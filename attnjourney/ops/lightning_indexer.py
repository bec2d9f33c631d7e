"""The indexer of token-sparse attention: torch.ops.attnjourney.lightning_indexer and lightning_indexer_loss."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._attention_checks import alignment_index, check_index, check_scale
from ._registry.fakes import empty_lse, need, or_float32, same_size
from ._registry.inference import register_inference
from ._registry.registration import register
from .sparse_attention import check_grouped_heads, check_indices


@overload
def lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, topk: int, *, is_causal: bool = ..., causal_alignment: str = ...,
    key_lengths: Tensor | None = ..., scale: float = ..., return_scores: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, topk: int, *, is_causal: bool = ..., causal_alignment: str = ...,
    key_lengths: Tensor | None = ..., scale: float = ..., return_scores: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
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
    """The keys that each row is to attend to: those of the topk highest scores

        I[t, s] = sum over the heads h of weights[h, t] * relu(scale * query[h, t] . key[s])

    by few small heads over one key head. The scores are made a block of keys at a time and only the highest are kept:
    memory O(L * topk). For `sparse_attention`; `lightning_indexer_loss` trains it.

    Paper: DeepSeek-AI 2025 (DeepSeek-V3.2, arXiv 2512.02556).

    Args:
        query: (B, H, L, D). float32, float64, bfloat16 or float16; computed in float32 (float64 for float64).
        key: (B, S, D).
        weights: (B, H, L), of each head and row; query's dtype or float32.
        topk: keys a row.
        is_causal: row i chooses among the keys up to its position.
        causal_alignment: the position of row i: i ("top_left") or i + S - L ("bottom_right"; key_lengths for S).
        key_lengths: (B,) int32 or int64: keys at or past it are not chosen.
        scale: of the products.
        return_scores: also return the scores of the keys chosen.

    Returns:
        (B, L, topk) int32: the keys of each row, ascending; a row that sees fewer has -1 behind them. Of equal scores
        the first key is chosen, and a NaN before every number. With return_scores also (B, L, topk), float32 (float64
        for float64), -inf where there is no key. Neither has a gradient.

    Raises:
        ValueError: a shape or a number that does not fit. RuntimeError: a dtype or a device that does not fit.
    """
    indices, scores = _lightning_indexer(
        query.detach(), key.detach(), weights.detach(), topk, is_causal=is_causal,
        causal_alignment=alignment_index(causal_alignment), key_lengths=key_lengths, scale=scale,
    )  # fmt: skip
    return (indices, scores) if return_scores else indices


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
    """How far the indexer is from the attention it chooses for: for each row, over the keys chosen,

        KL(p || softmax(I)),    p = the weights of `sparse_attention`, summed over its heads, divided by their sum

    with I as in `lightning_indexer`. Gradients for index_query, index_key and weights alone: p is what is learned,
    query and key count as constants. Memory O(L * k).

    Paper: DeepSeek-AI 2025 (DeepSeek-V3.2, arXiv 2512.02556).

    Args:
        index_query: (B, Hi, L, Di), the indexer's. float32, float64, bfloat16 or float16; computed in float32 (float64
            for float64).
        index_key: (B, S, Di), the indexer's.
        weights: (B, Hi, L), the indexer's; query's dtype or float32.
        query: (B, H, L, D), of the attention, in the indexer's dtype.
        key: (B, Hk, S, D), of the attention. Hk is H or 1, with enable_gqa any divisor of H.
        indices: (B, L, k) int32 or int64: the keys chosen; below 0: none.
        index_scale: of the indexer's products.
        scale: of the attention's, 1 / sqrt(D) by default.
        enable_gqa: several query heads read one key head.

    Returns:
        (B, L), float32 (float64 for float64): not negative but for rounding, 0 for a row without a key.

    Raises:
        ValueError: a shape or a number that does not fit; on the CPU an index at or past S (on CUDA it names none).
        RuntimeError: a dtype or a device that does not fit.
    """
    return _lightning_indexer_loss(
        index_query, index_key, weights, query.detach(), key.detach(), indices, index_scale=index_scale, scale=scale,
        enable_gqa=enable_gqa,
    )  # fmt: skip


def _check(query_name: str, query: Tensor, key_name: str, key: Tensor, weights: Tensor) -> tuple[int, int, int]:
    """The indexer's tensors: batch, rows, keys."""
    need(query.dim() == 4, f"{query_name}: expected 4 dimensions", query)
    need(key.dim() == 3, f"{key_name}: expected 3 dimensions", key)
    if key.dtype != query.dtype:
        raise RuntimeError(f"{key_name}: expected the dtype of {query_name}, {query.dtype}, got {key.dtype}")
    batch, heads, length, dim = query.shape
    need(dim > 0, f"{query_name}: expected a head_dim (last dimension) of at least 1", query)
    fits = same_size(key.shape[0], batch) and key.shape[2] == dim
    need(fits, f"{key_name}: expected shape ({batch}, kv_len, {dim})", key)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    if weights.dtype not in (query.dtype, wide):
        raise RuntimeError(f"weights: expected dtype {or_float32(query.dtype, query_name)}, got {weights.dtype}")
    fits = weights.dim() == 3 and all(same_size(n, w) for n, w in zip(weights.shape, (batch, heads, length)))
    need(fits, f"weights: expected shape ({batch}, {heads}, {length})", weights)
    return batch, length, key.shape[1]


def _fake(
    *, query: Tensor, key: Tensor, weights: Tensor, topk: int, causal_alignment: int, key_lengths: Tensor | None,
    scale: float, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, length, _keys = _check("query", query, "key", key, weights)
    if isinstance(topk, int) and not 1 <= topk < 2**31:
        raise ValueError(f"topk: expected a number from 1 to 2^31 - 1, got {topk}")
    check_scale(scale)
    if causal_alignment not in (0, 1):
        raise ValueError(f"causal_alignment: expected 0 (top-left) or 1 (bottom-right), got {causal_alignment}")
    if key_lengths is not None:
        check_index("key_lengths", key_lengths, batch)
    return query.new_empty((batch, length, topk), dtype=torch.int32), empty_lse(query, batch, length, topk)


def _flops(*, query: torch.Size, key: torch.Size, is_causal: bool, causal_alignment: int, **_: Any) -> int:
    batch, heads, length, dim = query
    first = key[1] - length + 1 if causal_alignment == 1 else 1  # keys of the first row
    pairs = length * key[1]
    if is_causal:
        pairs = sum(min(max(first + i, 0), key[1]) for i in range(length))
    return 2 * batch * heads * dim * pairs


def _vmap(signature: Any, info: Any, in_dims: tuple, *flat: Any) -> tuple[tuple, tuple]:
    """The new dimension joins the batch."""

    def one(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    found = signature.call(tuple(one(x, dim) for x, dim in zip(flat, in_dims)))
    size = info.batch_size
    return tuple(x.unflatten(0, (size, x.shape[0] // size)) for x in found), (0, 0)


def _fake_loss(
    *, index_query: Tensor, index_key: Tensor, weights: Tensor, query: Tensor, key: Tensor, indices: Tensor,
    index_scale: float, scale: float | None, enable_gqa: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, length, keys = _check("index_query", index_query, "index_key", index_key, weights)
    for name, x in (("query", query), ("key", key)):
        need(x.dim() == 4, f"{name}: expected 4 dimensions", x)
        if x.dtype != index_query.dtype:
            raise RuntimeError(f"{name}: expected the dtype of index_query, {index_query.dtype}, got {x.dtype}")
    dim = query.shape[3]
    need(dim > 0, "query: expected a head_dim (last dimension) of at least 1", query)
    fits = same_size(query.shape[0], batch) and same_size(query.shape[2], length)
    need(fits, f"query: expected shape ({batch}, q_heads, {length}, head_dim)", query)
    fits = same_size(key.shape[0], batch) and same_size(key.shape[2], keys) and key.shape[3] == dim
    need(fits, f"key: expected shape ({batch}, kv_heads, {keys}, {dim})", key)
    check_grouped_heads(query, key, enable_gqa)
    if indices.dim() != 3:
        raise ValueError(f"indices: expected shape ({batch}, {length}, k), got shape {tuple(indices.shape)}")
    check_indices(indices, batch, 1, length)
    check_scale(index_scale)
    check_scale(scale)
    return empty_lse(index_query, batch, length), empty_lse(index_query, *indices.shape)


def _composite_loss(*, enable_gqa: bool, **arguments: Any) -> tuple[Tensor, Tensor]:
    from ..reference.sparse_attention import indexer_loss_and_gradient

    del enable_gqa
    return indexer_loss_and_gradient(**arguments)


def _flops_loss(
    *, index_query: torch.Size, indices: torch.Size, query: torch.Size | None = None, **_: Any
) -> tuple[int, int]:
    """As if every index named a key: the scores of both, then the products of two gradients and the scores again."""
    pairs = 2 * indices[0] * indices[1] * indices[2]
    index = pairs * index_query[1] * index_query[3]
    return index + (0 if query is None else pairs * query[1] * query[3]), 3 * index


_lightning_indexer = register_inference(
    "lightning_indexer", fake=_fake, flops=_flops, autocast={"query": "key", "weights": "key"}, vmap=_vmap
)
_lightning_indexer_loss = register(
    "lightning_indexer_loss",
    fake=_fake_loss,
    composite=_composite_loss,
    autocast=("index_query", "index_key", "query", "key"),
    flops=_flops_loss,
)

"""MultiheadAttention over a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..ops import attention, attention_weights, merge_states
from ..reference.mha import attention_mask
from ..reference.quantization import dequantize
from ._cached import NewTokens, check_batch, check_cache
from ._multihead_checks import check_mask
from ._parts import merge_heads, split_heads
from .cache import KeyValueCache, KVCache


def attend_cached(
    module: Any,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
    cache: KeyValueCache,
) -> tuple[Tensor, Tensor | None]:
    """output (N, L, embed), weights (N, [H,] L, S) or None; all inputs with the batch first; L and the masks as
    MultiheadAttention.forward takes them, S the longest length of the cache."""
    check_cache(cache, KeyValueCache, module.dropout if module.training else 0.0)
    if need_weights and (type(cache) is not KVCache or module.bias_k is not None or module.add_zero_attn):
        raise ValueError(f"need_weights: expected False beside a {type(cache).__name__} or further keys, got True")
    if is_causal and key is not query:
        raise ValueError("is_causal: expected False in cross-attention over a cache, which counts keys, not queries")
    check_batch(cache, query.shape[0])
    if attn_mask is not None:
        check_mask(module, query, attn_mask)
    mask = attention_mask(attn_mask, None, module.num_heads)
    options: dict[str, Any] = {"is_causal": is_causal, "attn_mask": mask, "return_lse": True}
    if key is None or value is None:
        new, q = None, split_heads(module._project(query, None, None)[0], module.num_heads)
        out, lse = cache.attend(q, **options)
    else:
        new = NewTokens(cache, key, key_padding_mask)
        if new.order is not None:
            own = key is query
            query, key, value = new.sort(query) if own else query, new.x, new.sort(value)
            if own and mask is not None:
                options["attn_mask"] = _sort_rows(mask, new.order)
        q, k, v = (split_heads(x, module.num_heads) for x in module._project(query, key, value))
        new = new if new.order is not None and own else None
        counts = None if key_padding_mask is None else (~key_padding_mask).sum(1)
        out, lse = cache.step(q, k, v, counts, **options)
    out = _further_keys(module, q, out, lse)
    out = merge_heads(out)
    output = module.out_proj(out if new is None else new.restore(out))
    weights = None
    if need_weights:
        longest = int(cache.lengths.max())
        mask, keys = options["attn_mask"], cache.key[:, :, :longest]
        if cache.key_scale is not None:
            keys = dequantize(keys, cache.key_scale[:, :, :longest], q.dtype)
        weights = attention_weights(
            q, keys, None if mask is None else mask[..., :longest], is_causal, lse=lse,
            key_lengths=cache.lengths, causal_alignment="bottom_right",
        )  # fmt: skip
        weights = weights.mean(1) if average_attn_weights else weights
        if new is not None and new.order is not None:
            rows = new.order.argsort(1).unsqueeze(-1)
            rows = rows if average_attn_weights else rows.unsqueeze(1)
            weights = weights.gather(-2, rows.expand(*weights.shape[:-2], *weights.shape[-2:]))
    return output, weights


def _sort_rows(mask: Tensor, order: Tensor) -> Tensor:
    """mask (L, S) or (N, H, L, S), its rows in the order (N, L)."""
    mask = mask.expand(order.shape[0], *mask.shape[-3:]) if mask.dim() == 4 else mask.expand(order.shape[0], 1, -1, -1)
    return mask.gather(2, order[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))


def _further_keys(module: Any, q: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """out with the keys of add_bias_kv and add_zero_attn, which are in no cache."""
    if module.bias_k is None and not module.add_zero_attn:
        return out
    batch, heads, _, dim = q.shape
    k = v = q.new_empty(batch, heads, 0, dim)
    if module.bias_k is not None:
        k, v = (
            bias.to(q.dtype).unflatten(-1, (heads, dim)).transpose(1, 2).expand(batch, -1, -1, -1)
            for bias in (module.bias_k, module.bias_v)
        )
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return merge_states(out, lse, *attention(q, k, v, return_lse=True))[0]

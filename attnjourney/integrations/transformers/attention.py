"""The attention function that transformers calls: one for all models of its AttentionInterface."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import attention, attention_weights, decode, mla_decode, sparse_attention, varlen_attention
from .held import HeldTensor
from .masks import MaskDescription, Pattern
from .packed import PackedKeys

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # moved: output_attentions then reaches those alone to whom it is passed
    _active_collector = None  # type: ignore[assignment]

NAME = "attnjourney"
calls: Counter[str] = Counter()  # of `forward`, by what it called; a graph that is made counts once


def forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, sinks: Tensor | None = None, position_bias: Tensor | None = None,
    sliding_window: int | None = None, cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool = False, indices: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """query (B, Hq, rows, E), key and value (B, Hk, keys, ...) -> (B, rows, Hq, Ev), and weights where wanted."""
    if indices is not None:
        return _sparse(module, query, key, value, attention_mask, indices, dropout, scaling, output_attentions), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    s_aux = sinks if s_aux is None else s_aux
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": _sinks(s_aux, query)}
    if isinstance(key, PackedKeys):
        if dropout or position_bias is not None or _weights_wanted(output_attentions):
            raise ValueError("past_key_values: expected no packed_cache beside dropout, biases and output_attentions")
        calls["attend_packed"] += 1
        return key.attend(query, attention_mask, causal, sliding_window, options), None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and query.shape[0] == 1 and attention_mask is None:
        left = -1 if sliding_window is None else sliding_window - 1
        options["window_size"] = (left, -1 if causal else left)
        return _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, dropout, causal, options), None

    rows, lengths, alignment = query.shape[2], None, "top_left"
    if isinstance(attention_mask, MaskDescription):
        pattern, lengths = attention_mask.pattern, attention_mask.lengths
        causal, options["window_size"], alignment = pattern.is_causal, pattern.window_size, "bottom_right"
        if pattern.sequence is not None and not _weights_wanted(output_attentions) and position_bias is None:
            offsets = _offsets(pattern.sequence, query.shape[0], rows)
            return _packed(query, key, value, offsets, offsets, dropout, causal, options), None
        if pattern.sequence is not None:
            causal, options["window_size"], attention_mask = False, None, attention_mask.numbers()
        else:
            padding = attention_mask.padding
            attention_mask = None if padding is None else padding[:, None, None, :]
    else:
        causal = causal and attention_mask is None and rows > 1
    latents = getattr(key, "attnjourney_latents", None)
    if latents is not None:
        if _weights_wanted(output_attentions):
            raise ValueError("output_attentions: expected False beside a cache of latents, whose keys are never made")
        return _absorbed(module, query, latents, key.shape[2], lengths, causal, attention_mask, options), None
    if causal and alignment == "top_left" and key.shape[2] > rows:  # a static cache's prompt: the first keys
        key, value = key[:, :, :rows], value[:, :, :rows]
    if position_bias is not None:
        attention_mask = _with_bias(attention_mask, position_bias, query.dtype)

    if isinstance(key, HeldTensor) and isinstance(value, HeldTensor):
        if lengths is None and not (dropout or _weights_wanted(output_attentions)):
            return _over_held(query, key, attention_mask, causal, options), None
        key, value = key.numbers(), value.numbers()

    if _weights_wanted(output_attentions):
        calls["weights"] += 1
        options.update(enable_gqa=True, key_lengths=lengths, causal_alignment=alignment)
        out, lse = attention(query, key, value, attention_mask, dropout, causal, return_lse=True, **options)
        weights = attention_weights(query, key, attention_mask, causal, lse=lse, **options)
        return out.transpose(1, 2).contiguous(), weights
    calls["attention"] += 1
    out = attention(
        query, key, value, attention_mask, dropout, causal, enable_gqa=True, key_lengths=lengths,
        causal_alignment=alignment, **options,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _sparse(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, indices: Tensor,
    dropout: float, scaling: float | None, output_attentions: bool,
) -> Tensor:  # fmt: skip
    """Rows of which each sees the keys that its indices (B, rows, k) name, less those that the mask hides."""
    if dropout or _weights_wanted(output_attentions):
        what = "dropout: expected 0" if dropout else "output_attentions: expected False"
        raise ValueError(f"{what} beside the indices of sparse attention")
    options: dict[str, Any] = {"scale": scaling}
    if isinstance(attention_mask, MaskDescription) and attention_mask.pattern == Pattern(True):
        options |= dict(is_causal=True, causal_alignment="bottom_right", key_lengths=attention_mask.lengths)
        padding = attention_mask.padding
        seen = None if padding is None else padding[:, None]
    else:
        seen = None if attention_mask is None else attention_mask[:, 0]
    if seen is not None and seen.dtype != torch.bool:
        raise TypeError(f"attention_mask: expected dtype torch.bool beside indices, got {seen.dtype}")
    if seen is not None:
        named = seen.expand(*indices.shape[:2], -1).gather(2, indices.long().clamp(min=0))
        indices = indices.masked_fill(~named, -1)
    latents = getattr(key, "attnjourney_latents", None)
    if latents is not None:
        calls["sparse_latents"] += 1
        lengths = options.pop("key_lengths", None)
        if lengths is None:
            lengths = torch.full((query.shape[0],), key.shape[2], device=query.device)
        out = mla_decode(
            query, latents[0], lengths, module.kv_b_proj.weight, indices=indices, scale=scaling,
            is_causal=options.get("is_causal", False),
        )  # fmt: skip
    else:
        calls["sparse_attention"] += 1
        out = sparse_attention(query, key, value, indices, enable_gqa=True, **options)
    return out.transpose(1, 2).contiguous()


def _packed(
    query: Tensor, key: Tensor, value: Tensor, offsets_q: Tensor, offsets_k: Tensor, dropout: float, causal: bool,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """(B, H, rows, E) whose rows are sequences one after the other -> (B, rows, H, Ev)."""
    calls["varlen_attention"] += 1
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = varlen_attention(
        q, k, v, offsets_q, offsets_k, dropout, causal, causal_alignment="bottom_right", **options
    )  # (B * rows, H, Ev)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def _offsets(sequence: Tensor, batch: int, rows: int) -> Tensor:
    """Where the sequences of (B, rows) numbers begin, the batch laid end to end."""
    new = sequence.expand(batch, rows).diff(dim=1).ne(0)
    new = torch.nn.functional.pad(new, (1, 0), value=True)
    begins = new.flatten().nonzero().squeeze(1)
    return torch.nn.functional.pad(begins, (0, 1), value=batch * rows)


def _absorbed(
    module: Any, query: Tensor, latents: tuple[Tensor, Tensor | None], keys: int, lengths: Tensor | None, causal: bool,
    attention_mask: Tensor | None, options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attention over latents (B, capacity, rank + rope), with scales of bytes, of which the first `keys` are there."""
    calls["mla_decode"] += 1
    lengths = torch.full((query.shape[0],), keys, device=query.device) if lengths is None else lengths
    out = mla_decode(
        query, latents[0], lengths, module.kv_b_proj.weight, latent_scale=latents[1], is_causal=causal,
        attn_mask=_key_mask(attention_mask, keys), **options,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


def _over_held(
    query: Tensor, key: HeldTensor, attention_mask: Tensor | None, causal: bool, options: dict[str, Any]
) -> Tensor:
    """Attention of the last rows over the pages or bytes of a cache."""
    calls["decode"] += 1
    cache = key.cache
    out = decode(
        query, cache.key, cache.value, cache.lengths, is_causal=causal,
        attn_mask=_key_mask(attention_mask, key.shape[2]), **cache._place(), **cache._scales(), **options,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


def _key_mask(mask: Tensor | None, keys: int) -> Tensor | None:
    """decode wants a column for each key."""
    return mask if mask is None or mask.shape[-1] == keys else mask.expand(*mask.shape[:-1], keys)


def _sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    """(Hq,), in query's dtype or float32."""
    if sinks is None:
        return None
    sinks = sinks.reshape(-1)
    return sinks if sinks.dtype in (query.dtype, torch.float32) else sinks.to(query.dtype)


def _with_bias(mask: Tensor | None, bias: Tensor, dtype: torch.dtype) -> Tensor:
    bias = bias if bias.dtype in (dtype, torch.float32) else bias.to(dtype)
    if mask is None:  # T5's has its heads last: kernels would gather every number
        return bias if bias.stride(-1) <= 1 else bias.contiguous()
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def _weights_wanted(asked: bool) -> bool:
    collected = None if _active_collector is None else _active_collector.get()
    return asked or (bool(collected) and any("attentions" in str(name) for name in collected))

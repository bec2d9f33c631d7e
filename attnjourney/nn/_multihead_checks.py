"""The legal inputs of MultiheadAttention, in the module's own words: sequence first or not, with a batch or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._registry.torch_internals import autocast_on


def check_inputs(
    module: Any,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    """Raises ValueError for a shape and RuntimeError for a dtype or a device that does not fit. With a cache, key and
    value may both be None."""
    if key is None or value is None:
        for name, x in (("key", key), ("value", value), ("key_padding_mask", key_padding_mask)):
            if x is not None:
                raise ValueError(f"{name}: expected None where key or value is None, got shape {tuple(x.shape)}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is not None and x.is_nested:
            raise RuntimeError(f"{name}: expected a dense tensor and key_padding_mask, got a nested tensor")
    if query.dim() not in (2, 3):
        raise ValueError(f"query: expected (seq, embed_dim), or 3 dimensions with a batch, got {tuple(query.shape)}")
    batched = query.dim() == 3
    at = (0, 1) if module.batch_first else (1, 0)  # batch, seq
    batch, length = (query.shape[d] for d in at) if batched else (1, query.shape[0])
    keys = key.shape[at[1] if batched else 0] if key is not None and key.dim() == query.dim() else "S"

    def shape(seq, width):
        return (seq, width) if not batched else (batch, seq, width) if module.batch_first else (seq, batch, width)

    for name, x, seq, width in (
        ("query", query, length, module.embed_dim),
        ("key", key, keys, module.kdim),
        ("value", value, keys, module.vdim),
    ):
        if x is None or (x is query and name != "query" and width == module.embed_dim):
            continue
        expected = shape(seq, width)
        if x.shape != expected:
            beside = "" if name == "query" else f" beside query's {tuple(query.shape)}"
            raise ValueError(f"{name}: expected shape ({', '.join(map(str, expected))}){beside}, got {tuple(x.shape)}")
        if x.dtype != query.dtype:
            raise RuntimeError(f"{name}: expected the dtype of query, {query.dtype}, got {x.dtype}")
        if x.device != query.device:
            raise RuntimeError(f"{name}: expected to be on the device of query, {query.device}, got {x.device}")
    dtype = _parameter_dtype(module.out_proj, query.dtype)
    if dtype != query.dtype and not autocast_on(query.device.type):
        raise RuntimeError(f"query: expected the dtype of the parameters, {dtype}, got {query.dtype}")

    if key_padding_mask is not None:
        expected = (batch, keys) if batched else (keys,)
        if tuple(key_padding_mask.shape) != expected:
            raise ValueError(f"key_padding_mask: expected shape {expected}, got {tuple(key_padding_mask.shape)}")
        _mask_dtype("key_padding_mask", key_padding_mask, query)
    if attn_mask is not None:
        expected = (length, keys), (batch * module.num_heads, length, keys)
        if tuple(attn_mask.shape) not in expected:
            text = f"{expected[0]} or (batch * num_heads, L, S) = {expected[1]}"
            raise ValueError(f"attn_mask: expected shape {text}, got {tuple(attn_mask.shape)}")
        _mask_dtype("attn_mask", attn_mask, query)


def _parameter_dtype(out_proj: torch.nn.Module, default: torch.dtype) -> torch.dtype:
    """Of its first floating parameter: the weight itself may be computed, by a parametrization."""
    weight = out_proj._parameters.get("weight")
    if weight is not None and weight.is_floating_point():
        return weight.dtype
    return next((p.dtype for p in out_proj.parameters() if p.is_floating_point()), default)


def _mask_dtype(name: str, mask: Tensor, query: Tensor) -> None:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        expected = f"torch.bool, torch.float32 or that of query, {query.dtype}"
        raise RuntimeError(f"{name}: expected dtype {expected}, got {mask.dtype}")
    if mask.device != query.device:
        raise RuntimeError(f"{name}: expected to be on the device of query, {query.device}, got {mask.device}")


def check_mask(module: Any, query: Tensor, attn_mask: Tensor) -> None:
    """attn_mask together with a cache, query (N, L, embed): the number of its keys is for the cache to check."""
    batch, length = query.shape[:2]
    if attn_mask.dim() not in (2, 3) or attn_mask.shape[-2] != length:
        fits = False
    else:
        fits = attn_mask.dim() == 2 or attn_mask.shape[0] == batch * module.num_heads
    if not fits:
        text = f"({length}, S) or (batch * num_heads, L, S) = ({batch * module.num_heads}, {length}, S)"
        raise ValueError(f"attn_mask: expected shape {text}, got {tuple(attn_mask.shape)}")
    _mask_dtype("attn_mask", attn_mask, query)

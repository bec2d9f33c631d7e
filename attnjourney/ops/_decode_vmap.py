"""torch.func.vmap of decode and mla_decode: one call over all samples, whose sequences become one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._attention_rules import align_mask, per_head, to_front
from ._registry.derivatives import one_call_a_sample
from ._registry.operator import Signature


def _fold(dims: dict, call: dict, size: int) -> None:
    """query, lengths and the options of all samples, (samples * batch, ...)."""
    for name in ("query", "lengths"):
        call[name] = to_front(call[name], dims[name], size)
    batch = call["query"].shape[1]
    mask = call["attn_mask"]
    if mask is not None and (dims["attn_mask"] is not None or (mask.dim() == 4 and mask.shape[0] != 1)):
        mask = align_mask(to_front(mask, dims["attn_mask"], size), 5)  # (samples, 1 or batch, heads, rows, keys)
        call["attn_mask"] = mask.expand(-1, batch, -1, -1, -1).flatten(0, 1)
    for name in ("sinks", "alibi_slopes"):
        x = call[name]
        if x is not None and (dims[name] is not None or x.dim() == 2):
            call[name] = per_head(to_front(x, dims[name], size), batch)
    for name in ("query", "lengths"):
        call[name] = call[name].flatten(0, 1)


def vmap_decode(signature: Signature, info: Any, in_dims: tuple, *flat: Any) -> tuple[tuple, tuple]:
    """The caches of all samples side by side; one cache for all samples is read in place, as blocks of its capacity."""
    size, dims, call = info.batch_size, dict(zip(signature.names, in_dims)), dict(zip(signature.names, flat))
    _fold(dims, call, size)
    table, device = call["block_table"], call["key"].device
    caches = [name for name in ("key", "value", "key_scale", "value_scale") if call[name] is not None]
    if any(dims[name] is not None for name in caches) or (call["ring"] and table is None):
        for name in caches:
            call[name] = to_front(call[name], dims[name], size)
        if table is not None:
            first = torch.arange(size, dtype=torch.int32, device=device) * call["key"].shape[1]
            call["block_table"] = (to_front(table, dims["block_table"], size) + first[:, None, None]).flatten(0, 1)
        for name in caches:
            call[name] = call[name].flatten(0, 1)
    elif table is not None:
        call["block_table"] = to_front(table, dims["block_table"], size).flatten(0, 1).contiguous()
    else:
        rows = torch.arange(call["key"].shape[0], dtype=torch.int32, device=device)
        call["block_table"] = rows.repeat(size).unsqueeze(1)
    return _unfold(signature.call(tuple(call.values())), size)


def vmap_mla_decode(signature: Signature, info: Any, in_dims: tuple, *flat: Any) -> tuple[tuple, tuple]:
    """As vmap_decode; where the samples have different weights, or blocks, one call each."""
    size, dims, call = info.batch_size, dict(zip(signature.names, in_dims)), dict(zip(signature.names, flat))
    if dims["kv_b_weight"] is not None or call["block_table"] is not None:
        return one_call_a_sample(signature, info, in_dims, flat)
    _fold(dims, call, size)
    for name in ("latent", "latent_scale"):
        if call[name] is not None:
            call[name] = to_front(call[name], dims[name], size).flatten(0, 1)
    return _unfold(signature.call(tuple(call.values())), size)


def _unfold(results: tuple[Tensor, Tensor], size: int) -> tuple[tuple, tuple]:
    return tuple(x.unflatten(0, (size, x.shape[0] // size)) for x in results), (0, 0)

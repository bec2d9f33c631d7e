"""The operators that write caches, each with its mutation declared; attnjourney.nn.cache puts classes over them.

    kv_cache_append(key_cache!, value_cache!, lengths!, key, value, *, counts, ring, key_scale!, value_scale!)
                                                                                       dense and ring
    kv_cache_truncate(lengths!, new_lengths, *, lowest)
    kv_cache_reorder(key_cache!, value_cache!, lengths!, batch_index, *, key_scale!, value_scale!)
    paged_cache_append(key_cache!, value_cache!, lengths!, block_table!, block_refs!, key, value, *, counts,
                       key_scale!, value_scale!)
    paged_cache_truncate(lengths!, block_table!, block_refs!, new_lengths, *, block_size)
    paged_cache_reorder(lengths!, block_table!, block_refs!, batch_index)

Caches of bytes (int8, float8_e4m3fn) have a scale for each token and head, their shape but for the last
dimension: key_scale and value_scale. append then quantises what it is given. A cache of one tensor
(latents) has no value_cache.

On the CPU they check every value first: an error leaves the cache as it was.

On CUDA lengths, tables and counts live on the device and nothing waits for them (calls can be captured in a graph), so
shapes, dtypes and devices are checked, values are not:

    counts below 0 or past the tokens given count as these; lengths below 0 as 0
    tokens past the capacity, or without a free block, are not written, and the length goes on counting
    new_lengths past the present length leave it; below 0 or `lowest` they count as that
    a batch_index out of range leaves its sequence as it is

A sequence that has lost tokens is one longer than its room: the caches' `check` says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._registry.fakes import need
from ._registry.inference import register_inference
from .decode import check_scale


def _check_new(name: str, cache: Tensor, scale: Tensor | None, new: Tensor, lengths: Tensor) -> None:
    need(cache.dim() == 4, f"{name}_cache: expected 4 dimensions", cache)
    need(new.dim() == 4, f"{name}: expected 4 dimensions", new)
    need(lengths.dim() == 1, "lengths: expected 1 dimension", lengths)
    want = (lengths.shape[0], cache.shape[1], new.shape[2], cache.shape[3])
    need(tuple(new.shape) == want, f"{name}: expected shape {want} (batch, heads, tokens, dim)", new)
    check_scale(f"{name}_scale", scale, f"{name}_cache", cache)
    if scale is not None:
        if new.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            expected = "dtype torch.float32, torch.bfloat16 or torch.float16"
            raise RuntimeError(f"{name}: expected {expected} beside {name}_cache of {cache.dtype}, got {new.dtype}")
    elif new.dtype != cache.dtype:
        raise RuntimeError(f"{name}: expected the dtype of {name}_cache, {cache.dtype}, got {new.dtype}")


def _fake_append(
    *, key_cache: Tensor, value_cache: Tensor | None, lengths: Tensor, key: Tensor, value: Tensor | None,
    key_scale: Tensor | None, value_scale: Tensor | None, **_: Any,
) -> None:  # fmt: skip
    _check_new("key", key_cache, key_scale, key, lengths)
    if (value_cache is None) != (value is None):
        raise ValueError("value: expected a tensor beside value_cache, and None without one")
    if value is not None and value_cache is not None:
        _check_new("value", value_cache, value_scale, value, lengths)


def _fake_truncate(*, lengths: Tensor, new_lengths: Tensor, lowest: Tensor | None = None, **_: Any) -> None:
    if lowest is not None:
        need(lowest.shape == lengths.shape, f"lowest: expected shape {tuple(lengths.shape)}", lowest)
    need(new_lengths.shape == lengths.shape, f"new_lengths: expected shape {tuple(lengths.shape)}", new_lengths)


def _fake_reorder(*, lengths: Tensor, batch_index: Tensor, **_: Any) -> None:
    need(batch_index.shape == lengths.shape, f"batch_index: expected shape {tuple(lengths.shape)}", batch_index)


_STORED = {"key": "key_cache", "value": "value_cache"}
append = register_inference("kv_cache_append", fake=_fake_append, autocast=_STORED)
truncate = register_inference("kv_cache_truncate", fake=_fake_truncate)
reorder = register_inference("kv_cache_reorder", fake=_fake_reorder)
paged_append = register_inference("paged_cache_append", fake=_fake_append, autocast=_STORED)
paged_truncate = register_inference("paged_cache_truncate", fake=_fake_truncate)
paged_reorder = register_inference("paged_cache_reorder", fake=_fake_reorder)

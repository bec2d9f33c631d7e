"""ours.cache(model): this package's caches behind past_key_values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..._dtypes import BYTE_DTYPES
from .layers import IndexedKVLayer, IndexedLatentLayer, KVLayer, LatentLayer, WindowLayer
from .pages import BLOCK, PagedLayer


def cache(model: Any, *, paged: bool = False, block_size: int = BLOCK, dtype: torch.dtype | None = None) -> Cache:
    """A cache for model.generate(past_key_values=...) and model(past_key_values=...), without gradients.

    Layers that see all keys get a KVLayer, or a LatentLayer where `use` has prepared the model for latents; those with
    a sliding window a WindowLayer; layers of token-sparse attention (DeepSeek-V3.2) hold the indexer's keys, too. What
    is no attention keeps transformers' own.

    Args:
        model: a model of transformers.
        paged: a PagedLayer in place of each KVLayer: keys and values in blocks, which beams share.
        block_size: tokens of its blocks.
        dtype: torch.int8 or torch.float8_e4m3fn: keys and values, or latents, as bytes, with a float32 scale for each
            token and head, which attention reads as they lie: in place of transformers' QuantizedCache. Layers with a
            sliding window keep numbers. None: the model's.

    Raises:
        ValueError: paged, and the model caches latents; another dtype, or one for a model whose layers choose tokens
            (DeepSeek-V3.2), which read numbers.
    """
    if dtype is not None and dtype not in BYTE_DTYPES:
        raise ValueError(f"dtype: expected None, torch.int8 or torch.float8_e4m3fn, got {dtype}")
    made = DynamicCache(config=model.config)
    latent = any(hasattr(module, "attnjourney_expand_kv") for module in model.modules())
    if latent and paged:
        raise ValueError("paged: expected False for a model whose cache holds latents, got True")
    layers = made.layers or []
    if not layers:
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        layers = [DynamicLayer() for _ in range(count)]

    indexed = {id(layer) for layer in layers if type(layer).__name__ == "DynamicIndexedLayer"}
    if indexed and dtype is not None:
        raise ValueError(f"dtype: expected None for a model whose layers choose tokens, got {dtype}")

    def own(layer: Any) -> Any:
        if type(layer) is DynamicSlidingWindowLayer:
            return WindowLayer(layer.sliding_window)
        if id(layer) in indexed and not paged:
            return IndexedLatentLayer() if latent else IndexedKVLayer()
        if type(layer) is not DynamicLayer:
            return layer
        return PagedLayer(block_size, dtype) if paged else LatentLayer(dtype) if latent else KVLayer(dtype)

    made.layers = [own(layer) for layer in layers]
    return made

"""Models over paged caches, for packed rows of many sequences (serving.py): the demo's own, those of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnjourney import PagedKVCache, PagedLatentCache
from examples.attention import MLA
from examples.config import Config
from examples.model import GPT


class ServedGPT:
    """A model of the demo: MHA, GPT and GQA over keys and values, MLA over latents.

    Args:
        batch, block_size, num_blocks: of the caches.
        dtype: of the caches; None: the model's; int8 or float8_e4m3fn: bytes.
    """

    def __init__(
        self, model: GPT, config: Config, batch: int, block_size: int = 16, num_blocks: int | None = None,
        dtype: torch.dtype | None = None, shared_prefix: bool = True,
    ):  # fmt: skip
        self.model, self.shared_prefix = model, shared_prefix
        sizes: dict[str, Any] = dict(block_size=block_size, num_blocks=num_blocks)
        sizes["dtype"] = model.head.weight.dtype if dtype is None else dtype
        self.caches: Any = [
            PagedLatentCache(batch, config.context, layer.rank, layer.rope, **sizes)
            if isinstance(layer, MLA)
            else PagedKVCache(batch, layer.cache_heads, config.context, layer.head_dim, **sizes)
            for layer in (block.attention for block in model.blocks)
        ]

    def logits(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, rows: Tensor) -> Tensor:
        model = self.model
        x = model.embedding(tokens)[None]  # (1, total, E)
        if model.positions is not None:
            x = x + model.positions(positions)
        found: Any = False
        for block, cache in zip(model.blocks, self.caches):
            layer = block.attention
            project = layer.rotated if isinstance(layer, MLA) else layer.project
            query, kept = project(block.attention_norm(x), positions)
            query, kept = query[0].transpose(0, 1), kept[0].transpose(0, 1)  # (total, H, D), (total, K, width)
            if isinstance(layer, MLA):
                cache.append_packed(kept[:, 0], cu_seqlens)
            else:
                cache.append_packed(*layer.keys_values(kept), cu_seqlens)
            if self.shared_prefix and found is False:
                found = cache.shared_prefixes(cu_seqlens=cu_seqlens)  # the same in all layers
            if isinstance(layer, MLA):
                out = cache.attend_packed(query, layer.kv_b_weight, cu_seqlens, shared_prefix=found)
                x = x + (out.flatten(1) @ layer.o_weight.T)[None]
            else:
                out = cache.attend_packed(query, cu_seqlens, shared_prefix=found, scale=layer.scale)
                x = x + layer.merge(out.transpose(0, 1)[None])
            x = x + block.mlp(block.mlp_norm(x))
        return model.head(model.norm(x[0, rows]))


class ServedTransformer:
    """A model of transformers that caches keys and values, after attnjourney.integrations.transformers.use."""

    def __init__(
        self, model: Any, batch: int, capacity: int, block_size: int = 16, num_blocks: int | None = None,
        dtype: torch.dtype | None = None, shared_prefix: bool = True,
    ):  # fmt: skip
        from attnjourney.integrations import transformers as ours

        self.model, self.shared_prefix = ours.use(model), shared_prefix
        self.cache = ours.packed_cache(
            model, batch, capacity, block_size=block_size, num_blocks=num_blocks, dtype=dtype
        )
        self.caches = self.cache.caches

    def logits(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor, rows: Tensor) -> Tensor:
        self.cache.pack(cu_seqlens, shared=self.shared_prefix)
        out = self.model(
            input_ids=tokens[None], position_ids=positions[None], past_key_values=self.cache, use_cache=True,
            logits_to_keep=rows,
        )  # fmt: skip
        return out.logits[0]

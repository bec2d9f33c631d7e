"""Packed rows of many sequences through a model of transformers, over blocks of one pool: continuous batching."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ...nn.cache_paged import PagedKVCache
from ...ops._shared_prefix import SharedPrefixes
from .masks import MaskDescription
from .pages import BLOCK


class PackedKeys(torch.Tensor):
    """Keys (1, heads, total, dim) of packed rows that have been appended to a paged cache: attention of this package
    reads what that holds of their sequences, and nobody else may ask for them.

    Attributes:
        layer: PackedLayer.
    """

    layer: PackedLayer

    @staticmethod
    def __new__(cls, layer: PackedLayer, keys: Tensor) -> PackedKeys:
        self = torch.Tensor._make_wrapper_subclass(cls, keys.shape, dtype=keys.dtype, device=keys.device)
        self.layer = layer
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise ValueError(
            "past_key_values: a packed_cache expected attn_implementation='attnjourney' (ours.use(model)) and layers "
            f"that hand keys to it as they are, got {func}"
        )

    def attend(
        self, query: Tensor, mask: Tensor | None, causal: bool, window: int | None, options: dict[str, Any]
    ) -> Tensor:
        """query (1, heads, total, dim) -> (1, total, heads, v_dim)."""
        cache, batch = self.layer.cache, self.layer.batch
        if isinstance(mask, MaskDescription) and mask.padding is None and mask.lengths is None:
            options["window_size"], causal = mask.pattern.window_size, mask.pattern.is_causal
        elif mask is None or (mask.numel() == 1 and mask.dtype == torch.bool and bool(mask)):  # of a single row
            options["window_size"] = (-1 if window is None else window - 1, -1)
        else:
            raise ValueError("attention_mask: expected None or a causal mask beside a packed_cache, got other numbers")
        rows, shared = query[0].transpose(0, 1), False if options["window_size"] != (-1, -1) else batch.shared
        if shared is True:  # the same in all layers
            shared = batch.shared = cache.shared_prefixes(cu_seqlens=batch.cu_seqlens)
        return cache.attend_packed(rows, batch.cu_seqlens, shared_prefix=shared, is_causal=causal, **options)[None]


class PackedLayer(DynamicLayer):
    """Over a PagedKVCache that is there from the beginning: `cache`."""

    def __init__(self, cache: PagedKVCache, batch: PackedCache):
        super().__init__()
        self.cache, self.batch, self.is_initialized = cache, batch, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[0] != 1:
            raise ValueError(f"input_ids: expected packed tokens (1, total), got a batch of {key_states.shape[0]}")
        key, value = (x[0].transpose(0, 1) for x in (key_states, value_states))
        self.cache.append_packed(key, value, self.batch.cu_seqlens, max_seqlen=self.batch.max_seqlen)
        return PackedKeys(self, key_states), value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class PackedCache(Cache):
    """See packed_cache.

    Attributes:
        caches: a PagedKVCache for each layer, to free, fork, publish, adopt and evict; all with the same table.
        cu_seqlens, max_seqlen, shared: of the rows that come next.
    """

    def __init__(self, caches: list[PagedKVCache]):
        self.caches = caches
        super().__init__(layers=[PackedLayer(cache, self) for cache in caches])
        self.cu_seqlens = torch.zeros(len(caches[0].lengths) + 1, dtype=torch.int64)
        self.max_seqlen = 0
        self.shared: bool | SharedPrefixes = False

    def pack(self, cu_seqlens: Tensor, max_seqlen: int | None = None, shared: bool | SharedPrefixes = False) -> None:
        """What the next call of the model is given: rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1 go on sequence b.

        Args:
            cu_seqlens: (batch + 1,) int64. max_seqlen: the most rows of a sequence.
            shared: shared_prefix of PagedKVCache.attend_packed.
        """
        self.cu_seqlens, self.shared = cu_seqlens, shared
        self.max_seqlen = int(cu_seqlens.diff().max()) if max_seqlen is None else max_seqlen


def packed_cache(
    model: PreTrainedModel, batch: int, capacity: int, *, block_size: int = BLOCK, num_blocks: int | None = None,
    dtype: torch.dtype | None = None,
) -> PackedCache:  # fmt: skip
    """A cache for packed rows: `pack`, then model(input_ids (1, total), position_ids=(1, total), past_key_values=it),
    pieces of prompts beside single tokens of other sequences. For models that cache keys and values of all layers.

    Args:
        model: after `use`.
        batch, capacity, block_size, num_blocks: as PagedKVCache.
        dtype: of keys and values; None: the model's; int8 or float8_e4m3fn: bytes.

    Raises:
        ValueError: a model that caches latents, or states.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"} or any(hasattr(m, "expand_kv") for m in model.modules()):
        raise ValueError("model: expected keys and values in the cache of every layer, got latents or states")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    dtype = model.dtype if dtype is None else dtype
    return PackedCache(
        [
            PagedKVCache(
                batch, kv_heads, capacity, dim, block_size=block_size, num_blocks=num_blocks, dtype=dtype,
                device=model.device,
            )
            for _ in range(config.num_hidden_layers)
        ]
    )  # fmt: skip

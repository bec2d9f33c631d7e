"""This package's caches as layers of a transformers Cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...nn.cache import Cache as OwnCache
from ...nn.cache import KVCache, LatentCache
from ...nn.cache_paged import PagedKVCache
from .held import HeldTensor

ROOM = 64  # tokens that the first cache of a layer has room for, at least
PARTS = ("key", "value", "key_scale", "value_scale")  # of a cache; None where it has no such


class GrowingLayer(DynamicLayer):
    """transformers' DynamicLayer over a cache of this package, whose room doubles where it is full: a token is written
    in place, and keys and values are views, where DynamicLayer copies all of them for every token."""

    cache: OwnCache | None = None
    length = 0

    def __init__(self, dtype: torch.dtype | None = None, **options: Any):
        """dtype: of a cache of bytes; None: that of keys and values."""
        super().__init__(**options)
        self.bytes = dtype

    def _make(self, keys: Tensor, values: Tensor, capacity: int) -> Any:
        raise NotImplementedError

    def _append(self, keys: Tensor, values: Tensor) -> None:
        raise NotImplementedError

    def _views(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.numbers = key_states.dtype
        end = self.length + key_states.shape[-2]
        if self.cache is None or end > self.cache.capacity:
            capacity = max(ROOM, 1 << (end - 1).bit_length())
            self._move(self._make(key_states, value_states, capacity))
        self._append(key_states, value_states)
        self.length = end
        self.keys, self.values = self._views()
        return self.keys, self.values

    def _move(self, new: OwnCache) -> None:
        """What is held goes into the new cache."""
        if self.cache is not None:
            for name in PARTS:
                if (held := getattr(self.cache, name, None)) is not None:
                    getattr(new, name)[:, :, : self.length] = held[:, :, : self.length]
            new.lengths.fill_(self.length)
        self.cache = new

    def _held(self, cache: KVCache | PagedKVCache) -> tuple[Tensor, Tensor]:
        key, value = (HeldTensor(cache, self.length, is_value, self.numbers) for is_value in (False, True))
        return key, value

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        self.cache, self.length = None, 0
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected a negative number or 0, got {tokens_to_remove}")
        if self.cache is not None and tokens_to_remove:
            self.length += tokens_to_remove
            self.cache.truncate(self.length)
            self.keys, self.values = self._views()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(beam_idx.to(self.cache.key.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            index = torch.arange(len(self.cache.lengths), device=self.cache.key.device)
            self.batch_select_indices(index.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is not None:
            for name in (*PARTS, "lengths"):
                held = getattr(self.cache, name, None)
                setattr(self.cache, name, None if held is None else held[indices])
            self.keys, self.values = self._views()


class KVLayer(GrowingLayer):
    """Over an attnjourney.KVCache: `cache`. Padding stays inside; the mask hides it."""

    cache: KVCache | None = None

    def _make(self, keys: Tensor, values: Tensor, capacity: int) -> KVCache:
        batch, heads, _, dim = keys.shape
        dtype = self.bytes or keys.dtype
        return KVCache(batch, heads, capacity, dim, values.shape[3], dtype=dtype, device=keys.device)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        assert self.cache is not None
        self.cache.append(keys, values)

    def _views(self) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        if self.bytes is not None:
            return self._held(self.cache)
        return self.cache.key[:, :, : self.length], self.cache.value[:, :, : self.length]


class LatentLayer(GrowingLayer):
    """Over an attnjourney.LatentCache: `cache`, for layers that cache latents (B, 1, N, kv_lora_rank) and rotary keys
    (B, 1, N, qk_rope_head_dim). The latents that it returns know where they come from, and `use` has told the model's
    layers to leave such latents as they are: attention is absorbed (attnjourney.mla_decode), no key is made."""

    cache: LatentCache | None = None

    def _make(self, keys: Tensor, values: Tensor, capacity: int) -> LatentCache:
        return LatentCache(
            keys.shape[0], capacity, keys.shape[3], values.shape[3], dtype=self.bytes or keys.dtype,
            device=keys.device,
        )  # fmt: skip

    def _append(self, keys: Tensor, values: Tensor) -> None:
        assert self.cache is not None
        self.cache.append(torch.cat([keys, values], -1).squeeze(1))

    def _views(self) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        held, rank = self.cache.key[:, :, : self.length], self.cache.kv_lora_rank
        latent, rotary = held[..., :rank], held[..., rank:]
        latent.attnjourney_latents = self.cache.latent, self.cache.latent_scale  # type: ignore[attr-defined]
        return latent, rotary


class Indexed:
    """Beside a GrowingLayer: the keys of an indexer (B, N, index_head_dim), of which each row chooses its tokens."""

    indexer: Tensor | None = None  # (B, capacity, index_head_dim)
    indexed = 0

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        batch, new, dim = indexer_key_states.shape
        end = self.indexed + new
        if self.indexer is None or end > self.indexer.shape[1]:
            room = indexer_key_states.new_empty(batch, max(ROOM, 1 << (end - 1).bit_length()), dim)
            if self.indexer is not None:
                room[:, : self.indexed] = self.indexer[:, : self.indexed]
            self.indexer = room
        self.indexer[:, self.indexed : end] = indexer_key_states
        self.indexed = end
        return self.indexer[:, :end]

    def reset(self) -> None:
        self.indexer, self.indexed = None, 0
        super().reset()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)  # type: ignore[misc]
        self.indexed = max(0, self.indexed + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        if self.indexer is not None:
            self.indexer = self.indexer[beam_idx.to(self.indexer.device)]

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        if self.indexer is not None:
            self.indexer = self.indexer[indices]


class IndexedKVLayer(Indexed, KVLayer):
    """A KVLayer of a model whose rows choose their keys (DeepSeek-V3.2)."""


class IndexedLatentLayer(Indexed, LatentLayer):
    """A LatentLayer of such a model: attention reads the latents of the tokens chosen, no key is made."""


class WindowLayer(DynamicSlidingWindowLayer):
    """transformers' layer of a sliding window over room for two windows: a token is written in place, and what is kept
    moves to the front once a window, where DynamicSlidingWindowLayer copies the window for every token."""

    room: tuple[Tensor, Tensor] | None = None  # (B, heads, places, dim) each
    end = 0  # where the last of `keys` ends in it

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.record_past:  # theirs decides what is kept
            self.room = None
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self._held()
        new, held_count = key_states.shape[-2], 0 if held is None else held[0].shape[2]
        if self.room is None or not self._ends_in(self.room, held) or self.end + new > self.room[0].shape[2]:
            self.room = self._moved(held, held_count + new, key_states, value_states)
            self.end = held_count
        begin, self.end = self.end - held_count, self.end + new
        for room, states in zip(self.room, (key_states, value_states)):
            room[:, :, self.end - new : self.end] = states
        full_keys, full_values = (room[:, :, begin : self.end] for room in self.room)
        self.keys, self.values = (x[:, :, -self.sliding_window + 1 :] for x in (full_keys, full_values))
        self.cumulative_length += new
        return full_keys, full_values

    def _held(self) -> tuple[Tensor, Tensor] | None:
        """(B, heads, tokens, dim) each; None before the first token."""
        if self.keys is None or self.values is None or self.keys.dim() != 4:
            return None
        return self.keys, self.values

    def _ends_in(self, room: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor] | None) -> bool:
        """Whether what is held ends at `end` of the room: what crops, repeats or reorders it makes other tensors."""
        if held is None:
            return self.end == 0
        place = room[0][:, :, self.end - held[0].shape[2] :]
        return held[0].shape[0] == place.shape[0] and held[0].data_ptr() == place.data_ptr()

    def _moved(self, held: tuple[Tensor, Tensor] | None, least: int, *states: Tensor) -> tuple[Tensor, Tensor]:
        """New room, with what is held at its front."""
        places = max(2 * self.sliding_window, least)
        keys, values = (x.new_empty(*x.shape[:2], places, x.shape[3]) for x in states)
        if held is not None:
            keys[:, :, : held[0].shape[2]], values[:, :, : held[1].shape[2]] = held
        return keys, values

    def reset(self) -> None:
        self.room, self.end = None, 0
        super().reset()

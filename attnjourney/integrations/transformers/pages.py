"""Pages of an attnjourney.PagedKVCache behind transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...nn.cache_paged import PagedKVCache
from .layers import PARTS, GrowingLayer

BLOCK = 64  # tokens of a page


class PagedLayer(GrowingLayer):
    """Over a PagedKVCache: `cache`. Beams share the pages of what they have in common, and reordering them moves no
    keys. What attention of others is given are the keys and values, gathered."""

    cache: PagedKVCache | None = None

    def __init__(self, block_size: int = BLOCK, dtype: torch.dtype | None = None, **options: Any):
        super().__init__(dtype, **options)
        self.block_size = block_size

    def _make(self, keys: Tensor, values: Tensor, capacity: int) -> PagedKVCache:
        batch, heads, _, dim = keys.shape
        blocks = max(batch * -(-capacity // self.block_size), 0 if self.cache is None else len(self.cache.key))
        return PagedKVCache(
            batch, heads, capacity, dim, values.shape[3], block_size=self.block_size, num_blocks=blocks,
            dtype=self.bytes or keys.dtype, device=keys.device,
        )  # fmt: skip

    def _append(self, keys: Tensor, values: Tensor) -> None:
        assert self.cache is not None
        self.cache.append(keys, values)

    def _views(self) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        return self._held(self.cache)

    def _move(self, new: Any) -> None:
        """Blocks keep their numbers: the pool grows behind them, and so does the table."""
        old = self.cache
        if old is not None:
            blocks, (batch, columns) = old.key.shape[0], old.block_table.shape
            for name in PARTS:
                if (held := getattr(old, name)) is not None:
                    getattr(new, name)[:blocks] = held
            new.block_refs[:blocks] = old.block_refs
            new.block_table[:batch, :columns] = old.block_table
            new.lengths[:batch] = old.lengths
        self.cache = new

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is None:
            return
        indices = indices.to(self.cache.key.device)
        table, lengths = self.cache.block_table[indices], self.cache.lengths[indices]
        missing = len(indices) * table.shape[1] - self.cache.key.shape[0]
        if missing > 0:  # as many as there are if all sequences part
            for name in PARTS:
                if (held := getattr(self.cache, name)) is not None:
                    setattr(self.cache, name, torch.cat([held, held.new_empty(missing, *held.shape[1:])]))
        refs = torch.bincount(table[table >= 0].long(), minlength=self.cache.key.shape[0])
        self.cache.block_table, self.cache.lengths = table, lengths
        self.cache.block_refs = refs.to(torch.int32)
        self.keys, self.values = self._views()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.cache is not None:
            self.keys, self.values = self._views()

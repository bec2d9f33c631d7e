"""Pages of an attnjourney.PagedKVCache behind transformers: a layer, and keys and values that nobody gathers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...nn.cache_paged import PagedKVCache
from .layers import GrowingLayer

BLOCK = 64  # tokens of a page


class PagedTensor(torch.Tensor):
    """Keys or values (B, heads, tokens, dim) that lie in pages: attention of this package reads them there
    (attnjourney.decode with a block table). Any operation on it gets the numbers, gathered.

    Attributes:
        cache: PagedKVCache, all of whose sequences have as many tokens. is_value: whether it is its value.
    """

    cache: PagedKVCache
    is_value: bool

    @staticmethod
    def __new__(cls, cache: PagedKVCache, tokens: int, is_value: bool) -> PagedTensor:
        pool = cache.value if is_value else cache.key
        shape = (cache.block_table.shape[0], pool.shape[1], tokens, pool.shape[3])
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=pool.dtype, device=pool.device)
        self.cache, self.is_value = cache, is_value
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda paged: paged.numbers(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def numbers(self) -> Tensor:
        """(B, heads, tokens, dim), gathered."""
        cache, tokens = self.cache, self.shape[2]
        pool, used = cache.value if self.is_value else cache.key, -(-tokens // cache.block_size)
        blocks = pool[cache.block_table[:, :used].long()]  # (B, used, heads, block, dim)
        return blocks.transpose(1, 2).flatten(2, 3)[:, :, :tokens]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PagedTensor({tuple(self.shape)}, {self.cache})"


class PagedLayer(GrowingLayer):
    """Over a PagedKVCache: `cache`. Beams share the pages of what they have in common, and reordering them moves no
    keys. What attention of others is given are the keys and values, gathered."""

    cache: PagedKVCache | None = None

    def __init__(self, block_size: int = BLOCK, **options: Any):
        super().__init__(**options)
        self.block_size = block_size

    def _make(self, keys: Tensor, values: Tensor, capacity: int) -> PagedKVCache:
        batch, heads, _, dim = keys.shape
        blocks = max(batch * -(-capacity // self.block_size), 0 if self.cache is None else len(self.cache.key))
        return PagedKVCache(
            batch, heads, capacity, dim, values.shape[3], block_size=self.block_size, num_blocks=blocks,
            dtype=keys.dtype, device=keys.device,
        )  # fmt: skip

    def _append(self, keys: Tensor, values: Tensor) -> None:
        assert self.cache is not None
        self.cache.append(keys, values)

    def _views(self) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        return PagedTensor(self.cache, self.length, False), PagedTensor(self.cache, self.length, True)

    def _move(self, new: Any) -> None:
        """Blocks keep their numbers: the pool grows behind them, and so does the table."""
        old = self.cache
        if old is not None:
            blocks, (batch, columns) = old.key.shape[0], old.block_table.shape
            new.key[:blocks], new.value[:blocks] = old.key, old.value
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
            pools = (self.cache.key, self.cache.value)
            key, value = (torch.cat([x, x.new_empty(missing, *x.shape[1:])]) for x in pools)
            self.cache.key, self.cache.value = key, value
        refs = torch.bincount(table[table >= 0].long(), minlength=self.cache.key.shape[0])
        self.cache.block_table, self.cache.lengths = table, lengths
        self.cache.block_refs = refs.to(torch.int32)
        self.keys, self.values = self._views()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.cache is not None:
            self.keys, self.values = self._views()

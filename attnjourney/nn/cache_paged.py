"""A cache in blocks of a common pool (PagedAttention, arXiv 2309.06180)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import kv_cache as ops
from ..ops._registry.inference import as_index, optional_index
from .cache import KeyValueCache, check_sizes, scale_of


class PagedKVCache(KeyValueCache):
    """Keys and values in blocks that sequences take from one pool as they grow and give back when they shrink.

    After `reorder`, sequences share blocks; the first that writes into a shared block gets a copy of it.

    Args:
        batch, num_kv_heads, capacity, head_dim, v_head_dim, dtype, device: as KVCache; capacity is one
            sequence's.
        block_size: tokens of a block.
        num_blocks: blocks of the pool; by default as many as all sequences at full length need.

    Attributes:
        key: (num_blocks, num_kv_heads, block_size, head_dim); value: the same with v_head_dim.
        key_scale, value_scale: of bytes, (num_blocks, num_kv_heads, block_size) float32; else None.
        lengths: (batch,) int64.
        block_table: (batch, max_blocks) int32, -1 where there is no block.
        block_refs: (num_blocks,) int32: how many sequences hold a block; 0: free.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        block_size: int = 64,
        num_blocks: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_sizes(batch=batch, num_kv_heads=num_kv_heads, capacity=capacity, head_dim=head_dim, v_head_dim=v_head_dim)
        check_sizes(block_size=block_size)
        max_blocks = -(-capacity // block_size)
        num_blocks = batch * max_blocks if num_blocks is None else num_blocks
        check_sizes(num_blocks=num_blocks)
        self.capacity, self.block_size = max_blocks * block_size, block_size
        self.key = torch.empty(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
        self.value = torch.empty(num_blocks, num_kv_heads, block_size, v_head_dim, dtype=dtype, device=device)
        self.key_scale, self.value_scale = scale_of(self.key), scale_of(self.value)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.block_table = torch.full((batch, max_blocks), -1, dtype=torch.int32, device=device)
        self.block_refs = torch.zeros(num_blocks, dtype=torch.int32, device=device)

    def append(self, key: Tensor, value: Tensor, lengths: Tensor | None = None) -> None:
        """As KVCache.append; ValueError too when the pool has no block left."""
        ops.paged_append(
            self.key, self.value, self.lengths, self.block_table, self.block_refs, key, value,
            counts=optional_index(lengths), **self._scales(),
        )  # fmt: skip

    def _lost(self) -> Tensor:
        used = (
            torch.arange(self.block_table.shape[1], device=self.lengths.device) * self.block_size
            < self.lengths[:, None]
        )
        return (self.lengths > self.capacity) | (used & (self.block_table < 0)).any(1)

    def _place(self) -> dict:
        return {"block_table": self.block_table}

    def truncate(self, lengths: Tensor | int) -> None:
        """As KVCache.truncate; blocks that no sequence holds any more are free again."""
        new = self._new_lengths(lengths)
        ops.paged_truncate(self.lengths, self.block_table, self.block_refs, new, block_size=self.block_size)

    def reorder(self, batch_index: Tensor) -> None:
        """As KVCache.reorder; moves no keys and values."""
        ops.paged_reorder(self.lengths, self.block_table, self.block_refs, as_index(batch_index))

    def reset(self) -> None:
        super().reset()
        self.block_table.fill_(-1)
        self.block_refs.zero_()

"""Keys and values that lie in a cache of this package as blocks or bytes, and that nobody gathers or widens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...nn.cache import KVCache
from ...nn.cache_paged import PagedKVCache


class HeldTensor(torch.Tensor):
    """Keys or values (B, heads, tokens, dim) of a cache in pages or in bytes: attention of this package reads them
    there (attnjourney.decode). Any operation on it gets the numbers, gathered.

    Attributes:
        cache: PagedKVCache or KVCache, all of whose sequences have as many tokens. is_value: whether it is its value.
    """

    cache: PagedKVCache | KVCache
    is_value: bool

    @staticmethod
    def __new__(cls, cache: PagedKVCache | KVCache, tokens: int, is_value: bool, dtype: torch.dtype) -> HeldTensor:
        held = cache.value if is_value else cache.key
        shape = (len(cache.lengths), held.shape[1], tokens, held.shape[3])
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=held.device)
        self.cache, self.is_value = cache, is_value
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda held: held.numbers(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def numbers(self) -> Tensor:
        """(B, heads, tokens, dim), gathered."""
        cache = self.cache
        held, scale = (cache.value, cache.value_scale) if self.is_value else (cache.key, cache.key_scale)
        rows = self._rows(held)
        if scale is not None:
            rows = rows.float() * self._rows(scale.unsqueeze(-1))
        return rows.to(self.dtype)

    def _rows(self, x: Tensor) -> Tensor:
        """x: as the cache's key."""
        tokens = self.shape[2]
        if not isinstance(self.cache, PagedKVCache):
            return x[:, :, :tokens]
        used = -(-tokens // self.cache.block_size)
        blocks = x[self.cache.block_table[:, :used].long()]  # (B, used, heads, block, dim)
        return blocks.transpose(1, 2).flatten(2, 3)[:, :, :tokens]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HeldTensor({tuple(self.shape)}, {self.cache})"

"""Caches in blocks of a common pool (PagedAttention, arXiv 2309.06180): keys and values, or latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dtypes import BYTE_DTYPES
from ..ops._shared_prefix import SharedPrefixes, decode_shared, find_shared_prefixes
from ..ops.decode import decode
from ..ops.mla_decode import mla_decode
from ..ops.varlen_attention import varlen_attention
from .cache import KeyValueCache, LatentCache, check_sizes
from .cache_blocks import BlockCache, attend_in_two, check_shared, counts_of, longest_of, packed_index, padded


class PagedKVCache(BlockCache, KeyValueCache):
    """Keys and values in blocks that sequences take from one pool as they grow and give back when they shrink.

    After `fork`, `adopt` and `reorder`, sequences share blocks; the first that writes into a shared block gets a copy
    of it.

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
        block_refs: (num_blocks,) int32: how many sequences and published prefixes hold a block; 0: free.
    """

    value: Tensor

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
        check_sizes(num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
        self._make(batch, num_kv_heads, capacity, head_dim, v_head_dim, block_size, num_blocks, dtype, device)

    def append(self, key: Tensor, value: Tensor, lengths: Tensor | None = None) -> None:
        """As KVCache.append; OutOfBlocks, a ValueError, when the pool has too few blocks left."""
        self._append(key, value, lengths)

    def append_packed(self, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, max_seqlen: int | None = None) -> None:
        """append of packed tokens, some of every sequence or none.

        Args:
            key: (total, num_kv_heads, head_dim), those of sequence b in rows cu_seqlens[b] .. cu_seqlens[b + 1] - 1.
            value: the same with v_head_dim.
            cu_seqlens: (batch + 1,), int64 or int32.
            max_seqlen: the most of a sequence; without it the call waits for the device.
        """
        counts = counts_of(cu_seqlens, len(self.lengths))
        index = packed_index(cu_seqlens, len(key), longest_of(counts, max_seqlen))
        self._append(padded(key, index), padded(value, index), counts)

    def attend(self, query: Tensor, *, shared_prefix: bool | SharedPrefixes = False, **options: Any) -> Any:
        """As KVCache.attend. With shared_prefix, blocks in front of several sequences are read once for all of them.

        The result is the same but for rounding: partial results, in query's dtype, are joined by their lse
        (merge_states). True: the blocks are looked for in the table, which waits for the device; what
        `shared_prefixes` has found serves any number of caches with the same table.

        Raises:
            ValueError: shared_prefix beside window_size, alibi_slopes or prefix_length.
        """
        if shared_prefix is False:
            return super().attend(query, **options)
        check_shared(options)
        rows = torch.arange(len(self.lengths), device=self.lengths.device) if query.dim() == 4 else None
        return self._attend_shared(query, rows, shared_prefix, **options)

    def attend_packed(
        self, query: Tensor, cu_seqlens: Tensor, *, shared_prefix: bool | SharedPrefixes = False,
        return_lse: bool = False, is_causal: bool = True, **options: Any,
    ) -> Any:  # fmt: skip
        """Attention of packed rows, the last of each sequence, over what the cache holds: pieces of prompts beside
        single tokens of other sequences, in one call of varlen_attention over the blocks.

        Where prefixes are shared, and over bytes, sequences with one row and those with more are two calls of `decode`,
        and cu_seqlens is waited for.

        Args:
            query: (total, num_heads, head_dim); rows of sequence b as in append_packed.
            shared_prefix: of the sequences with one row, as of attend: True, or what shared_prefixes has found for
                these cu_seqlens.
            options: scale, window_size, prefix_length, softcap, sinks, alibi_slopes.

        Returns:
            (total, num_heads, v_head_dim), and with return_lse (num_heads, total).
        """
        found = self._shared_packed(shared_prefix, cu_seqlens, options)
        if not found.segments and self.key.dtype not in BYTE_DTYPES:
            counts_of(cu_seqlens, len(self.lengths))
            ends = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))
            options |= {"block_table": self.block_table, "is_causal": is_causal, "return_lse": return_lse}
            return varlen_attention(
                query, self.key, self.value, cu_seqlens, ends, causal_alignment="bottom_right", **options
            )

        def attend(part: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            given = {name: x[rows] if isinstance(x, Tensor) and x.dim() == 2 else x for name, x in options.items()}
            if found.segments and part.shape[2] == 1:
                return self._attend_shared(part, rows, found, is_causal=is_causal, return_lse=True, **given)
            return self._decode(part, self.lengths[rows], self.block_table[rows], is_causal=is_causal, **given)

        out, lse = attend_in_two(query, cu_seqlens, len(self.lengths), self.value.shape[3], attend)
        return (out, lse) if return_lse else out

    def _decode(self, query: Tensor, lengths: Tensor, block_table: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return decode(
            query, self.key, self.value, lengths, block_table=block_table, return_lse=True, **self._scales(), **options
        )

    def _attend_shared(
        self, query: Tensor, rows: Tensor | None, found: bool | SharedPrefixes, *, is_causal: bool = True,
        attn_mask: Tensor | None = None, sinks: Tensor | None = None, return_lse: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        every = rows is None or len(rows) == len(self.lengths)
        lengths, table = (self.lengths, self.block_table) if every else (self.lengths[rows], self.block_table[rows])
        if not isinstance(found, SharedPrefixes):
            count = query.shape[2] if query.dim() == 4 else 1
            found = find_shared_prefixes(table, lengths, self.block_size, count, is_causal)
        options["scale"] = options.get("scale") or query.shape[-1] ** -0.5

        def attend(
            query: Tensor, lengths: Tensor, table: Tensor, is_causal: bool, attn_mask: Tensor | None, own: bool
        ) -> tuple[Tensor, Tensor]:
            given = {"is_causal": is_causal, "attn_mask": attn_mask, "sinks": sinks if own else None, **options}
            return self._decode(query, lengths, table, **given)

        if not found.segments:
            out, lse = attend(query, lengths, table, is_causal, attn_mask, True)
        else:
            out, lse = decode_shared(
                attend, query, lengths, table, self.block_size, self.key.shape[1], found, is_causal, attn_mask
            )
        return (out, lse) if return_lse else out


class PagedLatentCache(BlockCache, LatentCache):
    """Latents of multi-head latent attention in blocks of one pool, which sequences share as those of PagedKVCache.

    Args:
        batch, capacity, kv_lora_rank, qk_rope_head_dim, dtype, device: as LatentCache; capacity is one sequence's.
        block_size, num_blocks: as PagedKVCache.

    Attributes:
        latent: (num_blocks, block_size, kv_lora_rank + qk_rope_head_dim).
        latent_scale: of bytes, (num_blocks, block_size) float32; else None.
        lengths, block_table, block_refs: as of PagedKVCache.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        *,
        block_size: int = 64,
        num_blocks: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        self._set_sizes(kv_lora_rank, qk_rope_head_dim)
        width = kv_lora_rank + qk_rope_head_dim
        self._make(batch, 1, capacity, width, None, block_size, num_blocks, dtype, device)

    def _write(self, latent: Tensor, lengths: Tensor | None) -> None:
        self._append(latent, None, lengths)

    def append_packed(self, latent: Tensor, cu_seqlens: Tensor, *, max_seqlen: int | None = None) -> None:
        """As PagedKVCache.append_packed; latent (total, width)."""
        counts = counts_of(cu_seqlens, len(self.lengths))
        self.append(latent[packed_index(cu_seqlens, len(latent), longest_of(counts, max_seqlen))], counts)

    def attend(
        self, query: Tensor, kv_b_weight: Tensor, *, shared_prefix: bool | SharedPrefixes = False,
        return_lse: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """As LatentCache.attend; shared_prefix as of PagedKVCache.attend."""
        if shared_prefix is False:
            return super().attend(query, kv_b_weight, **{"return_lse": return_lse, **options})
        check_shared(options)
        self._check_weight(kv_b_weight)
        found = shared_prefix
        if found is True:
            found = self.shared_prefixes(query.shape[2], options.get("is_causal", True))
        out, lse = self._attend_shared(query, kv_b_weight, self.lengths, self.block_table, found, **options)
        return (out, lse) if return_lse else out

    def attend_packed(
        self, query: Tensor, kv_b_weight: Tensor, cu_seqlens: Tensor, *,
        shared_prefix: bool | SharedPrefixes = False, return_lse: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """Attention of packed rows (total, num_heads, nope + rope), as of PagedKVCache.attend_packed: a call of
        mla_decode for the sequences with one row, and one for those with more. Waits for the device.

        Returns (total, num_heads, v), and with return_lse (num_heads, total).
        """
        self._check_weight(kv_b_weight)
        found = self._shared_packed(shared_prefix, cu_seqlens, options)

        def attend(part: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            given: dict[str, Any] = {
                name: x[rows] if isinstance(x, Tensor) and x.dim() == 2 else x for name, x in options.items()
            }
            shared = found if part.shape[2] == 1 else SharedPrefixes([], [])
            return self._attend_shared(part, kv_b_weight, self.lengths[rows], self.block_table[rows], shared, **given)

        v_dim = kv_b_weight.shape[0] // query.shape[1] - (query.shape[2] - self.qk_rope_head_dim)
        out, lse = attend_in_two(query, cu_seqlens, len(self.lengths), v_dim, attend)
        return (out, lse) if return_lse else out

    def _attend_shared(
        self, query: Tensor, kv_b_weight: Tensor, lengths: Tensor, block_table: Tensor, found: SharedPrefixes, *,
        is_causal: bool = True, attn_mask: Tensor | None = None, sinks: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        def attend(
            query: Tensor, lengths: Tensor, table: Tensor, is_causal: bool, attn_mask: Tensor | None, own: bool
        ) -> tuple[Tensor, Tensor]:
            return mla_decode(
                query, self.latent, lengths, kv_b_weight, block_table=table, latent_scale=self.latent_scale,
                is_causal=is_causal, attn_mask=attn_mask, sinks=sinks if own else None, return_lse=True, **options,
            )  # fmt: skip

        if not found.segments:
            return attend(query, lengths, block_table, is_causal, attn_mask, True)
        return decode_shared(attend, query, lengths, block_table, self.block_size, None, found, is_causal, attn_mask)

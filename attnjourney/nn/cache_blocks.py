"""The blocks of paged caches: who holds which, how they are shared, and how they come back."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import kv_cache as ops
from ..ops._registry.inference import as_index, optional_index
from ..ops._shared_prefix import SharedPrefixes, find_shared_prefixes
from .cache import Cache, check_sizes, scale_of
from .cache_prefix import PrefixIndex

_NONE_LEFT = re.compile(
    r"the cache overflows: expected at most (\d+) new blocks, as many as are free of its (\d+), got (\d+)"
)


_WHOLE = ("window_size", "alibi_slopes", "prefix_length")  # what depends on where a row stands


def check_shared(options: dict[str, Any]) -> None:
    for name in _WHOLE:
        value = options.get(name)
        if isinstance(value, Tensor) or (value is not None and value not in (0, (-1, -1))):
            raise ValueError(
                f"shared_prefix: expected False beside {name}, which differs between the rows that share a prefix"
            )


class OutOfBlocks(ValueError):
    """The pool of a paged cache has fewer free blocks than an append needs; nothing was written.

    Attributes:
        free, asked, blocks: blocks that were free, that were needed, and of the pool.
    """

    def __init__(self, message: str, free: int, asked: int, blocks: int):
        super().__init__(message)
        self.free, self.asked, self.blocks = free, asked, blocks


class BlockCache(Cache):
    """What caches in blocks share. key (num_blocks, heads, block_size, dim) and value, or None; block_table and
    block_refs as of PagedKVCache."""

    block_size: int
    block_table: Tensor
    block_refs: Tensor
    prefixes: PrefixIndex

    def _make(
        self, batch: int, heads: int, capacity: int, dim: int, v_dim: int | None, block_size: int,
        num_blocks: int | None, dtype: torch.dtype | None, device: torch.device | str | None,
    ) -> None:  # fmt: skip
        check_sizes(batch=batch, capacity=capacity, block_size=block_size)
        max_blocks = -(-capacity // block_size)
        num_blocks = batch * max_blocks if num_blocks is None else num_blocks
        check_sizes(num_blocks=num_blocks)
        self.capacity, self.block_size = max_blocks * block_size, block_size
        self.key = torch.empty(num_blocks, heads, block_size, dim, dtype=dtype, device=device)
        self.value = None if v_dim is None else self.key.new_empty(num_blocks, heads, block_size, v_dim)
        self.key_scale = scale_of(self.key)
        self.value_scale = None if self.value is None else scale_of(self.value)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.block_table = torch.full((batch, max_blocks), -1, dtype=torch.int32, device=device)
        self.block_refs = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self.prefixes = PrefixIndex()

    def _append(self, key: Tensor, value: Tensor | None, lengths: Tensor | None) -> None:
        try:
            ops.paged_append(
                self.key, self.value, self.lengths, self.block_table, self.block_refs, key, value,
                counts=optional_index(lengths), **self._scales(),
            )  # fmt: skip
        except ValueError as error:
            found = _NONE_LEFT.search(str(error))
            if found is None:
                raise
            free, blocks, asked = map(int, found.groups())
            raise OutOfBlocks(str(error), free, asked, blocks) from None

    def _lost(self) -> Tensor:
        used = (
            torch.arange(self.block_table.shape[1], device=self.lengths.device) * self.block_size
            < self.lengths[:, None]
        )
        return (self.lengths > self.capacity) | (used & (self.block_table < 0)).any(1)

    def truncate(self, lengths: Tensor | int) -> None:
        """As KVCache.truncate; blocks that nobody holds any more are free again."""
        new = self._new_lengths(lengths)
        ops.paged_truncate(self.lengths, self.block_table, self.block_refs, new, block_size=self.block_size)

    def reorder(self, batch_index: Tensor) -> None:
        """As KVCache.reorder; moves no keys and values."""
        ops.paged_reorder(self.lengths, self.block_table, self.block_refs, as_index(batch_index))

    def reset(self) -> None:
        super().reset()
        self.block_table.fill_(-1)
        self.block_refs.zero_()
        self.prefixes = PrefixIndex()

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody holds. Waits for the device."""
        return int((self.block_refs == 0).sum())

    @property
    def held_nbytes(self) -> int:
        """Bytes of the blocks that somebody holds, a shared one counted once; `nbytes` is the whole pool. Waits for the
        device."""
        blocks = len(self.block_refs)
        return self.nbytes // blocks * (blocks - self.free_blocks)

    def free(self, rows: int | Sequence[int] | Tensor) -> None:
        """Sequences end: they are empty, and blocks that nobody else holds are free again. rows: their numbers."""
        new = self.lengths.clone()
        new[self._rows("rows", rows)] = 0
        self.truncate(new)

    def fork(self, source: int, to: int | Sequence[int] | Tensor, length: int | None = None) -> None:
        """Sequences `to` become what sequence `source` is, or its first `length` tokens: they hold its blocks, and the
        first that writes into one gets a copy of it. What they were is given back.

        Raises:
            ValueError: a number that is no sequence's, or on the CPU a length past the source's.
        """
        from_row, rows = self._rows("source", source), self._rows("to", to)
        if length is not None and (length < 0 or (not self._waits() and length > int(self.lengths[from_row]))):
            have = "the source's length" if self._waits() else int(self.lengths[from_row])
            raise ValueError(f"length: expected a number from 0 to {have}, got {length}")
        index = torch.arange(len(self.lengths), device=self.lengths.device)
        index[rows] = from_row
        self.reorder(index)
        if length is not None:
            new = self.lengths.clone()
            new[rows] = length
            new[from_row] = self.lengths[from_row]
            self.truncate(new)

    def publish(self, row: int, keys: Sequence[Hashable]) -> None:
        """The first len(keys) blocks of a sequence may begin later ones: key j names the tokens of the blocks 0 .. j,
        as prefix_keys makes them. They are held until `evict`, whatever becomes of the sequence; keys that are there
        stay as they are. Waits for the device.

        Raises ValueError for a row that is no sequence's, or more keys than it has whole blocks.
        """
        at = self._rows("row", row)
        whole = min(int(self.lengths[at]), self.capacity) // self.block_size
        if len(keys) > whole:
            raise ValueError(
                f"keys: expected at most {whole}, one for each whole block of sequence {row}, got {len(keys)}"
            )
        self._hold(self.prefixes.add(keys, self.block_table[at, : len(keys)].flatten().tolist()), 1)
        self.prefixes.touch(keys)

    def adopt(self, row: int, keys: Sequence[Hashable]) -> int:
        """An empty sequence begins with the blocks of the first keys that have been published, as far as they are;
        returns how many tokens these are. Waits for the device.

        Raises ValueError for a row that is no sequence's, or is not empty.
        """
        at = self._rows("row", row)
        if int(self.lengths[at]):
            raise ValueError(f"row: expected an empty sequence, got {row} with {int(self.lengths[at])} tokens")
        blocks = self.prefixes.find(keys[: self.block_table.shape[1]])
        self.prefixes.touch(keys[: len(blocks)])
        self._hold(blocks, 1)
        self.block_table[at, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device=self.lengths.device)
        self.lengths[at] = tokens = len(blocks) * self.block_size
        return tokens

    def evict(self, blocks: int | None = None) -> int:
        """Forgets published prefixes, the least recently used first, until that many blocks have come free: those that
        sequences hold stay. None: all prefixes. Returns how many blocks came free. Waits for the device.
        """
        refs = self.block_refs.tolist()
        gone: list[tuple[Hashable, int]] = []
        freed = 0
        for key, block in self.prefixes.oldest():
            if blocks is None or (freed < blocks and refs[block] == 1):
                refs[block] -= 1
                freed += refs[block] == 0
                gone.append((key, block))
        self.prefixes.forget(key for key, _ in gone)
        self._hold([block for _, block in gone], -1)
        return freed

    def _hold(self, blocks: list[int], times: int) -> None:
        index = torch.tensor(blocks, dtype=torch.int64, device=self.block_refs.device)
        self.block_refs.index_add_(0, index, torch.full_like(index, times, dtype=torch.int32))

    def shared_prefixes(
        self, rows: int = 1, is_causal: bool = True, *, cu_seqlens: Tensor | None = None
    ) -> SharedPrefixes:
        """The blocks in front of several sequences, for attend with so many query rows, or for attend_packed: of the
        sequences with one row. They serve any number of caches with the same table. Waits for the device."""
        table, lengths = self.block_table, self.lengths
        if cu_seqlens is not None:
            single = counts_of(cu_seqlens, len(lengths)) == 1
            table, lengths, rows = table[single], lengths[single], 1
        return find_shared_prefixes(table, lengths, self.block_size, rows, is_causal)

    def _shared_packed(
        self, wanted: bool | SharedPrefixes, cu_seqlens: Tensor, options: dict[str, Any]
    ) -> SharedPrefixes:
        """What attend_packed reads once."""
        if wanted is False:
            return SharedPrefixes([], [])
        check_shared(options)
        return self.shared_prefixes(cu_seqlens=cu_seqlens) if wanted is True else wanted

    def _place(self) -> dict:
        return {"block_table": self.block_table}

    def _waits(self) -> bool:
        """Whether values are on a device."""
        return self.lengths.device.type != "cpu"

    def _rows(self, name: str, rows: int | Sequence[int] | Tensor) -> Tensor:
        """int64 numbers of sequences; on the CPU, and from Python, checked."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.lengths.device).reshape(-1)
        batch = len(self.lengths)
        if not isinstance(rows, Tensor) or not self._waits():
            wrong = [b for b in index.tolist() if not 0 <= b < batch]
            if wrong:
                raise ValueError(f"{name}: expected numbers of sequences, from 0 to {batch - 1}, got {wrong[0]}")
        return index

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, block_size={self.block_size}, sequences={len(self.lengths)})"


def packed_index(cu_seqlens: Tensor, total: int, longest: int) -> Tensor:
    """(B, longest) int64: which of `total` packed rows stand in a batch padded on the left; some row in the padding."""
    index = cu_seqlens[1:, None] - longest + torch.arange(longest, device=cu_seqlens.device)
    return index.clamp_(min=0, max=max(0, total - 1))


def padded(x: Tensor, index: Tensor) -> Tensor:
    """Packed rows (total, heads, dim) -> (B, heads, longest, dim)."""
    return x[index].transpose(1, 2)


def counts_of(cu_seqlens: Tensor, batch: int) -> Tensor:
    if cu_seqlens.shape != (batch + 1,):
        raise ValueError(f"cu_seqlens: expected shape ({batch + 1},), got {tuple(cu_seqlens.shape)}")
    return cu_seqlens.diff()


def longest_of(counts: Tensor, max_seqlen: int | None) -> int:
    """Waits for the device where max_seqlen is not given."""
    if max_seqlen is not None:
        return max_seqlen
    return int(counts.max()) if len(counts) else 0


def attend_in_two(
    query: Tensor, cu_seqlens: Tensor, batch: int, v_dim: int, attend: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Attention of packed rows (total, heads, dim) by a call for the sequences with one row and one for those with
    more, padded: attend(query (b, heads, rows, dim), numbers of these b sequences) -> out, lse. Waits for the device.
    """
    counts = counts_of(cu_seqlens, batch)
    out = query.new_zeros(*query.shape[:2], v_dim)
    lse = query.new_full(query.shape[1::-1], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    host = counts.tolist()
    for members in ([b for b, n in enumerate(host) if n == 1], [b for b, n in enumerate(host) if n > 1]):
        if not members:
            continue
        rows, longest = torch.tensor(members, device=query.device), max(host[b] for b in members)
        index = packed_index(cu_seqlens, len(query), longest)[rows]
        part, sums = attend(padded(query, index), rows)
        real = torch.arange(longest, device=query.device) >= longest - counts[rows, None]
        out[index[real]] = part.transpose(1, 2)[real]
        lse[:, index[real]] = sums.transpose(1, 2)[real].T
    return out, lse

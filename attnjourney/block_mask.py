"""Masks made of blocks: which blocks of pairs attention computes at all."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree

IndexFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class BlockMask:
    """A boolean mask (batch, heads, q_len, kv_len) by blocks of `block_size` rows and keys, for `attn_mask` of
    attnjourney.attention: blocks that hide every pair cost nothing, those that hide none are not tested, and the others
    bring their pairs, one stored block for all that are equal. Batch and heads of 1 broadcast.

    Made by `from_function` or `from_dense`. Its tensors are those of torch.ops.attnjourney.block_attention:

    Attributes:
        offsets: int32 (batch, heads, row blocks + 1): where a row of blocks begins and ends in the next two.
        index: int32 (blocks,): the key block, rising within a row.
        partial: int32 (blocks,): the place of its pairs in `elements`; -1 where it hides none.
        elements: bool (partial blocks that differ, block_size, block_size), True where a row may see a key.

    Lists that were made elsewhere are checked on the CPU; on CUDA, where that would wait for the device, numbers that
    lead nowhere hide.
    """

    dtype = torch.bool

    def __init__(self, offsets: Tensor, index: Tensor, partial: Tensor, elements: Tensor, q_len: int, kv_len: int):
        self.offsets, self.index, self.partial, self.elements = offsets, index, partial, elements
        self.q_len, self.kv_len = q_len, kv_len

    @classmethod
    def from_function(
        cls,
        fn: IndexFunction,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        block_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """The mask that is fn(b, h, i, j): whether row i of head h in batch item b may see key j.

        Args:
            fn: takes int64 tensors that broadcast (b and h have no dimensions, i is (rows, 1), j is (1, kv_len)) and
                returns a bool tensor that broadcasts to (rows, kv_len). Called once for each row of blocks, batch item
                and head: memory is that of block_size * kv_len pairs.
            batch, heads: 1 where all are the same.
            block_size: a multiple of 16.

        Raises TypeError and ValueError, naming the argument, the expected and the given.
        """
        if not callable(fn):
            raise TypeError(f"fn: expected a function of (b, h, i, j), got {type(fn).__name__}")
        _check_sizes(batch, heads, q_len, kv_len, block_size)
        keys = torch.arange(kv_len, device=device)[None]
        index = [torch.tensor(n, device=device) for n in range(max(batch, heads))]

        def rows_of(b: int, h: int, first: int, last: int) -> Tensor:
            rows = torch.arange(first, last, device=device)[:, None]
            seen = fn(index[b], index[h], rows, keys)
            if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
                got = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
                raise TypeError(f"fn: expected a tensor of dtype torch.bool, got {got}")
            want = (last - first, kv_len)
            if seen.dim() > 2 or any(n not in (1, w) for n, w in zip(reversed(seen.shape), reversed(want))):
                raise ValueError(f"fn: expected a shape that broadcasts to {want}, got {tuple(seen.shape)}")
            return seen.expand(want)

        return cls._build(rows_of, batch, heads, q_len, kv_len, block_size, device)

    @classmethod
    def from_dense(cls, mask: Tensor, block_size: int = 64) -> BlockMask:
        """The mask of a bool tensor (q_len, kv_len), (heads, q_len, kv_len) or (batch, heads, q_len, kv_len).

        Raises TypeError and ValueError, naming the argument, the expected and the given.
        """
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask: expected a tensor of dtype torch.bool, got {got}")
        if not 2 <= mask.dim() <= 4:
            raise ValueError(f"mask: expected 2 to 4 dimensions (batch, heads, q_len, kv_len), got {tuple(mask.shape)}")
        full = mask[(None,) * (4 - mask.dim())]
        batch, heads, q_len, kv_len = full.shape
        _check_sizes(batch, heads, q_len, kv_len, block_size)

        row_blocks, key_blocks = -(-q_len // block_size), -(-kv_len // block_size)
        pad = (0, key_blocks * block_size - kv_len, 0, row_blocks * block_size - q_len)

        def blocks_of(beyond: bool) -> Tensor:
            """(batch, heads, row blocks, key blocks, pairs), with `beyond` where there is no row or key."""
            padded = torch.nn.functional.pad(full, pad, value=beyond)
            blocks = padded.view(batch, heads, row_blocks, block_size, key_blocks, block_size)
            return blocks.transpose(3, 4).flatten(4)

        some, cut = blocks_of(False).any(-1), blocks_of(True)
        # No branch depends on a value, so that a program can hold this whose batch only a run tells.
        counts = some.sum(-1)
        ends = counts.flatten().cumsum(0).view(batch, heads, row_blocks)
        starts = (ends - counts)[..., :1] if q_len else counts.new_zeros(batch, heads, 1)
        seen, is_cut = cut[some], ~cut.all(-1)[some]
        words, kinds = torch.unique(seen[is_cut].view(torch.int64), dim=0, return_inverse=True)
        nth = torch.arange(kinds.shape[0], device=mask.device)
        first = torch.full_like(words[:, 0], kinds.shape[0]).scatter_reduce(0, kinds, nth, "amin")
        order = first.argsort()  # those that differ, in the order in which they appear
        partial = torch.full_like(is_cut, -1, dtype=torch.int32)
        partial[is_cut] = order.argsort()[kinds].int()
        return cls(
            torch.cat([starts, ends], -1).int(),
            some.nonzero()[:, -1].int(),
            partial,
            words[order].view(torch.bool).unflatten(1, (block_size, block_size)),
            q_len,
            kv_len,
        )

    @classmethod
    def _build(
        cls,
        rows_of: Callable[[int, int, int, int], Tensor],
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        block_size: int,
        device: torch.device | str,
    ) -> BlockMask:
        """rows_of(b, h, first, last): those rows, bool (last - first, kv_len)."""
        places: dict[tuple[int, ...], int] = {}  # of the elements that differ, by their bytes
        elements: list[Tensor] = []
        index: list[Tensor] = []
        partial: list[Tensor] = []
        offsets: list[int] = []
        key_blocks = -(-kv_len // block_size)
        blocks = 0
        for b in range(batch):
            for h in range(heads):
                offsets.append(blocks)
                for first in range(0, q_len, block_size):
                    rows = rows_of(b, h, first, min(first + block_size, q_len)).cpu()
                    some = _cut(rows, block_size, False).any(2).any(1)
                    cut = _cut(rows, block_size, True)  # rows and keys that are not there hide nothing
                    here = torch.full((key_blocks,), -1, dtype=torch.int32)
                    for k in (some & ~cut.flatten(1).all(1)).nonzero().flatten().tolist():
                        content = tuple(cut[k].flatten().view(torch.int64).tolist())
                        if content not in places:
                            places[content] = len(elements)
                            elements.append(cut[k].clone())
                        here[k] = places[content]
                    index.append(some.nonzero().flatten().int())
                    partial.append(here[some])
                    blocks += len(index[-1])
                    offsets.append(blocks)
        if blocks >= 1 << 31:
            raise ValueError(f"block_size: expected fewer than 2^31 visible blocks, got {blocks}: use larger ones")

        def joined(parts: list[Tensor]) -> Tensor:
            return torch.cat([torch.empty(0, dtype=torch.int32), *parts]).to(device)

        row_blocks = -(-q_len // block_size)
        return cls(
            torch.tensor(offsets, dtype=torch.int32).reshape(batch, heads, row_blocks + 1).to(device),
            joined(index),
            joined(partial),
            (torch.stack(elements) if elements else torch.empty(0, block_size, block_size, dtype=torch.bool)).to(
                device
            ),
            q_len,
            kv_len,
        )

    # ---- what it is

    @property
    def shape(self) -> torch.Size:
        """(batch, heads, q_len, kv_len)."""
        return torch.Size((*self.offsets.shape[:2], self.q_len, self.kv_len))

    @property
    def block_size(self) -> int:
        return self.elements.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device."""
        offsets, index, partial, elements = (t.to(device) for t in self.tensors)
        return BlockMask(offsets, index, partial, elements, self.q_len, self.kv_len)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.offsets, self.index, self.partial, self.elements

    def sparsity(self) -> float:
        """The share of the blocks that hide every pair."""
        kinds = self._kinds()
        return (kinds < 0).sum().item() / max(1, kinds.numel())

    def to_dense(self) -> Tensor:
        """The mask as a bool tensor (batch, heads, q_len, kv_len)."""
        return self.dense_rows(torch.arange(self.q_len, device=self.device))

    def dense_rows(self, rows: Tensor) -> Tensor:
        """These rows of the mask as a bool tensor (batch, heads, rows, kv_len)."""
        size, rows = self.block_size, rows.to(self.device)
        kinds = self._kinds().index_select(-2, rows // size)
        fixed = torch.tensor([False, True], device=self.device)[:, None, None].expand(2, size, size)
        lines = torch.cat([fixed, self.elements])[kinds + 1, (rows % size)[:, None]]
        return lines.flatten(-2)[..., : self.kv_len]  # of (batch, heads, rows, key blocks, size)

    def _kinds(self) -> Tensor:
        """int64 (batch, heads, row blocks, key blocks): -1 hides every pair, 0 none, n has elements n - 1."""
        *lead, ends = self.offsets.shape
        starts = self.offsets.long()
        counts = starts.diff().flatten()
        key_blocks = -(-self.kv_len // self.block_size)
        kinds = torch.full((len(counts), key_blocks), -1, device=self.device)
        row = torch.repeat_interleave(torch.arange(len(counts), device=self.device), counts)
        kinds[row, self.index.long()] = self.partial.long() + 1
        return kinds.view(*lead, ends - 1, key_blocks)

    def part(self, row: int, row_end: int, key: int, key_end: int) -> BlockMask:
        """The mask of these rows and keys; row and key are multiples of block_size."""
        size = self.block_size
        if row % size or key % size:
            raise ValueError(f"row, key: expected multiples of the block size, {size}, got {row} and {key}")
        here = (self.index >= key // size) & (self.index < -(-key_end // size))
        before = torch.cat([here.new_zeros(1, dtype=torch.int32), here.cumsum(0, dtype=torch.int32)])
        offsets = before[self.offsets[..., row // size : -(-row_end // size) + 1].long()]
        index = self.index[here] - key // size
        return BlockMask(offsets, index, self.partial[here], self.elements, row_end - row, key_end - key)

    def of_heads(self, first: int, count: int) -> BlockMask:
        """The mask of these heads."""
        offsets = self.offsets if self.offsets.shape[1] == 1 else self.offsets[:, first : first + count]
        return BlockMask(offsets, *self.tensors[1:], self.q_len, self.kv_len)

    def for_rank(self, batch_sizes: tuple[int, ...], rank: int) -> BlockMask:
        """The same mask for a query of that rank and those batch dimensions, whose leading dimensions its offsets
        then broadcast to: rank 3 has no batch, rank 2 no heads either."""
        batch, heads, ends = self.offsets.shape
        if rank == 4:
            return self
        if rank > 4:
            if batch != 1 and batch != math.prod(batch_sizes):
                raise ValueError(
                    f"attn_mask: expected a BlockMask of {math.prod(batch_sizes)} batch items, got {batch}"
                )
            lead = batch_sizes if batch != 1 else (1,) * len(batch_sizes)
            offsets = self.offsets.reshape(*lead, heads, ends)
        else:
            if batch != 1 or (rank == 2 and heads != 1):
                what = "batch item" if rank == 3 else "batch item and head"
                raise ValueError(f"attn_mask: expected a BlockMask of one {what}, got shape {tuple(self.shape)}")
            offsets = self.offsets[0] if rank == 3 else self.offsets[0, 0]
        return BlockMask(offsets, *self.tensors[1:], self.q_len, self.kv_len)

    def __repr__(self) -> str:
        batch, heads, q_len, kv_len = self.shape
        text = f"BlockMask({batch=}, {heads=}, {q_len=}, {kv_len=}, block_size={self.block_size}"
        return f"{text}, sparsity={self.sparsity():.1%})" + "".join(f"\n  {line}" for line in self._picture())

    def _picture(self, most: int = 32) -> list[str]:
        """Head 0 of batch item 0, at most `most` rows and columns: █ all visible, ▒ some, · none."""
        kinds = self._kinds()
        if kinds.numel() == 0:
            return []
        kinds = kinds[0, 0].cpu()
        lines = []
        for rows in kinds.split(-(-len(kinds) // most)):
            cells = rows.split(-(-kinds.shape[1] // most), 1)
            lines.append("".join("█" if (c == 0).all() else "·" if (c < 0).all() else "▒" for c in cells))
        return lines


def _cut(rows: Tensor, size: int, beyond: bool) -> Tensor:
    """(rows, keys) of one row of blocks -> (key blocks, size, size), with `beyond` where there is no row or key."""
    count, keys = rows.shape
    blocks = -(-keys // size)
    full = torch.full((size, blocks * size), beyond)
    full[:count, :keys] = rows
    return full.view(size, blocks, size).transpose(0, 1).contiguous()


def _check_sizes(batch: int, heads: int, q_len: int, kv_len: int, block_size: int) -> None:
    sizes = dict(batch=batch, heads=heads, q_len=q_len, kv_len=kv_len, block_size=block_size)
    for name, n in sizes.items():
        if isinstance(n, torch.SymInt):
            continue
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ValueError(f"{name}: expected an int from 0, got {n!r}")
    if block_size % 16 or block_size == 0:
        raise ValueError(f"block_size: expected a multiple of 16, got {block_size}")


def _leaves(m: BlockMask) -> tuple[list[Tensor], tuple[int, int]]:
    return list(m.tensors), (m.q_len, m.kv_len)


def _named_leaves(m: BlockMask) -> tuple[list, tuple[int, int]]:
    names = ("offsets", "index", "partial", "elements")
    return [(_pytree.GetAttrKey(name), getattr(m, name)) for name in names], (m.q_len, m.kv_len)


_pytree.register_pytree_node(
    BlockMask,
    _leaves,
    lambda tensors, lengths: BlockMask(*tensors, *lengths),
    serialized_type_name="attnjourney.BlockMask",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_named_leaves,
)

"""What the rows of one rank see of the keys of another, as calls of attention.

A row at position p of the sequence sees key j if j < prefix or p - left <= j <= p + right. Each call takes rows and
keys from some position on: rows that see none of the keys and keys that none of the rows sees are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from .sharding import chunks

UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class Visibility:
    """left, right: keys of the window before and after a row; UNBOUNDED where there is no end."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    prefix: int = 0

    @classmethod
    def of(cls, is_causal: bool, window_size: tuple[int, int] | None, prefix_length: int) -> Visibility:
        left, right = (UNBOUNDED if end < 0 else end for end in window_size or (-1, -1))
        return cls(left, min(right, 0) if is_causal else right, prefix_length)

    @property
    def everything(self) -> bool:
        return self.left >= UNBOUNDED and self.right >= UNBOUNDED


@dataclass(frozen=True)
class Layout:
    """Where the rows and the keys of each rank lie: q_lens and kv_lens by rank. documents: where packed sequences begin
    and end in the whole; rows see keys of their own one, by positions within it. block: parts begin at its
    multiples."""

    order: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    documents: tuple[int, ...] | None = None
    block: int = 1

    @classmethod
    def even(cls, order: str, size: int, q_len: int, kv_len: int) -> Layout:
        """The same lengths on every rank."""
        return cls(order, (q_len,) * size, (kv_len,) * size)

    @property
    def size(self) -> int:
        return len(self.q_lens)


@dataclass(frozen=True)
class Part:
    """Rows by keys of two shards, half-open, counted in the shards; window and prefix as attention takes them."""

    row: int
    row_end: int
    key: int
    key_end: int
    window: tuple[int, int]
    prefix: int
    first_row: int  # the positions of the first row and key in the whole
    first_key: int
    document: int = 0  # of packed sequences, and where it begins in the whole
    begin: int = 0

    @property
    def origin(self) -> tuple[int, int]:
        """The positions of the first row and key in their sequence."""
        return self.first_row - self.begin, self.first_key - self.begin


def parts(layout: Layout, rank: int, source: int, seen: Visibility) -> list[Part]:
    """The calls of attention that make up what `rank` sees of the keys of `source`."""
    found = []
    row = 0
    for row_start, rows in chunks(layout.order, layout.q_lens, rank):
        key = 0
        for key_start, keys in chunks(layout.order, layout.kv_lens, source):
            for part in _of_documents(row_start, rows, key_start, keys, seen, layout):
                by_row, by_key = row + part.first_row - row_start, key + part.first_key - key_start
                rows_here, keys_here = part.row_end - part.row, part.key_end - part.key
                found.append(
                    replace(part, row=by_row, row_end=by_row + rows_here, key=by_key, key_end=by_key + keys_here)
                )
            key += keys
        row += rows
    return found


def _of_documents(
    row_start: int, rows: int, key_start: int, keys: int, seen: Visibility, layout: Layout
) -> Iterator[Part]:
    """Rows and keys counted anyhow: their positions say which they are."""
    if layout.documents is None:
        yield from _of_chunks(row_start, rows, key_start, keys, seen, layout.block)
        return
    for document, (begin, end) in enumerate(pairwise(layout.documents)):
        row, row_end = max(row_start, begin), min(row_start + rows, end)
        key, key_end = max(key_start, begin), min(key_start + keys, end)
        if row >= row_end or key >= key_end:
            continue
        for part in _of_chunks(row - begin, row_end - row, key - begin, key_end - key, seen):
            first_row, first_key = part.first_row + begin, part.first_key + begin
            yield replace(part, first_row=first_row, first_key=first_key, document=document, begin=begin)


def _of_chunks(row_start: int, rows: int, key_start: int, keys: int, seen: Visibility, block: int = 1) -> list[Part]:
    prefix = 0 if seen.everything else min(max(seen.prefix - key_start, 0), keys)
    # row i sees key j if i + low <= j <= i + high, or j < prefix
    low, high = row_start - key_start - seen.left, row_start - key_start + seen.right
    row, row_end = max(0, -high), min(rows, keys - low)
    key, key_end = max(0, low + row), min(keys, row_end + high)
    if row >= row_end or key >= key_end:  # nothing by the window
        return [Part(0, rows, 0, prefix, (-1, -1), 0, row_start, key_start)] if prefix and rows else []
    if prefix:
        row, row_end, key, key_end = 0, rows, 0, max(prefix, key_end)
    row, key = row - (row_start + row) % block, key - (key_start + key) % block
    left = -1 if low + row_end - 1 <= key else seen.left
    right = -1 if high + row >= key_end - 1 else seen.right
    prefix = 0 if left == right == -1 else prefix
    return [Part(row, row_end, key, key_end, (left, right), prefix, row_start + row, key_start + key)]

"""What the rows of one rank see of the keys of another, as calls of attention without offsets.

A row at position p of the sequence sees key j if j < prefix or p - left <= j <= p + right. Chunks begin anywhere; what
their offset makes of the window is expressed by leaving out the rows that see no key and the keys that no row sees:
then the window's ends are numbers of at least 0 again.
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
    and end in the whole; rows see keys of their own one, by positions within it. tile: rows of a call that
    counts from another place than its keys, 0: all."""

    order: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    documents: tuple[int, ...] | None = None
    tile: int = 0

    @classmethod
    def even(cls, order: str, size: int, q_len: int, kv_len: int) -> Layout:
        """The same lengths on every rank."""
        return cls(order, (q_len,) * size, (kv_len,) * size)

    @property
    def size(self) -> int:
        return len(self.q_lens)


@dataclass(frozen=True)
class Part:
    """Rows by keys of two shards, half-open, counted in the shards; window as attention takes it."""

    row: int
    row_end: int
    key: int
    key_end: int
    window: tuple[int, int]
    first_row: int  # the positions of the first row and key in the whole
    first_key: int

    @property
    def distance(self) -> int:
        """Of the first row from the first key."""
        return self.first_row - self.first_key


def parts(layout: Layout, rank: int, source: int, seen: Visibility) -> list[Part]:
    """The calls of attention that make up what `rank` sees of the keys of `source`."""
    found = []
    row = 0
    for row_start, rows in chunks(layout.order, layout.q_lens, rank):
        key = 0
        for key_start, keys in chunks(layout.order, layout.kv_lens, source):
            for part in _of_tiles(row_start, rows, key_start, keys, seen, layout):
                by_row, by_key = row + part.first_row - row_start, key + part.first_key - key_start
                rows_here, keys_here = part.row_end - part.row, part.key_end - part.key
                found.append(
                    replace(part, row=by_row, row_end=by_row + rows_here, key=by_key, key_end=by_key + keys_here)
                )
            key += keys
        row += rows
    return found


# These count rows and keys anyhow: positions say which they are.
def _of_tiles(row_start: int, rows: int, key_start: int, keys: int, seen: Visibility, layout: Layout) -> Iterator[Part]:
    apart = row_start != key_start or seen.prefix > 0
    tile = layout.tile if layout.tile and apart else max(rows, 1)
    for row in range(0, rows, tile):
        yield from _of_documents(row_start + row, min(tile, rows - row), key_start, keys, seen, layout.documents)


def _of_documents(
    row_start: int, rows: int, key_start: int, keys: int, seen: Visibility, documents: tuple[int, ...] | None
) -> Iterator[Part]:
    if documents is None:
        yield from _of_chunks(row_start, rows, key_start, keys, seen)
        return
    for begin, end in pairwise(documents):
        row, row_end = max(row_start, begin), min(row_start + rows, end)
        key, key_end = max(key_start, begin), min(key_start + keys, end)
        if row >= row_end or key >= key_end:
            continue
        for part in _of_chunks(row - begin, row_end - row, key - begin, key_end - key, seen):
            first_row, first_key = part.first_row + begin, part.first_key + begin
            yield replace(part, first_row=first_row, first_key=first_key)


def _of_chunks(row_start: int, rows: int, key_start: int, keys: int, seen: Visibility) -> list[Part]:
    found = []
    prefix = 0 if seen.everything else min(max(seen.prefix - key_start, 0), keys)
    if prefix and rows:
        found.append(Part(0, rows, 0, prefix, (-1, -1), row_start, key_start))
    # from here on row i sees key j if i + low <= j <= i + high, keys counted from behind the prefix
    keys, distance = keys - prefix, row_start - key_start - prefix
    low, high = distance - seen.left, distance + seen.right
    row, row_end = max(0, -high), min(rows, keys - low)
    key, key_end = max(0, low + row), min(keys, row_end + high)
    if row >= row_end or key >= key_end:
        return found
    left, right = key - row - low, high + row - key
    window = (-1 if left >= row_end - row - 1 else left, -1 if right >= key_end - key - 1 else right)
    first_row, first_key = row_start + row, key_start + prefix + key
    found.append(Part(row, row_end, prefix + key, prefix + key_end, window, first_row, first_key))
    return found

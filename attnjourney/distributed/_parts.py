"""What the rows of one rank see of the keys of another, as calls of attention without offsets.

A row at position p of the sequence sees key j if j < prefix or p - left <= j <= p + right. Chunks begin anywhere; what
their offset makes of the window is expressed by leaving out the rows that see no key and the keys that no row sees:
then the window's ends are numbers of at least 0 again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from .sharding import chunk_starts

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
    """Where the rows and the keys of each rank lie: q_len and kv_len on one rank. documents: where packed sequences
    begin and end in the whole; rows see keys of their own one, by positions within it."""

    order: str
    size: int
    q_len: int
    kv_len: int
    documents: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Part:
    """Rows by keys of two shards, half-open, counted in the shards; window as attention takes it."""

    row: int
    row_end: int
    key: int
    key_end: int
    window: tuple[int, int]
    distance: int  # of the first row from the first key, in the sequence
    first_key: int  # the first key's position in the sequence


def parts(layout: Layout, rank: int, source: int, seen: Visibility) -> list[Part]:
    """The calls of attention that make up what `rank` sees of the keys of `source`."""
    row_starts = chunk_starts(layout.order, layout.q_len, rank, layout.size)
    key_starts = chunk_starts(layout.order, layout.kv_len, source, layout.size)
    rows, keys = layout.q_len // len(row_starts), layout.kv_len // len(key_starts)
    found = []
    for r, row_start in enumerate(row_starts):
        for k, key_start in enumerate(key_starts):
            for part in _of_documents(row_start, rows, key_start, keys, seen, layout.documents):
                row, key = r * rows, k * keys
                found.append(
                    Part(
                        row=row + part.row,
                        row_end=row + part.row_end,
                        key=key + part.key,
                        key_end=key + part.key_end,
                        window=part.window,
                        distance=part.distance,
                        first_key=part.first_key,
                    )
                )
    return found


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
        by_row, by_key = row - row_start, key - key_start
        for part in _of_chunks(row - begin, row_end - row, key - begin, key_end - key, seen):
            yield replace(
                part,
                row=part.row + by_row,
                row_end=part.row_end + by_row,
                key=part.key + by_key,
                key_end=part.key_end + by_key,
                first_key=part.first_key + begin,
            )


def _of_chunks(row_start: int, rows: int, key_start: int, keys: int, seen: Visibility) -> list[Part]:
    found = []
    prefix = 0 if seen.everything else min(max(seen.prefix - key_start, 0), keys)
    if prefix and rows:
        found.append(Part(0, rows, 0, prefix, (-1, -1), row_start - key_start, key_start))
    # from here on row i sees key j if i + low <= j <= i + high, keys counted from behind the prefix
    keys, distance = keys - prefix, row_start - key_start - prefix
    low, high = distance - seen.left, distance + seen.right
    row, row_end = max(0, -high), min(rows, keys - low)
    key, key_end = max(0, low + row), min(keys, row_end + high)
    if row >= row_end or key >= key_end:
        return found
    left, right = key - row - low, high + row - key
    window = (-1 if left >= row_end - row - 1 else left, -1 if right >= key_end - key - 1 else right)
    first_key = key_start + prefix + key
    found.append(Part(row, row_end, prefix + key, prefix + key_end, window, row_start + row - first_key, first_key))
    return found

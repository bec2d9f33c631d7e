"""How shards of keys and values travel from rank to rank: each as far as somebody needs it, and no farther."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ._parts import Layout, Visibility, parts


@dataclass(frozen=True)
class Route:
    """Shard j goes up[j] ranks on, to j + 1, j + 2, ..., and down[j] ranks back, all modulo the number of ranks."""

    up: tuple[int, ...]
    down: tuple[int, ...]

    @property
    def directions(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(1 or -1, hops of each shard)."""
        return (1, self.up), (-1, self.down)

    def sends(self, rank: int) -> int:
        """How many shards that rank hands on."""
        size = len(self.up)
        return sum(
            (rank - direction * hop) % size == shard
            for direction, hops in self.directions
            for shard in range(size)
            for hop in range(hops[shard])
        )

    def carries(self, rank: int) -> int:
        """How many shards come to that rank: as many gradients of them leave it."""
        size = len(self.up)
        return sum(
            (rank - direction * (hop + 1)) % size == shard
            for direction, hops in self.directions
            for shard in range(size)
            for hop in range(hops[shard])
        )


@functools.lru_cache(maxsize=64)  # of every call, forward and backward: ranks squared pairs of shards
def route_of(layout: Layout, seen: Visibility) -> Route:
    """The route with the fewest hops in all: up to some distance upwards, what is farther downwards."""
    size = layout.size
    needed = [
        sorted((rank - shard) % size for rank in range(size) if rank != shard and parts(layout, rank, shard, seen))
        for shard in range(size)
    ]
    distances = sorted({0, *(d for of_shard in needed for d in of_shard)})
    after = [*distances[1:], size]
    split = min(zip(distances, after), key=lambda ends: (ends[0] + size - ends[1], -ends[0]))[0]
    up = tuple(max((d for d in of_shard if d <= split), default=0) for of_shard in needed)
    down = tuple(max((size - d for d in of_shard if d > split), default=0) for of_shard in needed)
    return Route(up, down)

"""Which blocks hold prefixes that later sequences may begin with."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from torch import Tensor


def prefix_keys(tokens: Sequence[int] | Tensor, block_size: int) -> list[bytes]:
    """A key for each whole block of tokens, which names all tokens up to the block's end: equal for two sequences as
    far as they begin alike (a chain of 128-bit BLAKE2 hashes).

    tokens: of one sequence, (N,). Returns N // block_size keys.
    """
    numbers = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    keys, before = [], b""
    for end in range(block_size, len(numbers) + 1, block_size):
        own = b",".join(b"%d" % n for n in numbers[end - block_size : end])
        before = hashlib.blake2b(own, digest_size=16, key=before).digest()
        keys.append(before)
    return keys


class PrefixIndex:
    """Blocks by the keys that name what they hold, the least recently used first. Holds each of its blocks once."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """The blocks of the first keys, as far as all of them are there."""
        found = []
        for key in keys:
            if key not in self._blocks:
                break
            found.append(self._blocks[key])
        return found

    def add(self, keys: Sequence[Hashable], blocks: Sequence[int]) -> list[int]:
        """Those of the blocks whose keys are new."""
        new = [block for key, block in dict(zip(keys, blocks)).items() if key not in self._blocks]
        for key, block in zip(keys, blocks):
            self._blocks.setdefault(key, block)
        return new

    def touch(self, keys: Sequence[Hashable]) -> None:
        """They have been used, a longer prefix longer ago than a shorter one, without which it is of no use."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def oldest(self) -> list[tuple[Hashable, int]]:
        return list(self._blocks.items())

    def forget(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            del self._blocks[key]

"""What each scheme sends, and the rule that chooses one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .._dtypes import accumulation_dtype
from ._parts import Layout, Visibility
from ._route import route_of

SCHEMES = ("ring", "all_gather", "ulysses")
SMALL = 1 << 16  # bytes of a shard's keys and values below which the number of messages counts, not their size


def bytes_sent(
    scheme: str,
    query_shape: Sequence[int],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    dtype: torch.dtype,
    rank: int,
    size: int,
    *,
    order: str = "contiguous",
    is_causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    prefix_length: int = 0,
    backward: bool = False,
) -> int:
    """The bytes that one rank sends to others in a call of ring_attention, without the 24 to each by which the ranks
    agree on the call, 8 more where there is a mask tensor and where a seed of dropout is drawn, and without the rows of
    a mask that "ulysses" sends. Nothing is sent here.

    Args:
        scheme: "ring", "all_gather" or "ulysses".
        query_shape, key_shape, value_shape: of one rank's shards; where they differ in length, the longest.
        dtype: of the three.
        rank, size: the rank in its group, and the group's size.
        order, is_causal, window_size, prefix_length: as in ring_attention.
        backward: of the backward (of all gradients; that of lse is not counted) and not of the forward.
    """
    item = dtype.itemsize
    numbers = math.prod(key_shape) + math.prod(value_shape)
    wide = accumulation_dtype(dtype).itemsize
    if scheme == "ring":
        layout = Layout.even(order, size, query_shape[-2], key_shape[-2])
        route = route_of(layout, Visibility.of(is_causal, window_size, prefix_length))
        return numbers * (item * route.sends(rank) + (wide * route.carries(rank) if backward else 0))
    if scheme == "all_gather":
        return (size - 1) * numbers * (item + (wide if backward else 0))
    if scheme != "ulysses":
        raise ValueError(f"scheme: expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    rows = math.prod(query_shape[:-1])
    moved = rows * (query_shape[-1] + value_shape[-1]) * item + numbers * item
    lse = 0 if backward else rows * wide
    return (moved + lse) // size * (size - 1)


def choose_scheme(
    query_shape: Sequence[int],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    dtype: torch.dtype,
    size: int,
    *,
    order: str = "contiguous",
    is_causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    prefix_length: int = 0,
) -> str:
    """The rule of scheme="auto". "all_gather" where a shard's keys and values are below 64 KiB and no window leaves
    shards out: one message each way. Else "ulysses" where the ranks divide the query and the key heads and the rank
    that sends most sends fewer bytes, forward and backward together. Else "ring"."""
    shapes = (query_shape, key_shape, value_shape)

    def most(scheme: str) -> int:
        return max(
            sum(
                bytes_sent(
                    scheme, *shapes, dtype, rank, size, order=order, is_causal=is_causal, window_size=window_size,
                    prefix_length=prefix_length, backward=backward,
                )
                for backward in (False, True)
            )
            for rank in range(size)
        )  # fmt: skip

    ring = most("ring")
    shard_bytes = (math.prod(key_shape) + math.prod(value_shape)) * dtype.itemsize
    if shard_bytes < SMALL and most("all_gather") <= ring:
        return "all_gather"
    divides = query_shape[-3] % size == 0 and key_shape[-3] % size == 0
    return "ulysses" if divides and most("ulysses") < ring else "ring"

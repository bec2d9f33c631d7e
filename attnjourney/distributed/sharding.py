"""Which rows of a sequence lie on which rank, and the helpers that share a tensor out and put it together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ._transfer import all_gather

ORDERS = ("contiguous", "zigzag")


def check_order(order: str, name: str, length: int) -> None:
    if order not in ORDERS:
        raise ValueError(f"order: expected 'contiguous' or 'zigzag', got {order!r}")
    if order == "zigzag" and length % 2:
        raise ValueError(f"{name}: order 'zigzag' expects an even number of rows on each rank, got {length}")


def chunk_starts(order: str, length: int, rank: int, size: int) -> list[int]:
    """Where the chunks of a rank's shard of `length` rows begin in the sequence; they lie one after the other."""
    if order == "contiguous":
        return [rank * length]
    half = length // 2
    return [rank * half, (2 * size - 1 - rank) * half]


def positions(order: str, length: int, rank: int, size: int) -> Tensor:
    """The place of each row of the shard in the sequence."""
    starts = chunk_starts(order, length, rank, size)
    rows = torch.arange(length // len(starts))
    return torch.cat([start + rows for start in starts])


def all_positions(order: str, length: int, size: int) -> Tensor:
    """`positions` of the rows of all ranks, one rank after the other."""
    return torch.cat([positions(order, length, rank, size) for rank in range(size)])


def shard(x: Tensor, group: dist.ProcessGroup | None = None, order: str = "contiguous", dim: int = -2) -> Tensor:
    """This rank's part of x, which every rank has whole; differentiable (the gradient of the others' rows is 0).

    Args:
        x: its dimension `dim` is a multiple of the ranks, of twice the ranks for "zigzag".
        group: the process group, the default one by default.
        order: "contiguous": rank r has the r-th part. "zigzag": the r-th and, counted from the end, the r-th of 2 n
            parts, so that causal work is the same on every rank.
        dim: the sequence's dimension; 1 for (batch, seq) of tokens.

    Raises ValueError where the length does not divide.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    check_order(order, "x", 0)
    parts = size * (2 if order == "zigzag" else 1)
    if x.shape[dim] % parts:
        raise ValueError(f"x: order {order!r} expects a multiple of {parts} rows on {size} ranks, got {x.shape[dim]}")
    return x.index_select(dim, positions(order, x.shape[dim] // size, rank, size).to(x.device))


def unshard(x: Tensor, group: dist.ProcessGroup | None = None, order: str = "contiguous", dim: int = -2) -> Tensor:
    """The whole of what `shard` shared out, on every rank; differentiable: each rank's gradient is that of its own rows
    in its own loss, so every rank should use the whole alike or one rank alone.

    Args: as `shard`; shards of one shape and dtype.
    """
    check_order(order, "x", x.shape[dim])
    return _Unshard.apply(x, group, order, dim)


class _Unshard(Function):
    @staticmethod
    def forward(ctx, x, group, order, dim):
        ctx.group, ctx.order, ctx.dim = group, order, dim
        places = all_positions(order, x.shape[dim], dist.get_world_size(group))
        return torch.cat(all_gather(x, group).unbind(0), dim).index_select(dim, places.argsort().to(x.device))

    @staticmethod
    def backward(ctx, grad):
        return shard(grad, ctx.group, ctx.order, ctx.dim), None, None, None

"""Which rows of a sequence lie on which rank, and the helpers that share a tensor out and put it together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ._transfer import all_gather

ORDERS = ("contiguous", "zigzag")


def check_order(order: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"order: expected 'contiguous' or 'zigzag', got {order!r}")


def chunks(order: str, lengths: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """(start in the sequence, rows) of the chunks of a rank's shard, which lie one after the other in it; lengths: of
    the shards of all ranks."""
    if order == "contiguous":
        return [(sum(lengths[:rank]), lengths[rank])]
    whole, count = sum(lengths), 2 * len(lengths)
    starts = [min(i * -(-whole // count), whole) for i in range(count + 1)]
    return [(starts[i], starts[i + 1] - starts[i]) for i in (rank, count - 1 - rank)]


def shares(order: str, length: int, size: int) -> tuple[int, ...]:
    """The rows of each rank's shard as `shard` makes it: of parts of one length, of which the last ones are shorter or
    empty where it does not divide."""
    if order == "contiguous":
        part = -(-length // size)
        return tuple(max(0, min(part, length - rank * part)) for rank in range(size))
    return tuple(sum(rows for _, rows in chunks(order, (length, *[0] * (size - 1)), rank)) for rank in range(size))


def check_lengths(order: str, name: str, lengths: Sequence[int]) -> None:
    """Shards in zigzag are as `shard` makes them; contiguous ones may have any length."""
    made = shares(order, sum(lengths), len(lengths))
    if order != "contiguous" and tuple(lengths) != made:
        raise ValueError(f"{name}: order {order!r} expects {made} rows on the ranks, got {tuple(lengths)}")


def positions(order: str, lengths: Sequence[int], rank: int) -> Tensor:
    """The place of each row of the shard in the sequence; lengths: of the shards of all ranks."""
    return torch.cat([torch.arange(start, start + rows) for start, rows in chunks(order, lengths, rank)])


def all_positions(order: str, lengths: Sequence[int]) -> Tensor:
    """`positions` of the rows of all ranks, one rank after the other."""
    return torch.cat([positions(order, lengths, rank) for rank in range(len(lengths))])


def gathered_lengths(length: int, group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """Of the shards of all ranks, of which this one knows its own."""
    return all_gather(torch.tensor([length], device=device), group).flatten().tolist()


def shard(x: Tensor, group: dist.ProcessGroup | None = None, order: str = "contiguous", dim: int = -2) -> Tensor:
    """This rank's part of x, which every rank has whole; differentiable (the gradient of the others' rows is 0).

    Args:
        group: the process group, the default one by default.
        order: "contiguous": rank r has the r-th of n parts. "zigzag": the r-th and, counted from the end, the r-th of
            2 n parts, so that causal work is the same on every rank. Parts have one length, rounded up; the last ones
            are shorter or empty where it does not divide.
        dim: the sequence's dimension; 1 for (batch, seq) of tokens.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    check_order(order)
    return x.index_select(dim, positions(order, shares(order, x.shape[dim], size), rank).to(x.device))


def unshard(x: Tensor, group: dist.ProcessGroup | None = None, order: str = "contiguous", dim: int = -2) -> Tensor:
    """The whole of what `shard` shared out, on every rank; differentiable: each rank's gradient is that of its own rows
    in its own loss, so every rank should use the whole alike or one rank alone.

    Args: as `shard`; shards of one dtype, whose lengths the ranks tell each other (8 bytes).

    Raises ValueError for shards in zigzag that `shard` does not make.
    """
    check_order(order)
    return _Unshard.apply(x, group, order, dim)


class _Unshard(Function):
    @staticmethod
    def forward(ctx, x, group, order, dim):
        lengths = gathered_lengths(x.shape[dim], group, x.device)
        check_lengths(order, "x", lengths)
        ctx.arguments = group, order, dim, lengths
        padded = lengthened(x, max(lengths), dim)
        shards = [s.narrow(dim, 0, n) for s, n in zip(all_gather(padded, group).unbind(0), lengths)]
        return torch.cat(shards, dim).index_select(dim, all_positions(order, lengths).argsort().to(x.device))

    @staticmethod
    def backward(ctx, grad):
        group, order, dim, lengths = ctx.arguments
        places = positions(order, lengths, dist.get_rank(group)).to(grad.device)
        return grad.index_select(dim, places), None, None, None


def lengthened(x: Tensor, length: int, dim: int = -2) -> Tensor:
    """x with zeros behind its rows, up to that length."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros([missing if d == dim % x.dim() else n for d, n in enumerate(x.shape)])], dim)

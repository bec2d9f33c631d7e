"""Messages between the ranks of a group: all that this package sends passes through here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from ._route import Route


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes one after the other: one message, of a type that every backend sends."""
    return torch.cat([x.detach().contiguous().view(-1).view(torch.uint8) for x in tensors])


def unpack(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [x.numel() * x.element_size() for x in like]
    return [part.view(x.dtype).view(x.shape) for part, x in zip(message.split(sizes), like)]


class Exchange:
    """Messages on their way: `sends` and `receives` are (rank in the group, tensor)."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        sends: Sequence[tuple[int, Tensor]] = (),
        receives: Sequence[tuple[int, Tensor]] = (),
    ):
        group = group or dist.group.WORLD
        assert group is not None
        self.kept = (sends, receives)  # until they have arrived
        operations = [
            dist.P2POp(operation, tensor, dist.get_global_rank(group, peer), group)
            for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def travel(own: Tensor, route: Route, group: dist.ProcessGroup | None) -> Iterator[tuple[int, int, Tensor | None]]:
    """(direction, hop, message) of each step, (0, 0, own) first; None: no shard comes to this rank in that step. The
    next message is on its way while the caller works."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = True
    for direction, hops in route.directions:
        held: Tensor | None = own
        for hop in range(1, max(hops) + 1):
            arriving = torch.empty_like(own) if hops[(rank - direction * hop) % size] >= hop else None
            sends = []
            if hops[(rank - direction * (hop - 1)) % size] >= hop:
                assert held is not None
                sends = [((rank + direction) % size, held)]
            exchange = Exchange(group, sends, [] if arriving is None else [((rank - direction) % size, arriving)])
            if hop > 1:
                yield direction, hop - 1, held
            elif first:
                yield 0, 0, own
                first = False
            exchange.wait()
            held = arriving
        if max(hops):
            yield direction, max(hops), held
    if first:
        yield 0, 0, own


def all_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """x (ranks, ...): row r goes to rank r; row r of the result came from rank r."""
    x = x.contiguous()
    result = torch.empty_like(x)
    dist.all_to_all_single(result.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=group)
    return result


def all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """(ranks, ...) of x of every rank."""
    result = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(result.unbind(0)), x.contiguous(), group=group)
    return result

"""Messages between the ranks of a group: all that this package sends passes through here."""

from __future__ import annotations

import contextlib
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
    """Messages on their way: `sends` and `receives` are (rank in the group, tensor). A rank that is gone, or silent for
    the group's timeout, is a RuntimeError that names it and what failed."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        sends: Sequence[tuple[int, Tensor]] = (),
        receives: Sequence[tuple[int, Tensor]] = (),
        what: str = "ring",
    ):
        group = group or dist.group.WORLD
        assert group is not None
        self.kept = (sends, receives)  # until they have arrived
        self.what, self.rank = what, dist.get_rank(group)
        both = (dist.isend, "sending to", sends), (dist.irecv, "receiving from", receives)
        named = [(operation, verb, peer, tensor) for operation, verb, messages in both for peer, tensor in messages]
        self.steps = [f"{verb} rank {peer}" for _, verb, peer, _ in named]
        operations = [
            dist.P2POp(operation, tensor, dist.get_global_rank(group, peer), group)
            for operation, _, peer, tensor in named
        ]
        with lost(self.what, self.rank, " or ".join(self.steps)):
            self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        apart = len(self.works) == len(self.steps)  # some backends have one handle for all
        for i, work in enumerate(self.works):
            with lost(self.what, self.rank, self.steps[i] if apart else " or ".join(self.steps)):
                work.wait()


@contextlib.contextmanager
def lost(what: str, rank: int, step: str) -> Iterator[None]:
    """What a backend raises, with the collective, this rank and the one that it waited for."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RuntimeError(f"{what}: {step} failed on rank {rank} of the group: {reason}") from error


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
    if x.is_cuda:
        with lost("all_to_all", dist.get_rank(group), "the collective"):
            dist.all_to_all_single(result.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=group)
        return result
    return _exchanged("all_to_all", list(x.unbind(0)), result, group)


def all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """(ranks, ...) of x of every rank."""
    size = dist.get_world_size(group)
    result = x.new_empty((size, *x.shape))
    if x.is_cuda:
        with lost("all_gather", dist.get_rank(group), "the collective"):
            dist.all_gather(list(result.unbind(0)), x.contiguous(), group=group)
        return result
    return _exchanged("all_gather", [x.contiguous()] * size, result, group)


def _exchanged(what: str, sends: Sequence[Tensor], result: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """sends[r] goes to rank r; result[r] comes from there. As messages of two ranks, as gloo has no other ones, so that
    what fails is known by its rank."""
    rank = dist.get_rank(group)
    result[rank] = sends[rank]
    others = [r for r in range(len(sends)) if r != rank and result[r].numel()]

    def as_bytes(x: Tensor) -> Tensor:
        return x.detach().reshape(-1).view(torch.uint8)

    receives = [(r, as_bytes(result[r])) for r in others]
    Exchange(group, [(r, as_bytes(sends[r])) for r in others], receives, what).wait()
    return result

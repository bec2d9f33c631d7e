"""Attention of this rank's rows with keys and values that come by, as one autograd node: by a ring or all-gathered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .._dtypes import accumulation_dtype
from ._parts import Layout, Visibility, parts
from ._route import Route, route_of
from ._rows import KEY, QUERY, SLOPES, VALUE, Calls, Rows, Scores, sinks_gradient
from ._transfer import Exchange, all_gather, all_to_all, pack, travel, unpack


@dataclass(frozen=True)
class Stream:
    """One call: who sees what of whom, and how keys and values get there."""

    group: dist.ProcessGroup | None
    layout: Layout
    seen: Visibility
    scores: Scores
    lead: tuple[int, ...]  # the leading dimensions of the result
    gathered: bool  # all shards at once, not one after the other

    @property
    def route(self) -> Route:
        return route_of(self.layout, self.seen)


class StreamedAttention(Function):
    """(out, lse) of stream, query, key, value, sinks, alibi_slopes."""

    @staticmethod
    def forward(ctx, stream, query, key, value, sinks, alibi_slopes):
        rank = dist.get_rank(stream.group)
        rows, calls = Rows(stream.lead, query, value, sinks), Calls(stream.scores, alibi_slopes)
        for source, message in _messages(stream, pack([key, value])):
            k, v = unpack(message, [key, value])
            for part in parts(stream.layout, rank, source, stream.seen):
                calls.forward(rows, part, query, k, v)
        out, lse, stats = rows.results()
        ctx.save_for_backward(query, key, value, sinks, alibi_slopes, out, lse, stats)
        ctx.stream = stream
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse):
        query, key, value, sinks, slopes, out, lse, stats = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        needs = dict(zip((QUERY, KEY, VALUE, SLOPES), [*ctx.needs_input_grad[1:4], ctx.needs_input_grad[5]]))
        need = sum(bit for bit, needed in needs.items() if needed)
        work = _Backward(ctx.stream, need, grad_out, grad_lse, query, key, value, slopes, (out, lse, stats))
        grad_key = grad_value = None
        if need:
            total = work.gathered() if ctx.stream.gathered else work.ring()
            if total is not None:
                grad_key, grad_value = (
                    x.view(like.shape).to(like.dtype) if needed else None
                    for x, like, needed in zip(
                        total.split([key.numel(), value.numel()]), (key, value), ctx.needs_input_grad[2:4]
                    )
                )
        return (
            None,
            work.grad_query.to(query.dtype) if need & QUERY else None,
            grad_key,
            grad_value,
            sinks_gradient(sinks, grad_out, grad_lse, out, stats) if ctx.needs_input_grad[4] else None,
            work.grad_slopes.to(slopes.dtype) if need & SLOPES else None,
        )


def _messages(stream: Stream, own: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(rank it is from, its keys and values), this rank's own first."""
    rank, size = dist.get_rank(stream.group), stream.layout.size
    if stream.gathered:
        everything = all_gather(own, stream.group)
        for hop in range(size):
            source = (rank - hop) % size
            yield source, everything[source]
        return
    for direction, hop, message in travel(own, stream.route, stream.group):
        if message is not None:
            yield (rank - direction * hop) % size, message


class _Backward:
    """The gradients of one rank's rows; those of keys and values are sums over ranks, in the accumulation dtype."""

    def __init__(self, stream, need, grad_out, grad_lse, query, key, value, slopes, results):
        self.stream, self.need, self.of_keys = stream, need, bool(need & (KEY | VALUE))
        self.rank = dist.get_rank(stream.group)
        self.grad_out, self.grad_lse, self.results = grad_out, grad_lse, results
        self.query, self.key, self.value = query, key, value
        self.calls = Calls(stream.scores, slopes)
        self.wide = accumulation_dtype(query.dtype)
        self.grad_query = torch.zeros_like(query, dtype=self.wide)
        self.grad_slopes = query.new_zeros(() if slopes is None else slopes.shape, dtype=self.wide)

    def empty(self) -> Tensor:
        """Room for the gradients of a shard's keys and values."""
        return self.query.new_empty(self.key.numel() + self.value.numel(), dtype=self.wide)

    def work(self, source: int, message: Tensor) -> Tensor | None:
        """Adds what the rows and the keys of `source` give; the gradients of these keys and values."""
        key, value = unpack(message, [self.key, self.value])
        total = self.empty().zero_() if self.of_keys else None
        for part in parts(self.stream.layout, self.rank, source, self.stream.seen):
            of_query, of_key, of_value, of_slopes = self.calls.backward(
                part, self.need, self.grad_out, self.grad_lse, self.query, key, value, *self.results
            )
            if self.need & QUERY:
                self.grad_query[..., part.row : part.row_end, :] += of_query
            if self.need & SLOPES:
                self.grad_slopes += of_slopes
            if total is not None:
                grads = total.split([key.numel(), value.numel()])
                for bit, x, like, gradient in ((KEY, grads[0], key, of_key), (VALUE, grads[1], value, of_value)):
                    if self.need & bit:
                        x.view(like.shape)[..., part.key : part.key_end, :] += gradient
        return total

    def gathered(self) -> Tensor | None:
        size = self.stream.layout.size
        totals = self.query.new_empty((size, self.key.numel() + self.value.numel()), dtype=self.wide)
        for source, message in _messages(self.stream, pack([self.key, self.value])):
            total = self.work(source, message)
            if total is not None:
                totals[source] = total
        return all_to_all(totals, self.stream.group).sum(0) if self.of_keys else None

    def ring(self) -> Tensor | None:
        """Gradients travel with their shard, one step behind it, and from its last rank straight home."""
        group, own, homes = self.stream.group, self.empty(), []
        coming: Tensor | None = None
        exchange = Exchange(group)
        for direction, hop, message in travel(pack([self.key, self.value]), self.stream.route, group):
            source = (self.rank - direction * hop) % self.stream.layout.size
            total = None if message is None else self.work(source, message)
            if not self.of_keys:
                continue
            if hop == 0:
                assert total is not None
                own = total
            else:
                exchange.wait()
                if coming is not None:
                    assert total is not None
                    total += coming
                coming, home, exchange = self._hand_on(direction, hop, total)
                homes += [] if home is None else [home]
        exchange.wait()
        for home in homes:
            own += home
        return own if self.of_keys else None

    def _hand_on(self, direction: int, hop: int, total: Tensor | None) -> tuple[Tensor | None, Tensor | None, Exchange]:
        """Sends the gradients of the shard of this step on; (those of the next step's, this rank's own, the messages)
        that are on their way."""
        size, rank = self.stream.layout.size, self.rank
        hops = dict(self.stream.route.directions)[direction]
        source, following = (rank - direction * hop) % size, (rank - direction * (hop + 1)) % size
        sends = [] if total is None else [((rank + direction) % size if hops[source] > hop else source, total)]
        coming = self.empty() if hops[following] > hop else None
        home = self.empty() if hops[rank] == hop else None
        froms = ((rank - direction) % size, coming), ((rank + direction * hop) % size, home)
        return coming, home, Exchange(self.stream.group, sends, [(peer, x) for peer, x in froms if x is not None])

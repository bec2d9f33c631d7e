"""Attention of this rank's rows with keys and values that come by, as one autograd node: by a ring or all-gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .._dtypes import accumulation_dtype
from ..block_mask import BlockMask
from ._parts import Layout, Visibility, parts
from ._route import Route, route_of
from ._rows import KEY, MASK, QUERY, SLOPES, VALUE, Calls, Rows, Scores, sinks_gradient
from ._transfer import Exchange, all_gather, all_to_all, pack, travel, unpack

SENT = 2  # tensors of a shard
Expand = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Stream:
    """One call: who sees what of whom, and how keys and values get there."""

    group: dist.ProcessGroup | None
    layout: Layout
    seen: Visibility
    scores: Scores
    lead: tuple[int, ...]  # the leading dimensions of the result
    gathered: bool  # all shards at once, not one after the other
    v_dim: int
    blocks: BlockMask | None = None  # of the whole
    expand: Expand | None = None  # keys and values of what is sent, where that is something else

    def keys(self, sent: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(key, value) of a shard."""
        if self.expand is not None:
            return self.expand(*sent, *weights)
        key, value = sent
        return key, value

    @property
    def route(self) -> Route:
        return route_of(self.layout, self.seen)


class StreamedAttention(Function):
    """(out, lse) of stream, query, sinks, alibi_slopes, attn_mask, and of two tensors that are sent: key and value, or
    what stream.expand makes these of, beside tensors that every rank has (weights)."""

    @staticmethod
    def forward(ctx, stream, query, sinks, alibi_slopes, attn_mask, *tensors):
        out, lse, stats = attended(stream, query, sinks, alibi_slopes, attn_mask, *tensors)
        ctx.save_for_backward(query, sinks, alibi_slopes, attn_mask, out, lse, stats, *tensors)
        ctx.stream = stream
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse):
        query, sinks, slopes, mask, out, lse, stats, *tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        _, of_query, of_sinks, of_slopes, of_mask, *of_tensors = ctx.needs_input_grad
        need = (QUERY if of_query else 0) | (SLOPES if of_slopes else 0) | (MASK if of_mask else 0)
        if ctx.stream.expand is not None:
            need |= KEY | VALUE if any(of_tensors) else 0
        else:
            need |= (KEY if of_tensors[0] else 0) | (VALUE if of_tensors[1] else 0)
        work = Backward(ctx.stream, need, grad_out, grad_lse, query, tensors, slopes, mask, (out, lse, stats))
        found = work.of_tensors()
        gradients = [g.to(x.dtype) if n else None for g, x, n in zip(found, tensors, of_tensors)]
        return (
            None,
            work.grad_query.to(query.dtype) if need & QUERY else None,
            sinks_gradient(sinks, grad_out, grad_lse, out, stats) if of_sinks else None,
            work.grad_slopes.to(slopes.dtype) if need & SLOPES else None,
            work.grad_mask.to(mask.dtype) if need & MASK else None,
            *(gradients or [None] * len(tensors)),
        )


def attended(
    stream: Stream, query: Tensor, sinks: Tensor | None, slopes: Tensor | None, mask: Tensor | None, *tensors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, stats) of this rank's rows."""
    rank = dist.get_rank(stream.group)
    sent, weights = tensors[:SENT], tensors[SENT:]
    rows = Rows(stream.lead, query, stream.v_dim, sinks)
    calls = Calls(stream.scores, slopes, mask if stream.blocks is None else stream.blocks)
    for source, message in _messages(stream, pack(sent)):
        k, v = stream.keys(unpack(message, sent), weights)
        for part in parts(stream.layout, rank, source, stream.seen):
            calls.forward(rows, part, query, k, v)
    return rows.results()


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


class Backward:
    """The gradients of one rank's rows; those of keys and values are sums over ranks, in the accumulation dtype."""

    def __init__(self, stream, need, grad_out, grad_lse, query, tensors, slopes, mask, results):
        self.stream, self.need, self.of_keys = stream, need, bool(need & (KEY | VALUE))
        self.rank = dist.get_rank(stream.group)
        self.grad_out, self.grad_lse, self.results = grad_out, grad_lse, results
        self.query, self.sent, self.weights = query, tensors[:SENT], tensors[SENT:]
        self.calls = Calls(stream.scores, slopes, mask if stream.blocks is None else stream.blocks)
        self.wide = accumulation_dtype(query.dtype)
        self.grad_query = torch.zeros_like(query, dtype=self.wide)
        self.grad_slopes = query.new_zeros(() if slopes is None else slopes.shape, dtype=self.wide)
        self.grad_mask = query.new_zeros(mask.shape if need & MASK else (), dtype=self.wide)
        self.grad_weights = [torch.zeros_like(x, dtype=self.wide) for x in self.weights]

    def of_tensors(self) -> list[Tensor]:
        """Does the work; the gradients of the tensors in the accumulation dtype, none where no key's is wanted."""
        total = None
        if self.need:
            total = self.gathered() if self.stream.gathered else self.ring()
        return [] if total is None else [*self.split(total), *self.grad_weights]

    def empty(self) -> Tensor:
        """Room for the gradients of what a shard sends."""
        return self.query.new_empty(sum(x.numel() for x in self.sent), dtype=self.wide)

    def split(self, total: Tensor) -> list[Tensor]:
        return [g.view(x.shape) for g, x in zip(total.split([x.numel() for x in self.sent]), self.sent)]

    def work(self, source: int, message: Tensor) -> Tensor | None:
        """Adds what the rows and the keys of `source` give; the gradients of what that has sent."""
        leaves = [*unpack(message, self.sent), *self.weights]
        if self.stream.expand is not None:
            leaves = [x.detach().requires_grad_() for x in leaves]
        with torch.set_grad_enabled(self.stream.expand is not None and self.of_keys):
            key, value = self.stream.keys(leaves[:SENT], leaves[SENT:])
        total = self.empty().zero_() if self.of_keys else None
        grads = self._room(total, key, value)
        for part in parts(self.stream.layout, self.rank, source, self.stream.seen):
            found = self.calls.backward(
                part, self.need, self.grad_out, self.grad_lse, self.query, key.detach(), value.detach(), *self.results
            )
            if self.need & QUERY:
                self.grad_query[..., part.row : part.row_end, :] += found[QUERY]
            if self.need & SLOPES:
                self.grad_slopes += found[SLOPES]
            if self.need & MASK:
                of_mask = self.calls.of_mask(part, self.grad_mask)
                of_mask.add_(found[MASK].sum_to_size(of_mask.shape))
            for bit, x in zip((KEY, VALUE), grads):
                if self.need & bit:
                    x[..., part.key : part.key_end, :] += found[bit]
        if total is not None and self.stream.expand is not None:
            through = torch.autograd.grad([key, value], leaves, [g.to(key.dtype) for g in grads])
            for x, gradient in zip([*self.split(total), *self.grad_weights], through):
                x += gradient
        return total

    def _room(self, total: Tensor | None, key: Tensor, value: Tensor) -> list[Tensor]:
        """For the gradients of a shard's keys and values: what is sent home, unless these are made of something."""
        if total is None:
            return []
        if self.stream.expand is None:
            return self.split(total)
        return [torch.zeros_like(x, dtype=self.wide) for x in (key, value)]

    def gathered(self) -> Tensor | None:
        size = self.stream.layout.size
        totals = torch.stack([self.empty()] * size)
        for source, message in _messages(self.stream, pack(self.sent)):
            total = self.work(source, message)
            if total is not None:
                totals[source] = total
        return all_to_all(totals, self.stream.group).sum(0) if self.of_keys else None

    def ring(self) -> Tensor | None:
        """Gradients travel with their shard, one step behind it, and from its last rank straight home."""
        group, own, homes = self.stream.group, self.empty(), []
        coming: Tensor | None = None
        exchange = Exchange(group)
        for direction, hop, message in travel(pack(self.sent), self.stream.route, group):
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

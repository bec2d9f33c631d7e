"""Infini-attention over a sequence whose segments lie on the ranks of a process group: memories alone are sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..ops.infini_attention import Memory, check_segments, gated, local_attention, recall, write_memory
from ._agreement import REFUSALS, agree, described
from ._transfer import Exchange
from .ring_linear_attention import OfOthers, packed, unpacked


def ring_infini_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    segment_length: int,
    memory: Memory | None = None,
    update: str = "linear",
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    truncate: int | None = None,
) -> Tensor:
    """attnjourney.infini_attention over the whole sequence, of which each rank of the group has whole segments, in the
    order of ranks, and gets the rows of these (Munkhdalai et al. 2024, arXiv 2404.07143). Local attention needs nothing
    of other ranks. What is sent does not depend on the length: with update "linear" and without `truncate` each rank's
    sums, (B, Hk, D, Dv + 1) to all others, and their gradients in backward. Else the memory itself goes from each rank
    to the next, one after the other, and its gradient back.

    Args:
        query, key, value: this rank's rows (B, Hq, N, D), (B, Hk, N, D), (B, Hk, N, Dv), N a multiple of
            segment_length on all ranks but the last one that has rows. Shards may differ in length and be empty.
        group: the process group, the default one by default.
        memory: of the segments before the first rank's first one, the same on every rank. A rank's gradient is that of
            its rows.
        cos, sin: this rank's rows of the tables.
        the others: as in attnjourney.infini_attention; the gradient of beta is that of this rank's rows.

    Returns: (B, Hq, N, Dv) in query's dtype.

    Raises, on every rank and before memories are sent:
        ValueError: an argument that does not fit, or differs between ranks; names it, and the two ranks.
        RuntimeError: a dtype that does not fit, or another rank that refused its arguments.
        NotImplementedError: differentiated twice, or in forward mode.
    """
    error: Exception | None = None
    call: dict[str, str] = {}
    try:
        check_segments(query, key, value, beta, segment_length, memory, update, truncate)
        own = dict(query=query, key=key, value=value, beta=beta, cos=cos is None, sin=sin is None)
        given = {} if memory is None else {"memory[0]": memory[0], "memory[1]": memory[1]}
        options = dict(segment_length=segment_length, update=update, truncate=truncate)
        call = described(own | given | options, ("query", "key", "value"))
        start = memory if memory is not None else write_memory(key[:, :, :0], value[:, :, :0], None)
    except REFUSALS as refused:
        error = refused
    (lengths,) = agree("ring_infini_attention", call, error, group, query.device, [query.shape[-2]])
    _check_lengths(lengths, segment_length)
    rank = dist.get_rank(group)
    first = sum(lengths[:rank]) // segment_length
    if update == "linear" and truncate is None:
        before = OfOthers.apply(packed(*write_memory(key, value, None)), group, True) + packed(*start)
        recalled, _ = recall(query, key, value, segment_length, unpacked(before), update, None, False)
    else:
        last = rank == len(lengths) - 1
        begin, token = (packed(*start), None) if rank == 0 else _OfRankBefore.apply(packed(*start), key, value, group)
        recalled, end = recall(
            query, key, value, segment_length, unpacked(begin), update, truncate, not last, first
        )  # fmt: skip
        recalled = _ForRankBehind.apply(recalled, None if last or end is None else packed(*end), token, group)
    return gated(local_attention(query, key, value, segment_length, cos, sin), recalled, beta)


def _check_lengths(lengths: list[int], segment: int) -> None:
    with_rows = [rank for rank, n in enumerate(lengths) if n]
    if any(lengths[rank] % segment for rank in with_rows[:-1]):
        raise ValueError(f"query: expected shards of whole segments of {segment} rows but for the last, got {lengths}")


class _OfRankBefore(Function):
    """(memory, token): what the rank before sends. The token has no value: _ForRankBehind takes it, so that a gradient
    is sent back even where nothing of the memory is differentiated."""

    @staticmethod
    def forward(ctx, like, key, value, group):
        ctx.group, ctx.source = group, dist.get_rank(group) - 1
        memory = torch.empty_like(like)
        Exchange(group, receives=[(ctx.source, memory)], what="ring_infini_attention").wait()
        return memory, like.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        Exchange(ctx.group, sends=[(ctx.source, grad.contiguous())], what="ring_infini_attention").wait()
        return None, None, None, None


class _ForRankBehind(Function):
    """Sends the memory, where there is one, to the next rank; rows pass through."""

    @staticmethod
    def forward(ctx, rows, memory, token, group):
        ctx.group, ctx.target = group, dist.get_rank(group) + 1
        ctx.like = None if memory is None else torch.empty_like(memory)
        ctx.token = None if token is None else torch.zeros_like(token)
        if memory is not None:
            Exchange(group, [(ctx.target, memory)], what="ring_infini_attention").wait()
        return rows.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        of_memory = ctx.like
        if of_memory is not None:
            Exchange(ctx.group, receives=[(ctx.target, of_memory)], what="ring_infini_attention").wait()
        return grad, of_memory, ctx.token, None

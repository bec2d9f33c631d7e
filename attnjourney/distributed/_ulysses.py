"""All heads of some rows for some heads of all rows, and back: attention between the two is the ordinary one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..block_mask import BlockMask
from ..ops.block_attention import block_attention
from ._parts import Layout
from ._transfer import all_to_all
from .sharding import all_positions, lengthened, positions


class _Swap(Function):
    """Shards of dimension `joined` become whole, dimension `split` is shared out."""

    @staticmethod
    def forward(ctx, x, group, split, joined):
        ctx.arguments = group, split, joined
        size = dist.get_world_size(group)
        received = all_to_all(torch.stack(x.chunk(size, split)), group)
        return torch.cat(received.unbind(0), joined)

    @staticmethod
    def backward(ctx, grad):
        group, split, joined = ctx.arguments
        return _Swap.apply(grad, group, joined, split), None, None, None


def heads_for_rows(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """(..., H, L, E) -> (..., H / ranks, L * ranks, E), the rows in the order of ranks."""
    return _Swap.apply(x, group, x.dim() - 3, x.dim() - 2)


def rows_for_heads(out: Tensor, lse: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The way back of results."""
    out, lse = (_Swap.apply(x, group, x.dim() - 2, x.dim() - 3) for x in (out, lse.unsqueeze(-1)))
    return out, lse.squeeze(-1)


def own_heads(x: Tensor | None, group: dist.ProcessGroup | None) -> Tensor | None:
    """This rank's part of numbers by heads (Hq,) or (B, Hq)."""
    return None if x is None else x.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)]


def mask_by_heads(
    mask: Tensor, one_row: bool, query: Tensor, group: dist.ProcessGroup | None, swapped: Callable[[Tensor], Tensor]
) -> Tensor:
    """A mask of this rank's rows of query and all heads as one of all rows and this rank's heads. one_row: of one row
    for all, which is there already. swapped: what makes heads of some rows all rows of some heads."""
    mask = mask.reshape((1,) * (query.dim() - mask.dim()) + mask.shape)
    heads, ranks = mask.shape[-3], dist.get_world_size(group)
    if one_row:
        return mask if heads == 1 else mask.chunk(ranks, -3)[dist.get_rank(group)]
    return swapped(mask.expand(*mask.shape[:-3], heads if heads > 1 else ranks, query.shape[-2], mask.shape[-1]))


def ulysses(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask | None, one_row: bool, layout: Layout,
    group: dist.ProcessGroup | None, of_whole: tuple[int, int] | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of this rank's rows; sinks and slopes of all heads, a BlockMask of the whole, or a mask of this rank's
    rows (one_row: of one for all). of_whole: the first of these heads and the number of those that they are part of.
    options: of the operator."""
    size, rank, heads = layout.size, dist.get_rank(group), query.shape[-3]
    first, all_heads = of_whole or (0, heads)
    own = {name: own_heads(options[name], group) for name in ("sinks", "alibi_slopes")}
    options = {**options, **own, "origin": [0, 0, first + rank * heads // size, all_heads]}
    in_order = layout.order == "contiguous" and len({*layout.q_lens}) == len({*layout.kv_lens}) == 1

    def whole(x: Tensor, lengths: Sequence[int]) -> Tensor:
        x = heads_for_rows(lengthened(x, max(lengths)), group)
        return x if in_order else x.index_select(-2, _places(layout.order, lengths).to(x.device))

    q, k, v = whole(query, layout.q_lens), whole(key, layout.kv_lens), whole(value, layout.kv_lens)
    p, is_causal = options.pop("dropout_p"), options.pop("is_causal")
    if isinstance(mask, BlockMask):
        own_mask = mask.of_heads(rank * heads // size, heads // size)
        out, lse = block_attention(q, k, v, own_mask, p, is_causal, True, options)
    else:
        if mask is not None:
            mask = mask_by_heads(mask, one_row, query, group, lambda rows: whole(rows, layout.q_lens))
        out, lse = torch.ops.attnjourney.attention_with_lse(q, k, v, mask, p, is_causal, **options)
    if not in_order:  # back in that of ranks; rows that only fill a shard up are copies of the first one
        places = _padded(layout.order, layout.q_lens).to(query.device)
        out, lse = out.index_select(-2, places), lse.index_select(-1, places)
    out, lse = rows_for_heads(out, lse, group)
    return out[..., : query.shape[-2], :], lse[..., : query.shape[-2]]


def _places(order: str, lengths: Sequence[int]) -> Tensor:
    """Where each row of the sequence lies among the shards of all ranks, all filled up to one length."""
    most = max(lengths)
    there = torch.cat([torch.arange(rank * most, rank * most + n) for rank, n in enumerate(lengths)])
    return there[all_positions(order, lengths).argsort()]


def _padded(order: str, lengths: Sequence[int]) -> Tensor:
    """The position of each row of the shards of all ranks, filled up to one length by position 0."""
    most = max(lengths)
    shards = (positions(order, lengths, rank) for rank in range(len(lengths)))
    return torch.cat([torch.nn.functional.pad(p, (0, most - len(p))) for p in shards])

"""All heads of some rows for some heads of all rows, and back: attention between the two is the ordinary one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..ops import attention
from ._transfer import all_to_all
from .sharding import all_positions


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


def ulysses(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup | None, order: str, is_causal: bool,
    per_head: dict[str, Tensor | None], options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of this rank's rows; per_head: sinks and slopes of all heads."""
    size = dist.get_world_size(group)
    whole = []
    for x in (query, key, value):
        joined = heads_for_rows(x, group)
        if order != "contiguous":
            joined = joined.index_select(-2, all_positions(order, x.shape[-2], size).argsort().to(x.device))
        whole.append(joined)
    own: Any = {name: own_heads(x, group) for name, x in per_head.items()}
    out, lse = attention(whole[0], whole[1], whole[2], is_causal=is_causal, return_lse=True, **options, **own)
    if order != "contiguous":
        places = all_positions(order, query.shape[-2], size).to(query.device)
        out, lse = out.index_select(-2, places), lse.index_select(-1, places)
    return rows_for_heads(out, lse, group)

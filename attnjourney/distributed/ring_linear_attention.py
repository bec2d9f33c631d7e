"""Linear attention over a sequence whose rows lie on the ranks of a process group: states alone are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..ops import linear_attention
from ..ops.linear_attention import State
from ._agreement import REFUSALS, agree, described
from ._transfer import all_gather


def ring_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    feature_map: str | Callable[[Tensor], Tensor] | None = "elu+1",
    is_causal: bool = True,
    scale: float | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
    key_padding_mask: Tensor | None = None,
    initial_state: State | None = None,
) -> Tensor:
    """attnjourney.linear_attention over the whole sequence, of which each rank of the group has a shard, in the order
    of ranks, and gets the rows of its shard (Katharopoulos et al. 2020, arXiv 2006.16236; states passed between ranks
    as in LASP-2, arXiv 2502.07563). What is sent does not depend on the length: each rank's sums, (B, Hk, D, Dv) and
    (B, Hk, D), all-gathered, and their gradients in backward.

    Args:
        query: this rank's rows (B, Hq, L, D). Shards may differ in length and be empty.
        key, value: this rank's keys (B, Hk, S, D) and values (B, Hk, S, Dv); S = L if is_causal.
        group: the process group, the default one by default.
        key_padding_mask: (B, S) bool, True where a key of this rank does not exist.
        initial_state: as in attnjourney.linear_attention, the state before the first rank's first key, the same on
            every rank. A rank's gradient is that of its rows.
        the others: as in attnjourney.linear_attention.

    Returns: (B, Hq, L, Dv) in query's dtype.

    Raises, on every rank and before states are sent:
        ValueError: an argument that does not fit, or differs between ranks; names it, and the two ranks.
        RuntimeError: a dtype that does not fit, or another rank that refused its arguments.
        NotImplementedError: differentiated twice, or in forward mode.
    """
    options: Any = dict(feature_map=feature_map, is_causal=is_causal, scale=scale, normalize=normalize, eps=eps)
    own = dict(query=query, key=key, value=value)
    error: Exception | None = None
    call: dict[str, str] = {}
    state: State = query, None
    try:
        apart = {name: x for name, x in options.items() if not callable(x)}
        call = described({**{name: x[:, :, :0] for name, x in own.items()}, **apart})
        # whatever does not fit is refused here
        linear_attention(
            query[:, :, :0],
            key[:, :, :0],
            value[:, :, :0],
            key_padding_mask=None,
            initial_state=initial_state,
            **options,
        )
        _, state = linear_attention(
            query[:, :, :0], key, value, key_padding_mask=key_padding_mask, return_state=True,
            **{**options, "is_causal": False},
        )  # fmt: skip
    except REFUSALS as refused:
        error = refused
    agree("ring_linear_attention", call, error, group, query.device)
    matrix, normalizer = state
    first: list[Tensor | None]
    if normalizer is None:
        first = [OfOthers.apply(matrix, group, is_causal), None]
    else:
        first = list(unpacked(OfOthers.apply(packed(matrix, normalizer), group, is_causal)))
    if initial_state is not None:
        first = [x if x is None or y is None else x + y for x, y in zip(first, initial_state)]
    whole: Any = tuple(first)
    return linear_attention(query, key, value, key_padding_mask=key_padding_mask, initial_state=whole, **options)


def packed(matrix: Tensor, normalizer: Tensor) -> Tensor:
    """(B, Hk, D, Dv) and (B, Hk, D) as (B, Hk, D, Dv + 1)."""
    return torch.cat([matrix, normalizer.unsqueeze(-1)], -1)


def unpacked(state: Tensor) -> tuple[Tensor, Tensor]:
    return state[..., :-1].contiguous(), state[..., -1].contiguous()


class OfOthers(Function):
    """The sum of the states of the ranks before this one, or of all others."""

    @staticmethod
    def forward(ctx, state, group, before):
        ctx.arguments = group, before
        rank, states = dist.get_rank(group), all_gather(state, group)
        return _sum(states, range(rank) if before else [r for r in range(len(states)) if r != rank])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        group, before = ctx.arguments
        rank, grads = dist.get_rank(group), all_gather(grad, group)
        later = range(rank + 1, len(grads)) if before else [r for r in range(len(grads)) if r != rank]
        return _sum(grads, later), None, None


def _sum(states: Tensor, ranks: Any) -> Tensor:
    """Of those ranks, in their order."""
    total = torch.zeros_like(states[0])
    for rank in ranks:
        total += states[rank]
    return total

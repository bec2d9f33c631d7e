"""A cache whose tokens lie on the ranks of a process group: prompts by a ring, steps by one merge of all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._dtypes import accumulation_dtype
from ..nn.cache import KVCache
from ._transfer import lost
from .ring_attention import ring_attention
from .sharding import gathered_lengths, positions


class ShardedKVCache:
    """Keys and values of every sequence, each token on one rank of the group; attention over them is computed where
    they lie and merged by one maximum and one sum (Tree Attention, arXiv 2408.04093). For inference.

    Args:
        batch, num_kv_heads, head_dim, v_head_dim, dtype, device: as KVCache of attnjourney.nn.cache.
        capacity: tokens of a sequence on all ranks together.
        group: the process group, the default one by default.

    Attributes:
        lengths: (batch,) int64, tokens of each sequence on all ranks.
        local: KVCache of this rank's tokens, of ceil(capacity / ranks).

    Every rank makes the same calls, with the same tensors but in `prefill`.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        self.group, self.capacity = group, capacity
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        room = math.ceil(capacity / self.size)
        self.local = KVCache(batch, num_kv_heads, room, head_dim, v_head_dim, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.owner = torch.full((batch, capacity), -1, dtype=torch.int64, device=device)  # of each token: its rank

    @torch.no_grad()
    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, *, order: str = "contiguous", **options: Any
    ) -> Tensor:
        """Puts a prompt into the empty cache and attends with its queries, causally.

        Args:
            query, key, value: this rank's shards (batch, heads, N / ranks, dim), made by `shard`.
            order, options: as in ring_attention; scale, softcap, sinks, scheme.

        Returns: this rank's rows, (batch, num_heads, N / ranks, v_head_dim).

        Raises ValueError for a cache that is not empty or too small, and what ring_attention raises.
        """
        lengths = gathered_lengths(key.shape[-2], self.group, key.device)
        count = sum(lengths)
        if self.lengths.any() or count > self.capacity:
            held = int(self.lengths.max())
            raise ValueError(f"key: expected an empty cache and at most {self.capacity} tokens, got {held} and {count}")
        out = ring_attention(
            query, key, value, group=self.group, order=order, is_causal=True, enable_gqa=True, **options
        )
        self.local.append(key, value)
        self.lengths.fill_(count)
        for rank in range(self.size):
            self.owner[:, positions(order, lengths, rank).to(self.owner.device)] = rank
        return out

    @torch.no_grad()
    def step(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Adds one token to every sequence, on the rank that has fewest of it, and attends with its query: `attend`.

        Args:
            query: (batch, num_heads, 1, head_dim), the same on every rank, as the others.
            key: (batch, num_kv_heads, 1, head_dim). value: (batch, num_kv_heads, 1, v_head_dim).

        Raises ValueError for more than one token, or where the cache is full.
        """
        if key.shape[-2] != 1:
            raise ValueError(f"key: expected one token, got shape {tuple(key.shape)}")
        full = int(self.lengths.max())
        if full >= self.capacity:
            raise ValueError(f"key: expected at most {self.capacity} tokens, got {full + 1}")
        chosen = self._held().argmin(0)
        self.local.append(key, value, (chosen == self.rank).long())
        self.owner.scatter_(1, self.lengths.unsqueeze(1), chosen.unsqueeze(1))
        self.lengths += 1
        return self.attend(query, **options)

    @torch.no_grad()
    def attend(
        self, query: Tensor, *, scale: float | None = None, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of queries over all tokens: each row sees every one.

        Args:
            query: (batch, num_heads, N, head_dim), the same on every rank.
            scale, softcap, sinks: as in attnjourney.decode.

        Returns: (batch, num_heads, N, v_head_dim), the same on every rank; 0 where there is no token.

        Sent: lse (batch, num_heads, N), then as many rows of v_head_dim + 1 numbers, both in float32 (float64 for
        float64) and by all-reduce.
        """
        wide = accumulation_dtype(query.dtype)
        own = sinks if self.rank == 0 else None  # it joins the denominator once
        out, lse = self.local.attend(query, is_causal=False, scale=scale, softcap=softcap, sinks=own, return_lse=True)
        top = lse.clone()
        self._reduce(top, dist.ReduceOp.MAX)
        weight = (lse - top.masked_fill(top == -math.inf, 0.0)).exp().unsqueeze(-1)
        sums = torch.cat([out.to(wide) * weight, weight], -1)
        self._reduce(sums, dist.ReduceOp.SUM)
        total = sums[..., -1:]
        return (sums[..., :-1] / total.masked_fill(total == 0, 1.0)).to(query.dtype)

    def _reduce(self, x: Tensor, operation: Any) -> None:
        with lost("all_reduce", self.rank, "the collective"):
            dist.all_reduce(x, operation, group=self.group)

    def _held(self) -> Tensor:
        """(ranks, batch): how many tokens of each sequence each rank has."""
        ranks = torch.arange(self.size, device=self.owner.device)
        there = torch.arange(self.capacity, device=self.owner.device) < self.lengths.unsqueeze(1)
        return ((self.owner == ranks[:, None, None]) & there).sum(-1)

    def truncate(self, lengths: Tensor | int) -> None:
        """Forgets all but the first lengths[b] tokens of each sequence. lengths: (batch,), or one int for all; from 0
        to the present length, else ValueError."""
        new = torch.full_like(self.lengths, lengths) if isinstance(lengths, int) else lengths.to(self.lengths)
        if new.shape != self.lengths.shape or bool(((new < 0) | (new > self.lengths)).any()):
            raise ValueError(f"lengths: expected numbers from 0 to {self.lengths.tolist()}, got {new.tolist()}")
        self.lengths.copy_(new)
        self.local.truncate(self._held()[self.rank])

    def reorder(self, batch_index: Tensor) -> None:
        """Sequence b becomes what sequence batch_index[b] was. batch_index: (batch,) int64."""
        self.local.reorder(batch_index)
        self.lengths.copy_(self.lengths[batch_index])
        self.owner.copy_(self.owner[batch_index])

    def reset(self) -> None:
        """Empties the cache."""
        self.local.reset()
        self.lengths.zero_()

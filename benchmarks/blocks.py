"""The pattern of blocks of the cases with mask "bigbird" (Zaheer et al. 2020, arXiv 2007.14062)."""

from __future__ import annotations

import functools

import torch


@functools.cache
def bigbird(rows: int, keys: int, window: int = 3, global_blocks: int = 2, random_blocks: int = 3) -> torch.Tensor:
    """bool (rows, keys) of blocks: a window, global tokens both ways, random blocks in every row."""
    row, key = torch.arange(rows)[:, None], torch.arange(keys)
    seen = ((row - key).abs() <= window // 2) | (row < global_blocks) | (key < global_blocks)
    chance = torch.rand(rows, keys, generator=torch.Generator().manual_seed(0))
    return seen | (chance.argsort(-1).argsort(-1) < random_blocks)


def of_case(case) -> torch.Tensor:
    return bigbird(-(-case.q_len // case.extent), -(-case.kv_len // case.extent))


def dense(case) -> torch.Tensor:
    """bool (1, 1, q_len, kv_len)."""
    full = of_case(case).repeat_interleave(case.extent, 0).repeat_interleave(case.extent, 1)
    return full[None, None, : case.q_len, : case.kv_len].contiguous()


def pairs(case) -> int:
    """Visible pairs of one head."""

    def sizes(length: int) -> torch.Tensor:
        return torch.tensor([min(case.extent, length - first) for first in range(0, length, case.extent)])

    return int(sizes(case.q_len) @ of_case(case).long() @ sizes(case.kv_len))

"""What attention over several ranks costs before it runs: memory, bytes and time of a scheme."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .._dtypes import accumulation_dtype


@dataclass(frozen=True)
class AttentionConfig:
    """One attention over a whole sequence. latent: numbers sent of a token in place of its keys and values (ring_mla:
    kv_lora_rank + rope). window: keys to the left that a row sees under causality; None: all."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype = torch.bfloat16
    is_causal: bool = True
    window: int | None = None
    latent: int | None = None


@dataclass(frozen=True)
class Bandwidths:
    """Of one rank: flops a second of attention, bytes a second between ranks that share rows, and heads."""

    flops: float
    rows: float
    heads: float


@dataclass(frozen=True)
class Estimate:
    """Of the rank with most: bytes of memory, bytes sent and seconds. Memory is what attention has at once, inputs and
    output included; seconds are those of work and of transfer, and of both as they overlap."""

    memory: int
    forward_bytes: int
    backward_bytes: int
    work_seconds: float
    transfer_seconds: float
    seconds: float


def estimate(config: AttentionConfig, mesh: tuple[int, int], bandwidths: Bandwidths, scheme: str = "ring") -> Estimate:
    """The cost of ring_attention, forward and backward, by the schemes of `ring_attention` in order "zigzag".

    Args:
        config: the attention.
        mesh: (ranks that share rows out, ranks that share heads out): (8, 1) is a ring or an all-gather of 8, (1, 8) is
            Ulysses, (4, 2) rings of 4 over pairs that share heads (ulysses_group).
        bandwidths: of a rank.
        scheme: "ring" or "all_gather", of the ranks that share rows out.

    Returns: an Estimate. Work and the ring's transfer overlap, all-gather and all-to-all come before the work. The work
    is that of scores and sums; of projections, as of those that make keys of latents, nothing is counted.

    Raises ValueError for a mesh that does not divide tokens or heads, or another scheme.
    """
    rows, heads = mesh
    if scheme not in ("ring", "all_gather"):
        raise ValueError(f"scheme: expected 'ring' or 'all_gather', got {scheme!r}")
    if rows < 1 or heads < 1 or config.tokens % (2 * rows * heads):
        raise ValueError(f"mesh: expected a divisor of half of {config.tokens} tokens, got {mesh}")
    if config.heads % heads or config.kv_heads % heads:
        counts = f"{config.heads} query and {config.kv_heads} key heads"
        raise ValueError(f"mesh: expected a number of ranks for heads that divides {counts}, got {heads}")
    if config.latent is not None and heads > 1:
        raise ValueError(f"mesh: expected one rank for the heads of latents, got {heads}")
    item, wide = config.dtype.itemsize, accumulation_dtype(config.dtype).itemsize
    own = config.batch * config.tokens // (rows * heads)  # tokens of a rank
    of_query = config.heads * (config.head_dim + config.v_head_dim)
    of_keys = config.kv_heads * (config.head_dim + config.v_head_dim)
    shard = own * (config.latent or of_keys)  # numbers that a rank sends of its keys: of its heads, of more rows

    others = rows - 1
    if config.window is not None and scheme == "ring":
        # a chunk of the zigzag is half a shard, and its neighbours are on the ranks beside
        others = min(others, 2 * math.ceil(config.window / (config.tokens // rows // 2)))
    row_forward, row_backward = others * shard * item, others * shard * (item + wide)
    swap = own * (of_query + of_keys) * item // heads * (heads - 1)
    lse = own * config.heads * wide // heads * (heads - 1)

    pairs = config.tokens * config.tokens / (2 if config.is_causal else 1)
    if config.window is not None:
        pairs = min(pairs, config.tokens * (config.window + 1))
    flops = 3.5 * 2 * config.batch * config.heads * pairs * (config.head_dim + config.v_head_dim)
    work = flops / (rows * heads) / bandwidths.flops
    between_rows = (row_forward + row_backward) / bandwidths.rows
    between_heads = (2 * swap + lse) / bandwidths.heads
    seconds = between_heads + (max(work, between_rows) if scheme == "ring" else work + between_rows)

    tensors = own * (of_query + of_keys) * item * (2 if heads > 1 else 1)  # before and after the swap
    held = (3 if scheme == "ring" and rows > 1 else rows) * shard * item  # own, at work, arriving
    if config.latent is not None:
        held += own * of_keys * item  # made of the latents at work
    sums = own * (config.heads * (config.v_head_dim * wide + 16))  # of rows, while shards come by
    return Estimate(
        memory=tensors + held + sums,
        forward_bytes=row_forward + swap + lse,
        backward_bytes=row_backward + swap,
        work_seconds=work,
        transfer_seconds=between_rows + between_heads,
        seconds=seconds,
    )

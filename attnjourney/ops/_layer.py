"""What the layer operators (mha, gpt_attention, gqa, mla) say alike about themselves; csrc/layers.h on this side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_lse(like: Tensor, *shape: int) -> Tensor:
    """float64 beside float64, float32 beside every other dtype."""
    return like.new_empty(shape, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)


def empty_gradients(like: Tensor, shapes: Sequence[Sequence[int]], need: int) -> tuple[Tensor, ...]:
    """One of each shape where its bit of need is set, (0,) for the others."""
    return tuple(like.new_empty(shape if need >> bit & 1 else (0,)) for bit, shape in enumerate(shapes))


def layer_flops(
    projections: int, batch: int, num_heads: int, q_len: int, kv_len: int, head_dim: int, v_head_dim: int
) -> tuple[int, int]:
    """Forward and backward of projections (FLOPs of their forward) and attention. The latter is counted as torch counts
    F.scaled_dot_product_attention: masks are ignored, causal too; the backward computes the scores once more."""
    pairs = 2 * batch * num_heads * q_len * kv_len
    forward = projections + pairs * (head_dim + v_head_dim)
    return forward, 2 * projections + pairs * (3 * head_dim + 2 * v_head_dim)

"""FLOPs of attention and of the layers around it, 2 for a multiplication and an addition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def attention_flops(
    pairs: int, query: Sequence[int], value: Sequence[int], others: Mapping[str, object]
) -> tuple[int, ...]:
    """Of forward, backward, jvp and the backward's jvp over that many pairs of query and key. Products that a
    missing tangent leaves out are not counted."""
    dim, v_dim = query[-1], value[-1]
    q, k, v, grad = (others.get(f"{x}_tangent") is not None for x in ("query", "key", "value", "grad_out"))
    jvp = dim * (1 + q + k) + v_dim * (1 + v)
    backward_jvp = dim * (3 + 2 * q + 2 * k) + v_dim * (2 + v + 2 * grad)
    return tuple(2 * pairs * n for n in (dim + v_dim, 3 * dim + 2 * v_dim, jvp, backward_jvp))


def layer_flops(
    projections: int, batch: int, num_heads: int, q_len: int, kv_len: int, head_dim: int, v_head_dim: int
) -> tuple[int, int]:
    """Forward and backward of projections (FLOPs of their forward) and attention. The latter is counted as torch counts
    F.scaled_dot_product_attention: masks are ignored, causal too; the backward recomputes the scores."""
    pairs = 2 * batch * num_heads * q_len * kv_len
    forward = projections + pairs * (head_dim + v_head_dim)
    return forward, 2 * projections + pairs * (3 * head_dim + 2 * v_head_dim)

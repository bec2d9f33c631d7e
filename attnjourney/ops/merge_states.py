"""Joins attention over two parts of the keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over all keys from that over two parts of them: weights are the softmax of the two lse
    (arXiv 2501.01005, section 2.2). Associative; differentiable to any order.

    Args:
        out_a, out_b: (..., L, Ev), of one shape and dtype.
        lse_a, lse_b: (..., L), natural logarithm; -inf marks a row that saw nothing: its out counts nothing, even NaN.

    Returns: (out, lse), as if computed at once: out in out_a's dtype, lse in the wider dtype of the two.

    Raises ValueError for shapes, RuntimeError for dtypes that do not fit.
    """
    for name, shape, like_name, expected in (
        ("out_b", out_b.shape, "out_a", out_a.shape),
        ("lse_a", lse_a.shape, "out_a without its last dimension", out_a.shape[:-1]),
        ("lse_b", lse_b.shape, "lse_a", lse_a.shape),
    ):
        if shape != expected:
            raise ValueError(f"{name}: expected the shape of {like_name}, {tuple(expected)}, got {tuple(shape)}")
    for name, x, like in (("out_b", out_b, out_a), ("lse_b", lse_b, lse_a)):
        if x.dtype != like.dtype:
            raise RuntimeError(f"{name}: expected dtype {like.dtype}, got {x.dtype}")
    top = torch.maximum(lse_a, lse_b).detach()  # cancels
    top = torch.where(top == -math.inf, 0.0, top)
    a, b = (lse_a - top).exp(), (lse_b - top).exp()
    total = a + b
    seen = total > 0
    safe = torch.where(seen, total, 1.0)
    parts = [
        torch.where((lse == -math.inf).unsqueeze(-1), 0.0, out) * (x / safe).unsqueeze(-1)
        for lse, out, x in ((lse_a, out_a, a), (lse_b, out_b, b))
    ]
    return (parts[0] + parts[1]).to(out_a.dtype), torch.where(seen, top + safe.log(), -math.inf)

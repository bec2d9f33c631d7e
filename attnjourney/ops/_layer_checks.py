"""The checks of the layer operators (mha, gpt_attention, gqa, mla) for tensors without data (meta tensors, tracing);
csrc/layers/layers.h checks the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._registry.fakes import or_float32

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_heads(name: str, heads: int, width_name: str, width: int) -> int:
    """Returns width / heads."""
    if heads <= 0:
        raise ValueError(f"{name}: expected a positive number, got {heads}")
    if width % heads != 0:
        raise ValueError(f"{name}: expected a divisor of {width_name}, {width}, got {heads}")
    return width // heads


def check_sequence(name: str, x: Tensor) -> None:
    if x.dim() != 3:
        raise ValueError(f"{name}: expected 3 dimensions (batch, seq, embed), got shape {tuple(x.shape)}")
    if x.shape[2] == 0:
        raise ValueError(f"{name}: expected a last dimension of at least 1, got shape {tuple(x.shape)}")
    if x.dtype not in FLOATING:
        names = ", ".join(map(str, FLOATING[:-1]))
        raise RuntimeError(f"{name}: expected dtype {names} or {FLOATING[-1]}, got {x.dtype}")


def check_matrix(name: str, weight: Tensor) -> None:
    if weight.dim() != 2:
        raise ValueError(f"{name}: expected 2 dimensions, got shape {tuple(weight.shape)}")


def check_weight(name: str, weight: Tensor | None, shape: tuple[int, ...], like_name: str, like: Tensor) -> None:
    """A weight, or a bias that may be None: this shape, the dtype of `like`."""
    if weight is None:
        return
    if tuple(weight.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(weight.shape)}")
    if weight.dtype != like.dtype:
        raise RuntimeError(f"{name}: expected the dtype of {like_name}, {like.dtype}, got {weight.dtype}")


def check_dropout(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout_p: expected a number between 0 and 1, got {p}")


def check_mask(name: str, mask: Tensor | None, shapes: Sequence[tuple[int, ...]], query: Tensor) -> None:
    if mask is None:
        return
    if mask.dtype not in (torch.bool, query.dtype, torch.float32):
        expected = "torch.bool or " if query.dtype == torch.float32 else "torch.bool, "
        expected += or_float32(query.dtype, "query")
        raise RuntimeError(f"{name}: expected dtype {expected}, got {mask.dtype}")
    if tuple(mask.shape) not in [tuple(s) for s in shapes]:
        raise ValueError(f"{name}: expected shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")


def check_tables(cos: Tensor | None, sin: Tensor | None, batch: int, seq: int, like_name: str, like: Tensor) -> int:
    """Returns rotary_dim, 0 without tables."""
    if cos is None and sin is None:
        return 0
    if cos is None or sin is None:
        given, missing = ("cos", "sin") if sin is None else ("sin", "cos")
        raise ValueError(f"{missing}: expected a tensor beside {given}, got None")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() not in (2, 3) or tuple(table.shape[:-1]) not in ((seq,), (batch, seq)):
            shapes = f"({seq}, rotary_dim / 2), one row per position, or ({batch}, {seq}, rotary_dim / 2)"
            raise ValueError(f"{name}: expected shape {shapes}, got {tuple(table.shape)}")
        if table.dtype not in (torch.float32, like.dtype):
            raise RuntimeError(f"{name}: expected dtype {or_float32(like.dtype, like_name)}, got {table.dtype}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: expected the shape of cos, {tuple(cos.shape)}, got {tuple(sin.shape)}")
    return 2 * cos.shape[-1]

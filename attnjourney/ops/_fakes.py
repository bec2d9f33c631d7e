"""What the fake kernels share: the check of a shape, and results as empty tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._dtypes import accumulation_dtype


def need(ok: bool, expected: str, got: Tensor) -> None:
    """ValueError, with the shape of `got`, unless ok."""
    if not ok:
        raise ValueError(f"{expected}, got shape {tuple(got.shape)}")


def empty_lse(like: Tensor, *shape: int) -> Tensor:
    """Statistics of rows: lse, normalizers, 1 / rms."""
    return like.new_empty(shape, dtype=accumulation_dtype(like.dtype))


def empty_gradients(like: Tensor, shapes: Sequence[Sequence[int]], need: int) -> tuple[Tensor, ...]:
    """One of each shape where its bit of need is set, (0,) for the others."""
    return tuple(like.new_empty(tuple(shape) if need >> bit & 1 else (0,)) for bit, shape in enumerate(shapes))

"""What the fake kernels share: the check of a shape, and results as empty tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._dtypes import accumulation_dtype


def need(ok: bool, expected: str, got: Tensor) -> None:
    """ValueError, with the shape of `got`, unless ok."""
    if not ok:
        raise ValueError(f"{expected}, got shape {tuple(got.shape)}")


def or_float32(dtype: torch.dtype, whose: str) -> str:
    """What a tensor beside one of that dtype may have."""
    return "torch.float32" if dtype == torch.float32 else f"{dtype} ({whose}'s) or torch.float32"


def same_size(n: int, want: int) -> bool:
    """n == want. A size that only a run tells counts as equal, and the program checks it then."""
    if type(n) is int and type(want) is int:
        return n == want
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    if guard_or_true(n == want):
        if not guard_or_false(n == want):
            torch._check(n == want)
        return True
    return False


def known_at_run_time(n: int) -> bool:
    """Whether only a run tells n, so that nothing may depend on it now."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return guard_or_true(n == 0) and not guard_or_false(n == 0)


def is_one(n: int) -> bool:
    """n == 1. A size that only a run tells is no broadcast dimension."""
    if type(n) is int:
        return n == 1
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(n == 1)


def broadcasts(n: int, want: int) -> bool:
    return is_one(n) or same_size(n, want)


def empty_lse(like: Tensor, *shape: int) -> Tensor:
    """Statistics of rows: lse, normalizers, 1 / rms."""
    return like.new_empty(shape, dtype=accumulation_dtype(like.dtype))


def empty_stats(like: Tensor, *shape: int) -> Tensor:
    """What derivatives read of the softmax of each row: two numbers."""
    return empty_lse(like, *shape, 2)


def empty_gradients(like: Tensor, shapes: Sequence[Sequence[int]], need: int) -> tuple[Tensor, ...]:
    """One of each shape where its bit of need is set, (0,) for the others."""
    return tuple(like.new_empty(tuple(shape) if need >> bit & 1 else (0,)) for bit, shape in enumerate(shapes))

"""Sizes, heads and repeats in ONNX."""

from __future__ import annotations

from typing import Any

from onnxscript.onnx_opset import opset23 as op

FLOAT = 1  # TensorProto.FLOAT


def size(x: Any, dim: int) -> Any:
    """(1,) int64."""
    return op.Shape(x, start=dim, end=dim + 1)


def scalar(x: Any) -> Any:
    return op.Squeeze(x, [0])


def ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))


def per_head(x: Any) -> Any:
    """(H,) or (B, H) -> (B or 1, H, 1, 1)."""
    return op.Unsqueeze(x, [0, 2, 3] if len(x.shape) == 1 else [2, 3])


def repeat_heads(x: Any, own: int, heads: int) -> Any:
    """(B, own, S, E) -> (B, heads, S, E), each key head for its group. (Shapes of values between nodes are unknown.)"""
    if own == heads:
        return x
    shape = op.Concat(size(x, 0), ints(own, heads // own), size(x, 2), size(x, 3), axis=0)
    wide = op.Expand(op.Unsqueeze(x, [2]), shape)
    return op.Reshape(wide, op.Concat(size(x, 0), ints(heads), size(x, 2), size(x, 3), axis=0))

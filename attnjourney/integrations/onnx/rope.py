"""The node RotaryEmbedding."""

from __future__ import annotations

from typing import Any

from onnxscript.onnx_opset import opset23 as op

from ._shapes import size


def rope(x: Any, cos: Any, sin: Any, *, interleaved: bool = False, inverse: bool = False) -> Any:
    """RotaryEmbedding of (B, H, S, E); cos and sin (S, r / 2) or (B, S, r / 2)."""
    width = 2 * int(cos.shape[-1])
    if len(cos.shape) == 2:
        shape = op.Concat(size(x, 0), op.Shape(cos), axis=0)
        cos, sin = (op.Expand(table, shape) for table in (cos, sin))
    sin = op.Neg(sin) if inverse else sin
    return op.RotaryEmbedding(
        x, op.CastLike(cos, x), op.CastLike(sin, x), interleaved=int(interleaved), rotary_embedding_dim=width,
        num_heads=int(x.shape[1]),
    )  # fmt: skip

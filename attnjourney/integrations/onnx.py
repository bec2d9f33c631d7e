"""What this package's operators are in ONNX: for torch.onnx.export(..., dynamo=True, custom_translation_table=...).

attention becomes the node Attention of opset 23, its options a mask in front of it; rope becomes RotaryEmbedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    from onnxscript.onnx_opset import opset23 as op
except ImportError as error:
    raise ImportError(
        f"attnjourney.integrations.onnx needs onnxscript with opset 23 (pip install 'onnxscript>=0.5'): {error}"
    ) from error

OPSET = 23


def translation_table() -> dict[Callable, Callable]:
    """The custom_translation_table of torch.onnx.export, with opset_version=23 or later."""
    namespace = torch.ops.attnjourney
    return {
        namespace.attention.default: attention,
        namespace.attention_forward.default: lambda *args, **options: (attention(*args, **options),),
        namespace.rope.default: rope,
    }


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: tuple[int, int] = (-1, -1), prefix_length: int = 0, key_lengths: Any = None,
    query_lengths: Any = None, softcap: float = 0.0, sinks: Any = None, alibi_slopes: Any = None,
    dropout_seed: Any = None,
) -> Any:  # fmt: skip
    """The node Attention of (B, H, L, E); rank 2 and 3 are made that. Without dropout; lse is not there."""
    if dropout_p > 0:
        raise ValueError(f"dropout_p: expected 0 in an exported program, got {dropout_p}: export the model in eval()")
    rank = len(query.shape)
    if rank > 4:
        raise ValueError(f"query: expected at most 4 dimensions for ONNX, got {rank}")
    lead = op.Constant(value_ints=list(range(4 - rank))) if rank < 4 else None
    if lead is not None:
        query, key, value = (op.Unsqueeze(x, lead) for x in (query, key, value))
    attributes = {"softcap": softcap} if scale is None else {"softcap": softcap, "scale": scale}
    options = (window_size[0], window_size[1], prefix_length, key_lengths, query_lengths, sinks, alibi_slopes)
    if attn_mask is None and not causal_alignment and options == (-1, -1, 0, None, None, None, None):
        out, _, _, _ = op.Attention(query, key, value, is_causal=int(is_causal), **attributes)
    else:
        visible, distance = _visible(
            query, key, is_causal, causal_alignment, window_size, prefix_length, key_lengths, query_lengths
        )
        bias = None
        if attn_mask is not None and attn_mask.dtype.name == "BOOL":
            visible = op.And(visible, attn_mask)
        elif attn_mask is not None:
            bias = op.CastLike(attn_mask, query)
            visible = op.And(visible, op.Not(op.IsInf(op.Cast(attn_mask, to=1), detect_positive=0)))
        if alibi_slopes is not None:
            slope = op.Mul(op.CastLike(_per_head(alibi_slopes), query), op.CastLike(distance, query))
            bias = op.Neg(slope) if bias is None else op.Sub(bias, slope)
        bias = op.CastLike(0.0, query) if bias is None else bias
        hidden = op.CastLike(float("-inf"), query)
        mask = op.Where(visible, bias, hidden)  # (B or 1, H or 1, L, S)
        sees = op.Greater(op.ReduceMax(op.Cast(visible, to=1), op.Constant(value_ints=[-1]), keepdims=1), 0.0)
        if sinks is not None:  # one more key: zeros, whose score is the logit that joins
            key, value = (_with_zero_row(x) for x in (key, value))
            logit = op.CastLike(_per_head(sinks), query)
            rows = op.Concat(_size(query, 0), _size(query, 1), _size(query, 2), op.Constant(value_ints=[1]), axis=0)
            wide = op.Concat(_size(query, 0), _size(query, 1), _size(mask, 2), _size(mask, 3), axis=0)
            mask = op.Concat(op.Expand(mask, wide), op.Expand(logit, rows), axis=-1)
        out, _, _, _ = op.Attention(query, key, value, mask, **attributes)
        out = op.Where(sees, out, op.CastLike(0.0, query))  # a row that sees no key
    return out if lead is None else op.Squeeze(out, lead)


def _size(x: Any, dim: int) -> Any:
    """(1,) int64."""
    return op.Shape(x, start=dim, end=dim + 1)


def _scalar(x: Any) -> Any:
    return op.Squeeze(x, [0])


def _per_head(x: Any) -> Any:
    """(H,) or (B, H) -> (B or 1, H, 1, 1)."""
    return op.Unsqueeze(x, [0, 2, 3] if len(x.shape) == 1 else [2, 3])


def _with_zero_row(x: Any) -> Any:
    """(B, H, S, E) -> (B, H, S + 1, E)."""
    return op.Pad(x, [0, 0, 0, 0, 0, 0, 1, 0])


def _visible(
    query: Any, key: Any, is_causal: bool, causal_alignment: int, window_size: tuple[int, int], prefix_length: int,
    key_lengths: Any, query_lengths: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """The rule of csrc/core/mask.h: (B or 1, 1, L, S) bool, and the distance of row and key."""
    q_len, kv_len = _scalar(_size(query, 2)), _scalar(_size(key, 2))
    rows = op.Unsqueeze(op.Range(0, q_len, 1), [0, 1, 3])  # (1, 1, L, 1)
    keys = op.Unsqueeze(op.Range(0, kv_len, 1), [0, 1, 2])  # (1, 1, 1, S)
    own_q = q_len if query_lengths is None else op.Unsqueeze(op.Cast(query_lengths, to=7), [1, 2, 3])
    own_k = kv_len if key_lengths is None else op.Unsqueeze(op.Cast(key_lengths, to=7), [1, 2, 3])
    position = op.Add(rows, op.Sub(own_k, own_q)) if causal_alignment else rows
    visible = op.GreaterOrEqual(op.Add(rows, keys), 0)
    if is_causal:
        visible = op.And(visible, op.LessOrEqual(keys, position))
    if window_size[0] >= 0:
        visible = op.And(visible, op.GreaterOrEqual(keys, op.Sub(position, window_size[0])))
    if window_size[1] >= 0:
        visible = op.And(visible, op.LessOrEqual(keys, op.Add(position, window_size[1])))
    if prefix_length:
        visible = op.Or(visible, op.Less(keys, prefix_length))
    visible = op.And(visible, op.And(op.Less(keys, own_k), op.Less(rows, own_q)))
    return visible, op.Abs(op.Sub(position, keys))


def rope(x: Any, cos: Any, sin: Any, *, interleaved: bool = False, inverse: bool = False) -> Any:
    """RotaryEmbedding of (B, H, S, E); cos and sin (S, r / 2) or (B, S, r / 2)."""
    width = 2 * int(cos.shape[-1])
    if len(cos.shape) == 2:
        shape = op.Concat(_size(x, 0), op.Shape(cos), axis=0)
        cos, sin = (op.Expand(table, shape) for table in (cos, sin))
    sin = op.Neg(sin) if inverse else sin
    return op.RotaryEmbedding(
        x, op.CastLike(cos, x), op.CastLike(sin, x), interleaved=int(interleaved), rotary_embedding_dim=width,
        num_heads=int(x.shape[1]),
    )  # fmt: skip

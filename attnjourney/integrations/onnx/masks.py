"""The mask rule in ONNX."""

from __future__ import annotations

from typing import Any

from onnxscript.onnx_opset import opset23 as op


def visible_keys(
    q_len: Any, kv_len: Any, is_causal: bool, causal_alignment: int, window_size: tuple[int, int], prefix_length: int,
    key_lengths: Any, query_lengths: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """The rule of csrc/core/mask.h: (B or 1, 1, L, S) bool, and the distance of row and key."""
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

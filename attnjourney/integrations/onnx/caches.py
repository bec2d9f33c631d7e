"""Attention over what is there from before: attnjourney.decode, and past_key and past_value of the node Attention."""

from __future__ import annotations

from typing import Any

import torch
from onnxscript.onnx_opset import opset23 as op
from torch import Tensor

from ...ops import attention as attend
from ._shapes import FLOAT, ints, scalar, size
from .attention import attention_forward
from .masks import visible_keys


@torch.library.custom_op("attnjourney_onnx::attention_with_past", mutates_args=())
def _attention_with_past(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor, is_causal: bool = True,
    scale: float | None = None, window_left: int = -1, window_right: int = -1, softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    keys, values = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    out = attend(
        query, keys, values, is_causal=is_causal, scale=scale, enable_gqa=True, causal_alignment="bottom_right",
        window_size=(window_left, window_right), softcap=softcap,
    )  # fmt: skip
    return out, keys, values


@_attention_with_past.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor, *_: Any, **__: Any) -> Any:
    shapes = [(*past.shape[:2], past.shape[2] + x.shape[2], x.shape[3]) for x, past in
              ((key, past_key), (value, past_value))]  # fmt: skip
    return query.new_empty((*query.shape[:3], value.shape[3])), key.new_empty(shapes[0]), value.new_empty(shapes[1])


def attention_with_past(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor, *, is_causal: bool = True,
    scale: float | None = None, window_size: tuple[int, int] | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention of new rows over keys from before and their own, for programs that are to be exported: one node, with
    past_key and past_value as its inputs and present_key and present_value among its results. For inference.

    Args:
        query: (B, Hq, L, E). key, value: (B, Hk, L, E) and (B, Hk, L, Ev), the new ones.
        past_key, past_value: the same with P in place of L; P may be 0.
        is_causal, scale, window_size, softcap: as of attnjourney.attention, with causal_alignment="bottom_right".

    Returns:
        (B, Hq, L, Ev), and keys and values (B, Hk, P + L, ...).
    """
    left, right = (-1, -1) if window_size is None else window_size
    return _attention_with_past(
        query, key, value, past_key, past_value, is_causal, scale, left, right, 0.0 if softcap is None else softcap
    )


def with_past(
    query: Any, key: Any, value: Any, past_key: Any, past_value: Any, is_causal: bool = True,
    scale: float | None = None, window_left: int = -1, window_right: int = -1, softcap: float = 0.0,
) -> tuple[Any, Any, Any]:  # fmt: skip
    attributes = {"softcap": softcap} if scale is None else {"softcap": softcap, "scale": scale}
    keys = op.Add(scalar(size(past_key, 2)), scalar(size(key, 2)))
    visible, _ = visible_keys(
        scalar(size(query, 2)), keys, is_causal, 1, (window_left, window_right), 0, None, None
    )  # fmt: skip
    mask = op.Where(visible, op.CastLike(0.0, query), op.CastLike(float("-inf"), query))
    out, present_key, present_value, _ = op.Attention(query, key, value, mask, past_key, past_value, **attributes)
    sees = op.Greater(op.ReduceMax(op.Cast(visible, to=FLOAT), ints(-1), keepdims=1), 0.0)
    return op.Where(sees, out, op.CastLike(0.0, query)), present_key, present_value


def decode(
    query: Any, key: Any, value: Any, lengths: Any, *, block_table: Any = None, ring: bool = False,
    key_scale: Any = None, value_scale: Any = None, is_causal: bool = True, attn_mask: Any = None, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Out and lse of torch.ops.attnjourney.decode: the rows are the last of the first `lengths` keys."""
    if ring:
        raise ValueError("ring: expected False in a program for ONNX, got True")
    key_heads, has_bool_mask = int(key.shape[1]), attn_mask is not None and attn_mask.dtype.name == "BOOL"
    key, value = _numbers(key, key_scale, query), _numbers(value, value_scale, query)
    if block_table is not None:
        key, value = (_gathered(x, block_table) for x in (key, value))
    if attn_mask is not None:
        attn_mask = _for_all_keys(attn_mask, key)
    return attention_forward(
        query, key, value, attn_mask, 0.0, is_causal, enable_gqa=True, causal_alignment=1, key_lengths=lengths,
        key_heads=key_heads, has_bool_mask=has_bool_mask, **options,
    )  # fmt: skip


def _numbers(cache: Any, scale: Any, query: Any) -> Any:
    """A cache of bytes in the dtype of the query."""
    if scale is None:
        return cache
    return op.CastLike(op.Mul(op.Cast(cache, to=FLOAT), op.Unsqueeze(scale, ints(-1))), query)


def _gathered(pool: Any, block_table: Any) -> Any:
    """(blocks, H, block, E), (B, M) -> (B, H, M * block, E)."""
    table = op.Max(op.Cast(block_table, to=7), op.Constant(value_int=0))
    blocks = op.Transpose(op.Gather(pool, table, axis=0), perm=[0, 2, 1, 3, 4])
    return op.Reshape(blocks, op.Concat(ints(0, 0, -1), size(pool, 3), axis=0))


def _for_all_keys(mask: Any, key: Any) -> Any:
    """A mask's columns may end at the longest length: those behind are hidden in any case."""
    if mask.shape[-1] == 1:
        return mask
    missing = op.Sub(size(key, 2), size(mask, len(mask.shape) - 1))
    pads = op.Concat(ints(*(0,) * (2 * len(mask.shape) - 1)), missing, axis=0)
    return op.Pad(mask, pads)

"""The inference kernel of nn.MultiheadAttention and nn.TransformerEncoderLayer over this package's operators.

Both call aten::_native_multi_head_attention in evaluation: self-attention without gradients, of a padded batch, or of
the nested tensor that nn.TransformerEncoder makes of one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..nn._parts import merge_heads
from ..ops import attention, attention_weights, mha, varlen_attention
from ..reference.mha import attention_mask
from .activity import left_to_torch, ran

NAME = "_native_multi_head_attention"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_Kernel = Callable[..., tuple[Tensor, Tensor]]
_ROWS_BY_KEYS, _PADDING, _PER_HEAD = 0, 1, 2  # mask_type: (L, L), (B, L), (B, H, L, L)


def register(library: torch.library.Library) -> None:
    for key, ours in (("CPU", _padded), ("NestedTensorCPU", _nested)):
        library.impl(NAME, _kernel(torch.library.get_kernel(f"aten::{NAME}", key), ours), key, with_keyset=True)


def _kernel(
    torchs: torch._C._SafeKernelFunction, ours: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    def kernel(
        keys, query, key, value, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask=None,
        need_weights=True, average_attn_weights=True, mask_type=None,
    ):  # fmt: skip
        reason = None
        weights = qkv_weight, qkv_bias, proj_weight, proj_bias
        if query is not key or key is not value:
            reason = "inference kernel: not self-attention"
        elif query.dtype not in DTYPES or any(x.dtype != query.dtype for x in weights):
            reason = f"inference kernel: dtype {query.dtype}"
        elif query.is_nested and (mask is not None or need_weights):
            reason = "inference kernel: a mask or weights of a nested tensor"
        if reason is None:
            ran("fast_path")
            return ours(query, num_heads, *weights, mask, mask_type, need_weights, average_attn_weights)
        left_to_torch(reason)
        return torchs.call_boxed(
            keys, query, key, value, embed_dim, num_heads, *weights, mask, need_weights, average_attn_weights, mask_type
        )

    return kernel


def _padded(
    x: Tensor, heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
    mask: Tensor | None, mask_type: int | None, need_weights: bool, average: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (B, L, embed); a mask's True hides, a floating one is added."""
    attn_mask = padding = None
    if mask is not None:
        if mask_type == _PADDING:
            padding = mask
        else:
            attn_mask = mask if mask_type == _ROWS_BY_KEYS else mask.flatten(0, 1)  # (L, L) or (B * H, L, L)
    if not need_weights:
        weights = qkv_weight, qkv_bias, proj_weight, proj_bias
        return mha(x, x, x, heads, *weights, attn_mask=attn_mask, key_padding_mask=padding), x.new_empty(0)
    q, k, v = F.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, L, D)
    visible = attention_mask(attn_mask, padding, heads)
    out, lse = attention(q, k, v, visible, return_lse=True)
    seen = attention_weights(q, k, visible, lse=lse)
    return F.linear(merge_heads(out), proj_weight, proj_bias), seen.mean(1) if average else seen


def _nested(
    x: Tensor, heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    """x: B sequences of (L_b, embed), packed one after the other."""
    x = x.contiguous()
    sizes = x._nested_tensor_size()  # (B, 2)
    offsets = F.pad(sizes[:, 0].cumsum(0), (1, 0))
    qkv = F.linear(x.values().view(-1, qkv_weight.shape[1]), qkv_weight, qkv_bias).unflatten(-1, (3, heads, -1))
    q, k, v = qkv.unbind(1)  # (total, H, D)
    out = varlen_attention(q, k, v, offsets, offsets)
    out = F.linear(out.flatten(1), proj_weight, proj_bias)
    strides, starts = x._nested_tensor_strides(), x._nested_tensor_storage_offsets()
    return torch._nested_view_from_buffer(out.flatten(), sizes, strides, starts), out.new_empty(0)

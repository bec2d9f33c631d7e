"""What this package's operators are in ONNX: for torch.onnx.export(..., dynamo=True, custom_translation_table=...).

attention, decode and attention_with_past become the node Attention of opset 23, their options a mask in front of it;
rope becomes RotaryEmbedding; linear_attention products, or LinearAttention of opset 27.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

try:
    from onnxscript.onnx_opset import opset23 as _opset23  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"attnjourney.integrations.onnx needs onnxscript with opset 23 (pip install 'onnxscript>=0.5'): {error}"
    ) from error

from .attention import attention, attention_forward
from .caches import attention_with_past as attention_with_past
from .caches import decode, with_past
from .linear_attention import linear_attention
from .linear_attention import with_linear_attention as with_linear_attention
from .rope import rope

__all__ = ["OPSET", "attention_with_past", "translation_table", "with_linear_attention"]

OPSET = 23  # the least


def translation_table(*, linear_node: bool = False) -> dict[Callable, Callable]:
    """The custom_translation_table of torch.onnx.export, with opset_version=23 or later.

    Args:
        linear_node: causal linear attention becomes a node. Export with opset_version=25 then, and give the program to
            `with_linear_attention`.
    """
    namespace = torch.ops.attnjourney
    return {
        namespace.attention.default: attention,
        namespace.attention_forward.default: attention_forward,
        namespace.decode.default: decode,
        namespace.linear_attention_forward.default: lambda *inputs, **options: linear_attention(
            linear_node, *inputs, **options
        ),
        namespace.rope.default: rope,
        torch.ops.attnjourney_onnx.attention_with_past.default: with_past,
    }

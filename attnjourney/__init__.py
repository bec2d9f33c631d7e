"""Attention operators for PyTorch in C++: forward and backward, on CPU and CUDA."""

from . import nn, reference
from ._version import __version__
from .accounting import account
from .block_mask import BlockMask
from .info import cpu_info, explain
from .nn.cache import KVCache, LatentCache, WindowCache
from .nn.cache_paged import PagedKVCache
from .ops import (
    attention,
    attention_weights,
    decode,
    gpt_attention,
    gqa,
    infini_attention,
    linear_attention,
    longformer_attention,
    merge_states,
    mha,
    mla,
    mla_decode,
    varlen_attention,
)
from .positions import alibi_slopes, rope, rope_frequencies, sinusoidal_positions
from .replace import replace_attention
from .seeing import capture, trace, trace_module


def __getattr__(name: str):
    """attnjourney.viz is imported when it is first asked for."""
    if name == "viz":
        from importlib import import_module

        return import_module(".viz", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BlockMask",
    "KVCache",
    "LatentCache",
    "PagedKVCache",
    "WindowCache",
    "__version__",
    "account",
    "alibi_slopes",
    "attention",
    "attention_weights",
    "capture",
    "cpu_info",
    "decode",
    "explain",
    "gpt_attention",
    "gqa",
    "infini_attention",
    "linear_attention",
    "longformer_attention",
    "merge_states",
    "mha",
    "mla",
    "mla_decode",
    "nn",
    "reference",
    "replace_attention",
    "rope",
    "rope_frequencies",
    "sinusoidal_positions",
    "trace",
    "trace_module",
    "varlen_attention",
    "viz",
]

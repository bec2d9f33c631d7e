"""Attention operators for PyTorch in C++: forward and backward, on CPU and CUDA."""

from . import nn, reference
from ._version import __version__
from .accounting import account
from .info import cpu_info, explain
from .ops import attention, gpt_attention, gqa, mha, mla
from .positions import alibi_slopes, rope, rope_frequencies, sinusoidal_positions
from .replace import replace_attention

__all__ = [
    "__version__",
    "account",
    "alibi_slopes",
    "attention",
    "cpu_info",
    "explain",
    "gpt_attention",
    "gqa",
    "mha",
    "mla",
    "nn",
    "reference",
    "replace_attention",
    "rope",
    "rope_frequencies",
    "sinusoidal_positions",
]

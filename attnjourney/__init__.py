"""Attention operators for PyTorch in C++: forward and backward, on CPU and CUDA."""

from typing import TYPE_CHECKING, Any

from . import _requirements as _requirements  # isort: skip
from . import nn as nn
from . import reference as reference
from ._version import __version__ as __version__
from .accounting import account as account
from .block_mask import BlockMask as BlockMask
from .info import cpu_info as cpu_info
from .info import explain as explain
from .integrations.activity import activity as activity
from .integrations.sdpa import activate as activate
from .integrations.sdpa import activated as activated
from .integrations.sdpa import active as active
from .integrations.sdpa import deactivate as deactivate
from .nn.cache import KVCache as KVCache
from .nn.cache import LatentCache as LatentCache
from .nn.cache import WindowCache as WindowCache
from .nn.cache_paged import PagedKVCache as PagedKVCache
from .ops import attention as attention
from .ops import attention_weights as attention_weights
from .ops import decode as decode
from .ops import gated_linear_attention as gated_linear_attention
from .ops import gpt_attention as gpt_attention
from .ops import gqa as gqa
from .ops import infini_attention as infini_attention
from .ops import linear_attention as linear_attention
from .ops import longformer_attention as longformer_attention
from .ops import merge_states as merge_states
from .ops import mha as mha
from .ops import mla as mla
from .ops import mla_decode as mla_decode
from .ops import tree_depths as tree_depths
from .ops import tree_mask as tree_mask
from .ops import varlen_attention as varlen_attention
from .positions import alibi_slopes as alibi_slopes
from .positions import rope as rope
from .positions import rope_frequencies as rope_frequencies
from .positions import sinusoidal_positions as sinusoidal_positions
from .replace import replace_attention as replace_attention
from .seeing.recording import capture as capture
from .seeing.recording import trace as trace
from .seeing.recording import trace_module as trace_module

if TYPE_CHECKING:
    from . import torch_ops as torch_ops
    from . import viz as viz


def __getattr__(name: str) -> Any:
    """attnjourney.torch_ops and viz are imported when they are first asked for."""
    if name in ("torch_ops", "viz"):
        from importlib import import_module

        return import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Attention operators for PyTorch in C++: forward and backward, on CPU and CUDA."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from . import _requirements as _requirements  # isort: skip
from ._version import __version__ as __version__
from .block_mask import BlockMask as BlockMask
from .info import cpu_info as cpu_info
from .info import explain as explain
from .integrations import flash_registry as _flash_registry  # noqa: F401
from .ops import attention as attention
from .ops import attention_fp8 as attention_fp8
from .ops import attention_weights as attention_weights
from .ops import decode as decode
from .ops import gated_linear_attention as gated_linear_attention
from .ops import gpt_attention as gpt_attention
from .ops import gqa as gqa
from .ops import hadamard_signs as hadamard_signs
from .ops import infini_attention as infini_attention
from .ops import lightning_indexer as lightning_indexer
from .ops import lightning_indexer_loss as lightning_indexer_loss
from .ops import linear_attention as linear_attention
from .ops import longformer_attention as longformer_attention
from .ops import merge_states as merge_states
from .ops import mha as mha
from .ops import mla as mla
from .ops import mla_decode as mla_decode
from .ops import quantize_fp8 as quantize_fp8
from .ops import sparse_attention as sparse_attention
from .ops import tree_depths as tree_depths
from .ops import tree_mask as tree_mask
from .ops import varlen_attention as varlen_attention
from .positions import alibi_slopes as alibi_slopes
from .positions import rope as rope
from .positions import rope_frequencies as rope_frequencies
from .positions import sinusoidal_positions as sinusoidal_positions

if TYPE_CHECKING:  # what is imported when it is first asked for
    from . import accounting as accounting
    from . import nn as nn
    from . import reference as reference
    from . import replace as replace
    from . import seeing as seeing
    from . import torch_ops as torch_ops
    from . import viz as viz
    from .accounting import account as account
    from .integrations.activity import activity as activity
    from .integrations.sdpa import activate as activate
    from .integrations.sdpa import activated as activated
    from .integrations.sdpa import active as active
    from .integrations.sdpa import deactivate as deactivate
    from .nn.cache import KVCache as KVCache
    from .nn.cache import LatentCache as LatentCache
    from .nn.cache import WindowCache as WindowCache
    from .nn.cache_blocks import OutOfBlocks as OutOfBlocks
    from .nn.cache_paged import PagedKVCache as PagedKVCache
    from .nn.cache_paged import PagedLatentCache as PagedLatentCache
    from .nn.cache_prefix import prefix_keys as prefix_keys
    from .replace import replace_attention as replace_attention
    from .seeing.recording.capture import capture as capture
    from .seeing.recording.trace import trace as trace
    from .seeing.recording.trace import trace_module as trace_module
    from .seeing.recording.trace_state import trace_state as trace_state

_LATER = {  # the same as above, by module
    ".": ("accounting", "nn", "reference", "replace", "seeing", "torch_ops", "viz"),
    ".accounting": ("account",),
    ".integrations.activity": ("activity",),
    ".integrations.sdpa": ("activate", "activated", "active", "deactivate"),
    ".nn.cache": ("KVCache", "LatentCache", "WindowCache"),
    ".nn.cache_blocks": ("OutOfBlocks",),
    ".nn.cache_paged": ("PagedKVCache", "PagedLatentCache"),
    ".nn.cache_prefix": ("prefix_keys",),
    ".replace": ("replace_attention",),
    ".seeing.recording.capture": ("capture",),
    ".seeing.recording.trace": ("trace", "trace_module"),
    ".seeing.recording.trace_state": ("trace_state",),
}
_HOMES = {name: home for home, names in _LATER.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _import_module("." + name, __name__) if home == "." else getattr(_import_module(home, __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


__all__ = [name for name in __dir__() if name[0] != "_" and name not in ("Any", "TYPE_CHECKING")]

"""Public functions of the operators; importing this package registers them with PyTorch."""

from .attention import attention
from .attention_weights import attention_weights
from .decode import decode
from .gpt_attention import gpt_attention
from .gqa import gqa
from .infini_attention import infini_attention
from .linear_attention import linear_attention
from .longformer_attention import longformer_attention
from .merge_states import merge_states
from .mha import mha
from .mla import mla
from .mla_decode import mla_decode
from .rope import rope_with_tables
from .varlen_attention import varlen_attention

__all__ = [
    "attention",
    "attention_weights",
    "decode",
    "gpt_attention",
    "gqa",
    "infini_attention",
    "linear_attention",
    "longformer_attention",
    "merge_states",
    "mha",
    "mla",
    "mla_decode",
    "rope_with_tables",
    "varlen_attention",
]

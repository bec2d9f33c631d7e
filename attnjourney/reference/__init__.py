"""The operators in plain PyTorch, with the same signatures: slow, simple, differentiable to any order. In float64, the
oracle of the tests."""

from .attention import attention, attention_weights, dropout_keep_mask, merge_states, varlen_attention
from .decode import decode, mla_decode
from .gpt_attention import gpt_attention
from .gqa import gqa
from .infini_attention import infini_attention
from .linear_attention import linear_attention
from .longformer_attention import longformer_attention
from .mha import mha
from .mla import mla

__all__ = [
    "attention",
    "attention_weights",
    "decode",
    "dropout_keep_mask",
    "gpt_attention",
    "gqa",
    "infini_attention",
    "linear_attention",
    "longformer_attention",
    "merge_states",
    "mha",
    "mla",
    "mla_decode",
    "varlen_attention",
]

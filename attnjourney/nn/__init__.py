"""The attention layers as modules: parameters and one call of an operator."""

from .causal_self_attention import CausalSelfAttention
from .grouped_query_attention import GroupedQueryAttention
from .infini_attention import InfiniAttention
from .linear_attention import LinearAttention
from .longformer_self_attention import LongformerSelfAttention
from .multihead_attention import MultiheadAttention
from .multihead_latent_attention import MultiheadLatentAttention

__all__ = [
    "CausalSelfAttention",
    "GroupedQueryAttention",
    "InfiniAttention",
    "LinearAttention",
    "LongformerSelfAttention",
    "MultiheadAttention",
    "MultiheadLatentAttention",
]

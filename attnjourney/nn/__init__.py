"""The attention layers as modules: parameters and one call of an operator."""

from .causal_self_attention import CausalSelfAttention as CausalSelfAttention
from .grouped_query_attention import GroupedQueryAttention as GroupedQueryAttention
from .infini_attention import InfiniAttention as InfiniAttention
from .linear_attention import LinearAttention as LinearAttention
from .longformer_self_attention import LongformerSelfAttention as LongformerSelfAttention
from .multihead_attention import MultiheadAttention as MultiheadAttention
from .multihead_latent_attention import MultiheadLatentAttention as MultiheadLatentAttention

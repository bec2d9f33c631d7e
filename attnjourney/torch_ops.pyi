"""The operators of torch.ops.attnjourney, typed. Written by tools/torch_ops_stub.py from their schemas."""

# fmt: off

from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

class Operator(Generic[P, R]):
    """A torch._ops.OpOverloadPacket; `default` is its one overload."""

    default: Callable[P, R]
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

def _operator(schema: Callable[P, R]) -> Operator[P, R]: ...

# ---- Public

@_operator
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None
) -> Tensor: ...

@_operator
def attention_fp8(
    query: Tensor, key: Tensor, value: Tensor, query_scale: Tensor, key_scale: Tensor, value_scale: Tensor,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, key_lengths: Tensor | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, out_dtype: int = 0
) -> tuple[Tensor, Tensor]:
    """out, lse"""

@_operator
def attention_with_lse(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out, lse"""

@_operator
def block_attention(
    query: Tensor, key: Tensor, value: Tensor, block_offsets: Tensor, block_index: Tensor, block_partial: Tensor,
    block_elements: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False, causal_alignment: int = 0, window_size: Sequence[int] = [-1, -1], prefix_length: int = 0,
    key_lengths: Tensor | None = None, query_lengths: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0],
    dropout_seed: Tensor | None = None
) -> Tensor: ...

@_operator
def decode(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, block_table: Tensor | None = None,
    ring: bool = False, key_scale: Tensor | None = None, value_scale: Tensor | None = None, is_causal: bool = True,
    window_size: Sequence[int] = [-1, -1], scale: float | None = None, attn_mask: Tensor | None = None,
    prefix_length: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out, lse"""

@_operator
def gated_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None = None, beta: Tensor | None = None,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, *, update: int = 3, scale: float = 1.0,
    qk_l2norm: bool = False
) -> Tensor: ...

@_operator
def gpt_attention(
    x: Tensor, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor | None, out_weight: Tensor, out_bias: Tensor | None,
    *, dropout_p: float = 0.0
) -> Tensor: ...

@_operator
def gqa(
    x: Tensor, num_heads: int, num_kv_heads: int, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor,
    o_weight: Tensor, q_bias: Tensor | None = None, k_bias: Tensor | None = None, v_bias: Tensor | None = None,
    o_bias: Tensor | None = None, *, cos: Tensor | None = None, sin: Tensor | None = None, is_causal: bool = True
) -> Tensor: ...

@_operator
def kv_cache_append(
    key_cache: Tensor, value_cache: Tensor | None, lengths: Tensor, key: Tensor, value: Tensor | None, *,
    counts: Tensor | None = None, ring: bool = False, key_scale: Tensor | None = None, value_scale: Tensor | None = None
) -> None: ...

@_operator
def kv_cache_reorder(
    key_cache: Tensor, value_cache: Tensor | None, lengths: Tensor, batch_index: Tensor, *,
    key_scale: Tensor | None = None, value_scale: Tensor | None = None
) -> None: ...

@_operator
def kv_cache_truncate(
    lengths: Tensor, new_lengths: Tensor, *, lowest: Tensor | None = None
) -> None: ...

@_operator
def lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, topk: int, *, is_causal: bool = True, causal_alignment: int = 0,
    key_lengths: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """indices, scores"""

@_operator
def lightning_indexer_loss(
    index_query: Tensor, index_key: Tensor, weights: Tensor, query: Tensor, key: Tensor, indices: Tensor, *,
    index_scale: float = 1.0, scale: float | None = None, enable_gqa: bool = False
) -> Tensor: ...

@_operator
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
    initial_state: Tensor | None = None, initial_normalizer: Tensor | None = None, *, feature_map: int = 2,
    is_causal: bool = True, scale: float = 1.0, normalize: bool = True, eps: float = 1e-06
) -> Tensor: ...

@_operator
def mha(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int, in_proj_weight: Tensor, in_proj_bias: Tensor | None,
    out_proj_weight: Tensor, out_proj_bias: Tensor | None, *, attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None, is_causal: bool = False, dropout_p: float = 0.0
) -> Tensor: ...

@_operator
def mla(
    x: Tensor, num_heads: int, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int, q_a_weight: Tensor | None,
    q_a_norm_weight: Tensor | None, q_b_weight: Tensor, kv_a_weight: Tensor, kv_a_norm_weight: Tensor,
    kv_b_weight: Tensor, o_weight: Tensor, *, cos: Tensor | None = None, sin: Tensor | None = None,
    is_causal: bool = True, scale: float | None = None, eps: float = 1e-06
) -> Tensor: ...

@_operator
def mla_decode(
    query: Tensor, latent: Tensor, lengths: Tensor, kv_b_weight: Tensor, *, block_table: Tensor | None = None,
    latent_scale: Tensor | None = None, is_causal: bool = True, window_size: Sequence[int] = [-1, -1],
    scale: float | None = None, attn_mask: Tensor | None = None, prefix_length: int = 0, softcap: float = 0.0,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out, lse"""

@_operator
def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_table: Tensor,
    is_causal: bool = False, *, scale: float | None = None, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out, lse"""

@_operator
def paged_cache_append(
    key_cache: Tensor, value_cache: Tensor | None, lengths: Tensor, block_table: Tensor, block_refs: Tensor,
    key: Tensor, value: Tensor | None, *, counts: Tensor | None = None, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None
) -> None: ...

@_operator
def paged_cache_reorder(
    lengths: Tensor, block_table: Tensor, block_refs: Tensor, batch_index: Tensor
) -> None: ...

@_operator
def paged_cache_truncate(
    lengths: Tensor, block_table: Tensor, block_refs: Tensor, new_lengths: Tensor, *, block_size: int
) -> None: ...

@_operator
def rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, inverse: bool = False
) -> Tensor: ...

@_operator
def rope_(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> None: ...

@_operator
def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, *, scale: float | None = None, enable_gqa: bool = False,
    is_causal: bool = False, causal_alignment: int = 0, key_lengths: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, query_block_size: int = 1
) -> Tensor: ...

@_operator
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None
) -> Tensor: ...

# ---- Private: what the public operators are made of, their forwards and derivatives

@_operator
def attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    out: Tensor, lse: Tensor, stats: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None,
    need: int = 63
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_query, grad_key, grad_value, grad_attn_mask, grad_sinks, grad_alibi_slopes"""

@_operator
def attention_backward_jvp(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None,
    out: Tensor, lse: Tensor, stats: Tensor, out_tangent: Tensor, lse_tangent: Tensor,
    grad_out_tangent: Tensor | None = None, grad_lse_tangent: Tensor | None = None, query_tangent: Tensor | None = None,
    key_tangent: Tensor | None = None, value_tangent: Tensor | None = None, attn_mask_tangent: Tensor | None = None,
    sinks_tangent: Tensor | None = None, alibi_slopes_tangent: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None,
    need: int = 63
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_query_tangent, grad_key_tangent, grad_value_tangent, grad_attn_mask_tangent, grad_sinks_tangent,
    grad_alibi_slopes_tangent"""

@_operator
def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, stats"""

@_operator
def attention_jvp(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, out: Tensor, lse: Tensor, stats: Tensor,
    query_tangent: Tensor | None = None, key_tangent: Tensor | None = None, value_tangent: Tensor | None = None,
    attn_mask_tangent: Tensor | None = None, sinks_tangent: Tensor | None = None,
    alibi_slopes_tangent: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out_tangent, lse_tangent"""

@_operator
def block_attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, block_offsets: Tensor,
    block_index: Tensor, block_partial: Tensor, block_elements: Tensor, out: Tensor, lse: Tensor, stats: Tensor,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    causal_alignment: int = 0, window_size: Sequence[int] = [-1, -1], prefix_length: int = 0,
    key_lengths: Tensor | None = None, query_lengths: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0],
    dropout_seed: Tensor | None = None, need: int = 31
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_query, grad_key, grad_value, grad_sinks, grad_alibi_slopes"""

@_operator
def block_attention_backward_jvp(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, block_offsets: Tensor,
    block_index: Tensor, block_partial: Tensor, block_elements: Tensor, out: Tensor, lse: Tensor, stats: Tensor,
    out_tangent: Tensor, lse_tangent: Tensor, grad_out_tangent: Tensor | None = None,
    grad_lse_tangent: Tensor | None = None, query_tangent: Tensor | None = None, key_tangent: Tensor | None = None,
    value_tangent: Tensor | None = None, sinks_tangent: Tensor | None = None,
    alibi_slopes_tangent: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None,
    need: int = 31
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_query_tangent, grad_key_tangent, grad_value_tangent, grad_sinks_tangent, grad_alibi_slopes_tangent"""

@_operator
def block_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, block_offsets: Tensor, block_index: Tensor, block_partial: Tensor,
    block_elements: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False, causal_alignment: int = 0, window_size: Sequence[int] = [-1, -1], prefix_length: int = 0,
    key_lengths: Tensor | None = None, query_lengths: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0],
    dropout_seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, stats"""

@_operator
def block_attention_jvp(
    query: Tensor, key: Tensor, value: Tensor, block_offsets: Tensor, block_index: Tensor, block_partial: Tensor,
    block_elements: Tensor, out: Tensor, lse: Tensor, stats: Tensor, query_tangent: Tensor | None = None,
    key_tangent: Tensor | None = None, value_tangent: Tensor | None = None, sinks_tangent: Tensor | None = None,
    alibi_slopes_tangent: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out_tangent, lse_tangent"""

@_operator
def gated_linear_attention_backward(
    grad_out: Tensor | None, grad_state: Tensor | None, query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None,
    beta: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, *, update: int = 3,
    scale: float = 1.0, qk_l2norm: bool = False, need: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_query, grad_key, grad_value, grad_gate, grad_beta, grad_initial_state"""

@_operator
def gated_linear_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor | None = None, beta: Tensor | None = None,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, *, update: int = 3, scale: float = 1.0,
    qk_l2norm: bool = False
) -> tuple[Tensor, Tensor]:
    """out, state"""

@_operator
def gpt_attention_backward(
    grad_out: Tensor, x: Tensor, num_heads: int, qkv_weight: Tensor, out_weight: Tensor, attn: Tensor, lse: Tensor,
    stats: Tensor, qkv: Tensor, *, dropout_p: float = 0.0, dropout_seed: Tensor | None = None, need: int = 31
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_x, grad_qkv_weight, grad_qkv_bias, grad_out_weight, grad_out_bias"""

@_operator
def gpt_attention_forward(
    x: Tensor, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor | None, out_weight: Tensor, out_bias: Tensor | None,
    *, dropout_p: float = 0.0, dropout_seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, attn, lse, stats, qkv"""

@_operator
def gqa_backward(
    grad_out: Tensor, x: Tensor, num_heads: int, num_kv_heads: int, q_weight: Tensor, k_weight: Tensor,
    v_weight: Tensor, o_weight: Tensor, query: Tensor, key: Tensor, value: Tensor, attn: Tensor, lse: Tensor,
    stats: Tensor, *, cos: Tensor | None = None, sin: Tensor | None = None, is_causal: bool = True, need: int = 511
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_x, grad_q_weight, grad_k_weight, grad_v_weight, grad_o_weight, grad_q_bias, grad_k_bias, grad_v_bias,
    grad_o_bias"""

@_operator
def gqa_forward(
    x: Tensor, num_heads: int, num_kv_heads: int, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor,
    o_weight: Tensor, q_bias: Tensor | None = None, k_bias: Tensor | None = None, v_bias: Tensor | None = None,
    o_bias: Tensor | None = None, *, cos: Tensor | None = None, sin: Tensor | None = None, is_causal: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, query, key, value, attn, lse, stats"""

@_operator
def lightning_indexer_loss_backward(
    grad_loss: Tensor, index_query: Tensor, index_key: Tensor, weights: Tensor, indices: Tensor, grad_scores: Tensor, *,
    index_scale: float = 1.0, need: int = 7
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_index_query, grad_index_key, grad_weights"""

@_operator
def lightning_indexer_loss_forward(
    index_query: Tensor, index_key: Tensor, weights: Tensor, query: Tensor, key: Tensor, indices: Tensor, *,
    index_scale: float = 1.0, scale: float | None = None, enable_gqa: bool = False
) -> tuple[Tensor, Tensor]:
    """loss, grad_scores"""

@_operator
def linear_attention_backward(
    grad_out: Tensor, grad_denominator: Tensor | None, grad_state: Tensor | None, grad_normalizer: Tensor | None,
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, initial_state: Tensor | None,
    initial_normalizer: Tensor | None, out: Tensor, denominator: Tensor, *, feature_map: int = 2,
    is_causal: bool = True, scale: float = 1.0, normalize: bool = True, eps: float = 1e-06, need: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_query, grad_key, grad_value, grad_initial_state, grad_initial_normalizer"""

@_operator
def linear_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
    initial_state: Tensor | None = None, initial_normalizer: Tensor | None = None, *, feature_map: int = 2,
    is_causal: bool = True, scale: float = 1.0, normalize: bool = True, eps: float = 1e-06
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, denominator, state, normalizer"""

@_operator
def mha_backward(
    grad_out: Tensor, query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int, in_proj_weight: Tensor,
    out_proj_weight: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, attn: Tensor, lse: Tensor,
    stats: Tensor, projected: Tensor, *, is_causal: bool = False, dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None, need: int = 511
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_query, grad_key, grad_value, grad_in_proj_weight, grad_in_proj_bias, grad_out_proj_weight,
    grad_out_proj_bias, grad_attn_mask, grad_key_padding_mask"""

@_operator
def mha_forward(
    query: Tensor, key: Tensor | None, value: Tensor | None, num_heads: int, in_proj_weight: Tensor,
    in_proj_bias: Tensor | None, out_proj_weight: Tensor, out_proj_bias: Tensor | None, *,
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, is_causal: bool = False,
    dropout_p: float = 0.0, dropout_seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, attn, lse, stats, projected"""

@_operator
def mla_backward(
    grad_out: Tensor, x: Tensor, num_heads: int, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int,
    q_a_weight: Tensor | None, q_a_norm_weight: Tensor | None, q_b_weight: Tensor, kv_a_weight: Tensor,
    kv_a_norm_weight: Tensor, kv_b_weight: Tensor, o_weight: Tensor, query: Tensor, kv: Tensor, kv_a: Tensor,
    kv_rstd: Tensor, q_a: Tensor, q_rstd: Tensor, attn: Tensor, lse: Tensor, stats: Tensor, *,
    cos: Tensor | None = None, sin: Tensor | None = None, is_causal: bool = True, scale: float | None = None,
    need: int = 255
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_x, grad_q_a_weight, grad_q_a_norm_weight, grad_q_b_weight, grad_kv_a_weight, grad_kv_a_norm_weight,
    grad_kv_b_weight, grad_o_weight"""

@_operator
def mla_forward(
    x: Tensor, num_heads: int, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int, q_a_weight: Tensor | None,
    q_a_norm_weight: Tensor | None, q_b_weight: Tensor, kv_a_weight: Tensor, kv_a_norm_weight: Tensor,
    kv_b_weight: Tensor, o_weight: Tensor, *, cos: Tensor | None = None, sin: Tensor | None = None,
    is_causal: bool = True, scale: float | None = None, eps: float = 1e-06
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, query, kv, kv_a, kv_rstd, q_a, q_rstd, attn, lse, stats"""

@_operator
def sparse_attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, indices: Tensor, out: Tensor,
    lse: Tensor, stats: Tensor, *, scale: float | None = None, enable_gqa: bool = False, is_causal: bool = False,
    causal_alignment: int = 0, key_lengths: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    query_block_size: int = 1, need: int = 15
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """grad_query, grad_key, grad_value, grad_sinks"""

@_operator
def sparse_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, *, scale: float | None = None, enable_gqa: bool = False,
    is_causal: bool = False, causal_alignment: int = 0, key_lengths: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, query_block_size: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, stats"""

@_operator
def varlen_attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, out: Tensor, lse: Tensor, stats: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, causal_alignment: int = 0, window_size: Sequence[int] = [-1, -1],
    prefix_length: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None, need: int = 31
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_query, grad_key, grad_value, grad_sinks, grad_alibi_slopes"""

@_operator
def varlen_attention_backward_jvp(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, out: Tensor, lse: Tensor, stats: Tensor, out_tangent: Tensor, lse_tangent: Tensor,
    grad_out_tangent: Tensor | None = None, grad_lse_tangent: Tensor | None = None, query_tangent: Tensor | None = None,
    key_tangent: Tensor | None = None, value_tangent: Tensor | None = None, sinks_tangent: Tensor | None = None,
    alibi_slopes_tangent: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, causal_alignment: int = 0, window_size: Sequence[int] = [-1, -1],
    prefix_length: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None, need: int = 31
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """grad_query_tangent, grad_key_tangent, grad_value_tangent, grad_sinks_tangent, grad_alibi_slopes_tangent"""

@_operator
def varlen_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, stats"""

@_operator
def varlen_attention_jvp(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor, lse: Tensor,
    stats: Tensor, query_tangent: Tensor | None = None, key_tangent: Tensor | None = None,
    value_tangent: Tensor | None = None, sinks_tangent: Tensor | None = None,
    alibi_slopes_tangent: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, causal_alignment: int = 0, window_size: Sequence[int] = [-1, -1],
    prefix_length: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out_tangent, lse_tangent"""

# ---- Private: the others

@_operator
def _attention_weights(
    query: Tensor, key: Tensor, lse: Tensor, stats: Tensor | None, rows: Tensor, heads: Tensor,
    attn_mask: Tensor | None = None, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    causal_alignment: int = 0, window_size: Sequence[int] = [-1, -1], prefix_length: int = 0,
    key_lengths: Tensor | None = None, query_lengths: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0],
    dropout_seed: Tensor | None = None
) -> Tensor: ...

@_operator
def _block_attention_weights(
    query: Tensor, key: Tensor, lse: Tensor, stats: Tensor | None, rows: Tensor, heads: Tensor, block_offsets: Tensor,
    block_index: Tensor, block_partial: Tensor, block_elements: Tensor, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, causal_alignment: int = 0,
    window_size: Sequence[int] = [-1, -1], prefix_length: int = 0, key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0], dropout_seed: Tensor | None = None
) -> Tensor: ...

@_operator
def _cpu_info() -> Tensor: ...

@_operator
def _deterministic_algorithms() -> bool: ...

@_operator
def _explain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, block_offsets: Tensor | None = None,
    block_index: Tensor | None = None, block_partial: Tensor | None = None, block_elements: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    causal_alignment: int = 0, window_size: Sequence[int] = [-1, -1], prefix_length: int = 0,
    key_lengths: Tensor | None = None, query_lengths: Tensor | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, origin: Sequence[int] = [0, 0, 0, 0],
    dropout_seed: Tensor | None = None
) -> Tensor: ...

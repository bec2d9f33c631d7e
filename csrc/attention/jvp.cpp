// Schemas of the derivatives in a direction, of attention and of its backward. A tangent has the shape and dtype of
// what it belongs to; None stands for zero. attention_backward_jvp takes the tangents of out and lse that attention_jvp
// gives.
#include <torch/csrc/stable/library.h>

#include "schema.h"

#define ATTNJOURNEY_TANGENTS "Tensor? query_tangent=None, Tensor? key_tangent=None, Tensor? value_tangent=None, "
#define ATTNJOURNEY_HEAD_TANGENTS "Tensor? sinks_tangent=None, Tensor? alibi_slopes_tangent=None, "
#define ATTNJOURNEY_GRADIENT_TANGENTS "Tensor? grad_out_tangent=None, Tensor? grad_lse_tangent=None, "

STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def("attention_jvp(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor out, Tensor lse, "  //
        ATTNJOURNEY_TANGENTS "Tensor? attn_mask_tangent=None, " ATTNJOURNEY_HEAD_TANGENTS
        "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False, "  //
        ATTNJOURNEY_ATTENTION_OPTIONS ") -> (Tensor out_tangent, Tensor lse_tangent)");
  m.def(
      "attention_backward_jvp(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask, Tensor out, Tensor lse, Tensor out_tangent, Tensor lse_tangent, "  //
      ATTNJOURNEY_GRADIENT_TANGENTS ATTNJOURNEY_TANGENTS "Tensor? attn_mask_tangent=None, " ATTNJOURNEY_HEAD_TANGENTS
      "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False, "  //
      ATTNJOURNEY_ATTENTION_OPTIONS
      ", int need=63) -> (Tensor grad_query_tangent, Tensor grad_key_tangent, Tensor grad_value_tangent, "
      "Tensor grad_attn_mask_tangent, Tensor grad_sinks_tangent, Tensor grad_alibi_slopes_tangent)");
  m.def(
      "varlen_attention_jvp(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "Tensor out, Tensor lse, " ATTNJOURNEY_TANGENTS ATTNJOURNEY_HEAD_TANGENTS
      "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, "  //
      ATTNJOURNEY_VARLEN_OPTIONS ") -> (Tensor out_tangent, Tensor lse_tangent)");
  m.def(
      "varlen_attention_backward_jvp(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out, Tensor lse, Tensor out_tangent, Tensor lse_tangent, "  //
      ATTNJOURNEY_GRADIENT_TANGENTS ATTNJOURNEY_TANGENTS ATTNJOURNEY_HEAD_TANGENTS
      "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, "  //
      ATTNJOURNEY_VARLEN_OPTIONS
      ", int need=31) -> (Tensor grad_query_tangent, Tensor grad_key_tangent, Tensor grad_value_tangent, "
      "Tensor grad_sinks_tangent, Tensor grad_alibi_slopes_tangent)");
}

// Schemas of attention under a mask of blocks (see BlockTensors in attention.h) and of what is derived from it: those
// of attention with four tensors in place of attn_mask. `need`: 1 query, 2 key, 4 value, 8 sinks, 16 alibi_slopes.
#include <torch/csrc/stable/library.h>

#include "schema.h"

#define ATTNJOURNEY_BLOCKS "Tensor block_offsets, Tensor block_index, Tensor block_partial, Tensor block_elements, "
#define ATTNJOURNEY_BLOCK_TANGENTS                                                     \
  "Tensor? query_tangent=None, Tensor? key_tangent=None, Tensor? value_tangent=None, " \
  "Tensor? sinks_tangent=None, Tensor? alibi_slopes_tangent=None, "
#define ATTNJOURNEY_BLOCK_CALL                                             \
  "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool " \
  "enable_gqa=False, " ATTNJOURNEY_ATTENTION_OPTIONS

STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def("block_attention(Tensor query, Tensor key, Tensor value, "  //
        ATTNJOURNEY_BLOCKS ATTNJOURNEY_BLOCK_CALL ") -> Tensor");
  m.def("block_attention_forward(Tensor query, Tensor key, Tensor value, "  //
        ATTNJOURNEY_BLOCKS ATTNJOURNEY_BLOCK_CALL ") -> (Tensor out, Tensor lse)");
  m.def(
      "block_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor "
      "value, " ATTNJOURNEY_BLOCKS "Tensor out, Tensor lse, " ATTNJOURNEY_BLOCK_CALL
      ", int need=31) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks, "
      "Tensor grad_alibi_slopes)");
  m.def("block_attention_jvp(Tensor query, Tensor key, Tensor value, "  //
        ATTNJOURNEY_BLOCKS "Tensor out, Tensor lse, " ATTNJOURNEY_BLOCK_TANGENTS ATTNJOURNEY_BLOCK_CALL
        ") -> (Tensor out_tangent, Tensor lse_tangent)");
  m.def(
      "block_attention_backward_jvp(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor "
      "value, " ATTNJOURNEY_BLOCKS
      "Tensor out, Tensor lse, Tensor out_tangent, Tensor lse_tangent, "
      "Tensor? grad_out_tangent=None, Tensor? grad_lse_tangent=None, " ATTNJOURNEY_BLOCK_TANGENTS ATTNJOURNEY_BLOCK_CALL
      ", int need=31) -> (Tensor grad_query_tangent, Tensor grad_key_tangent, Tensor grad_value_tangent, "
      "Tensor grad_sinks_tangent, Tensor grad_alibi_slopes_tangent)");
  m.def("_block_attention_weights(Tensor query, Tensor key, Tensor lse, Tensor rows, Tensor heads, "  //
        ATTNJOURNEY_BLOCKS "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, "      //
        ATTNJOURNEY_ATTENTION_OPTIONS ") -> Tensor");
}

// CUDA's backend, and its operators.
#include "core/backend.h"

#include "attention/attention_cuda.h"
#include "cache/caches_cuda.h"
#include "decode/decode_cuda.h"
#include "decode/mla_decode_cuda.h"
#include "layers/rows_cuda.h"
#include "linear/linear_cuda.h"
#include "registration.h"
#include "sparse/sparse_cuda.h"

namespace attnjourney {

constexpr Backend cuda_backend{
    .attention = {.forward = cuda_attention_forward,
                  .backward = cuda_attention_backward,
                  .jvp = cuda_attention_jvp,
                  .backward_jvp = cuda_attention_backward_jvp,
                  .weights = cuda_attention_weights},
    .decode = {.decode = cuda_decode,
               .decode_latents = cuda_decode_latents,
               .products = aten_head_products,
               .dequantize = cuda_dequantize,
               .most_head_dim = most_decode_dim},
    .caches = {.append = cuda_cache_append,
               .truncate = cuda_cache_truncate,
               .reorder = cuda_cache_reorder,
               .paged_append = cuda_paged_append,
               .paged_truncate = cuda_paged_truncate,
               .paged_reorder = cuda_paged_reorder},
    .linear = {.forward = cuda_linear_forward, .backward = cuda_linear_backward},
    .gated = {.forward = cuda_gated_forward, .backward = cuda_gated_backward},
    .sparse = {.forward = cuda_sparse_forward, .backward = cuda_sparse_backward},
    .indexer = {.topk = cuda_indexer_topk, .loss = cuda_indexer_loss, .loss_backward = cuda_indexer_loss_backward},
    .rotary = cuda_rotary,
    .rms_norm = {.forward = cuda_rms_forward, .apply = cuda_rms_apply, .backward = cuda_rms_backward},
};

}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CUDA, m) { attnjourney::register_operators<attnjourney::cuda_backend>(m); }

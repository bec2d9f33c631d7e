// The CPU's backend, and its operators.
#include "core/backend.h"

#include "cpu/attention/attention_cpu.h"
#include "cpu/decode/decode_cpu.h"
#include "cpu/layers/rows_cpu.h"
#include "cpu/linear/linear_cpu.h"
#include "cpu/sparse/sparse_cpu.h"
#include "registration.h"

namespace attnjourney {

constexpr Backend cpu_backend{
    .attention = {.forward = cpu_attention_forward,
                  .backward = cpu_attention_backward,
                  .jvp = cpu_attention_jvp,
                  .backward_jvp = cpu_attention_backward_jvp,
                  .weights = cpu_attention_weights},
    .decode = {.decode = cpu_decode,
               .decode_latents = cpu_decode,
               .products = cpu_head_products,
               .dequantize = cpu_dequantize},
    .caches = {.append = cpu_cache_append,
               .truncate = cpu_cache_truncate,
               .reorder = cpu_cache_reorder,
               .paged_append = cpu_paged_append,
               .paged_truncate = cpu_paged_truncate,
               .paged_reorder = cpu_paged_reorder},
    .linear = {.forward = cpu_linear_forward, .backward = cpu_linear_backward},
    .gated = {.forward = cpu_gated_forward, .backward = cpu_gated_backward},
    .sparse = {.forward = cpu_sparse_forward, .backward = cpu_sparse_backward},
    .indexer = {.topk = cpu_indexer_topk, .loss = cpu_indexer_loss, .loss_backward = cpu_indexer_loss_backward},
    .rotary = cpu_rotary,
    .rms_norm = {.forward = cpu_rms_forward, .apply = cpu_rms_apply, .backward = cpu_rms_backward},
};

}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) { attnjourney::register_operators<attnjourney::cpu_backend>(m); }

// What the kernels of a call need of shared memory. A block may have 227 KB on compute capability 9.0 and 10.x, 163 on
// 8.0 and 8.7, 99 on 8.6, 8.9 and 12.x: what does not fit there runs in smaller tiles (inst/pick.h) or is refused.
#pragma once
#include "../attention.h"
#include "../linear_attention.h"
#include "launch.h"
#include "options.h"

namespace attnjourney {

// Does the backward take the kernels with options? Where shared memory is small, in plain calls too: of theirs there
// are smaller ones.
inline bool backward_takes_options(const AttentionCall& c, const AttentionOptions& o, int allowed) {
  const bool of_16_bits = c.dtype == ScalarType::BFloat16 || c.dtype == ScalarType::Half;
  return has_options(c, o) || (of_16_bits && allowed < kMiddleShared);
}

// A block of the largest kernel of the call fits into `allowed` bytes: what the GPU has. Hopper's own kernels fit where
// they run.
void check_forward_memory(const AttentionCall&, bool options, int allowed);
void check_backward_memory(const AttentionCall&, bool options, bool mask_gradient, int allowed);
void check_linear_memory(const LinearCall&, bool backward, int allowed);

}  // namespace attnjourney

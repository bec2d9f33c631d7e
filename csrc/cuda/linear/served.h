// What the CUDA kernels of linear attention serve: everything else is refused, by name.
#pragma once
#include "linear/linear_attention.h"

namespace attnjourney {

inline void check_served(const LinearCall& c) {
  const LinearParams& p = c.params;
  check_value(p.head_dim <= 256 && p.v_head_dim <= 256, "query: expected head dimensions of at most 256 on CUDA, got ",
              p.head_dim, " and (value) ", p.v_head_dim);
  const int64_t limit = 1 << 28;
  check_value(p.q_len < limit && p.kv_len < limit && c.batch * c.q_heads < limit,
              "query: expected fewer than 2^28 rows, keys and heads on CUDA");
}

}  // namespace attnjourney

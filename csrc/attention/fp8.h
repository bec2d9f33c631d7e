// Attention over queries, keys and values in float8_e4m3fn with a scale for each block of rows: the operator
// `attention_fp8` (no derivatives), and what is checked of it besides check_attention.
#pragma once
#include "attention.h"

namespace attnjourney {

struct Backend;

inline void check_e4m3(const char* name, const Tensor& t) {
  check_dtype(dtype_of(t) == ScalarType::Float8_e4m3fn, name, t, "dtype torch.float8_e4m3fn");
  check_extent(name, t);
}
// of a call whose tensors are checked; sets what leads to its scales
void check_fp8_scales(AttentionCall& call);

std::tuple<Tensor, Tensor> attention_fp8(const Backend&, Arguments&);  // out, lse

}  // namespace attnjourney

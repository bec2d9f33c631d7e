// Numbers per head, [heads] or [batch, heads], as kernels read them.
#pragma once
#include "core/aten.h"

namespace attnjourney {

// Dense, of that type and these sizes, which `t` expands to: itself where it is so, else a copy on like's device.
inline OptionalTensor per_head(const OptionalTensor& t, const std::vector<int64_t>& sizes, ScalarType type,
                               const Tensor& like) {
  if (!t) return std::nullopt;
  int64_t count = 1;
  for (const int64_t n : sizes) count *= n;
  const bool same = t->scalar_type() == type && t->device() == like.device();
  if (same && t->numel() == count && t->is_contiguous()) return t;
  Tensor copy = aten::empty(like, sizes, type);
  torch::stable::copy_(copy, *t);
  return copy;
}

}  // namespace attnjourney

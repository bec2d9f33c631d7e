// What the entries of sparse attention and of its indexer share: tensors as their kernels read them.
#pragma once
#include <vector>

#include "core/aten.h"
#include "cuda/kernels/common/forward_task.cuh"

namespace attnjourney {

inline constexpr int64_t kSparseWorkspace = int64_t{256} << 20;  // bytes of pairs (SparseParts), of lists (TopkPlan)

// Whole chunks of 16 bytes, wherever a row begins?
inline bool in_whole_chunks(const Tensor& t) {
  const int64_t chunk = 16 / t.element_size(), last = t.dim() - 1;
  bool whole = t.size(last) % chunk == 0 && reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  for (int64_t d = 0; d < last; d++) whole = whole && (t.size(d) <= 1 || t.stride(d) % chunk == 0);
  return whole;
}
// [batch, heads, length, dim], or without heads
inline Strides strides_of(const Tensor& t) {
  return t.dim() == 4 ? Strides{t.stride(0), t.stride(1), t.stride(2)} : Strides{t.stride(0), 0, t.stride(1)};
}

// Tensors that kernels read live as long as this.
class KeptTensors {
 public:
  const Tensor& keep(const Tensor& t) { return kept_.emplace_back(t); }
  // Rows are dense; in whole chunks where `chunked`, by a copy if need be.
  Tensor rows_of(const Tensor& t, bool chunked) {
    const Tensor x = aten::rows_contiguous(t);
    if (!chunked || in_whole_chunks(x)) return keep(x);
    return keep(torch::stable::contiguous(torch::stable::clone(aten::contiguous(x))));
  }
  Tensor scratch(const Tensor& like, int64_t count, ScalarType type) { return keep(aten::empty(like, {count}, type)); }

 private:
  std::vector<Tensor> kept_;
};

// The workspace of run_key_gradients; sums: in the type of the arithmetic.
template <class Pairs, class Parts>
Pairs pairs_of(KeptTensors& kept, const Tensor& like, const Parts& parts, int index_heads, ScalarType type) {
  const auto numbers = [&](int64_t count) {
    return static_cast<uint32_t*>(kept.scratch(like, count, ScalarType::Int).data_ptr());
  };
  Pairs pairs{};
  pairs.lists.index_heads = index_heads;
  pairs.lists.masks = numbers(parts.masks), pairs.lists.repeats = numbers(parts.repeats);
  pairs.lists.begins = reinterpret_cast<int*>(numbers(parts.begins));
  pairs.lists.totals = reinterpret_cast<int*>(numbers(parts.totals));
  pairs.pairs = kept.scratch(like, parts.pairs, type).data_ptr();
  return pairs;
}

}  // namespace attnjourney

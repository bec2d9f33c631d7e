// The tensors of linear attention as its kernels read them.
#pragma once
#include <cstdint>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels/linear/task.cuh"

namespace attnjourney {

// Kept alive until the launches are made.
class Operands {
 public:
  // t, its last dimension dense
  LinearRows rows(const Tensor& t, FeatureMap map = FeatureMap::identity, double factor = 1,
                  const uint8_t* blocked = nullptr) {
    const Tensor x = keep(aten::rows_contiguous(t));
    const int64_t per_chunk = 16 / x.element_size();
    bool chunks = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && x.size(3) % per_chunk == 0;
    for (int d = 0; d < 3; d++) chunks = chunks && (x.size(d) <= 1 || x.stride(d) % per_chunk == 0);
    return {.data = x.data_ptr(),
            .batch = x.stride(0),
            .head = x.stride(1),
            .row = x.stride(2),
            .cols = static_cast<int>(x.size(3)),
            .map = map,
            .factor = factor,
            .scales = nullptr,
            .blocked = blocked,
            .chunks = chunks};
  }
  void* dense(const OptionalTensor& t) { return t && t->numel() ? keep(aten::contiguous(*t)).data_ptr() : nullptr; }
  Tensor scratch(const Tensor& like, int64_t numbers, ScalarType dtype) {
    return keep(aten::empty(like, {numbers}, dtype));
  }

  Tensor keep(const Tensor& t) { return kept_.emplace_back(t); }

 private:
  std::vector<Tensor> kept_;
};

inline void* data_of(const Tensor& t) { return t.numel() ? t.data_ptr() : nullptr; }

}  // namespace attnjourney

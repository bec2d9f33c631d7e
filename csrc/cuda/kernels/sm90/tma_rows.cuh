// Rows of a tensor by TMA where some of them count as zeros whatever memory holds, so that NaN in padding costs
// nothing: by boxes of 8 rows and of one row.
#pragma once
#include "cuda/ptx/sm90.cuh"

namespace attnjourney {

// Loads Rows rows of one head from `row` on, in panels of 64 columns, as a box of `whole` would; rows from `end` on are
// zeros, whatever the tensor (of `length` rows) has there. eight, one: boxes of 8 rows and of one.
template <int Rows, int Panels>
__device__ __forceinline__ void tma_load_rows(uint32_t dst, const ptx::TensorMap& whole, const ptx::TensorMap& eight,
                                              const ptx::TensorMap& one, int row, int end, int length, int head,
                                              int batch, uint32_t bar) {
  if (end >= min(row + Rows, length)) {
#pragma unroll
    for (int panel = 0; panel < Panels; panel++)
      ptx::tma_load_4d(dst + panel * Rows * 128, &whole, panel * 64, head, row, batch, bar);
    return;
  }
#pragma unroll 1
  for (int panel = 0; panel < Panels; panel++)
#pragma unroll 1
    for (int r = 0; r < Rows; r += 8) {
      const uint32_t to = dst + (panel * Rows + r) * 128;
      const int left = end - row - r;  // rows of these eight that count; past the tensor's end TMA fills in zeros
      if (left >= 8 || left <= 0) {
        ptx::tma_load_4d(to, &eight, panel * 64, head, left > 0 ? row + r : length, batch, bar);
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < 8; i++)
        ptx::tma_load_4d(to + i * 128, &one, panel * 64, head, i < left ? row + r + i : length, batch, bar);
    }
}

}  // namespace attnjourney

// Tensor maps for TMA, encoded by the driver, which is looked up when first needed: the library loads without one.
#pragma once
#include <cuda.h>

#include "launch.h"

namespace attnjourney {

// A tensor [batch, heads, length, dim] of 16-bit numbers in boxes of 64 columns by `rows` rows of one head, with
// 128-byte swizzle. Coordinates: column, head, row, batch.
inline CUtensorMap tensor_map(const void* data, const Strides& s, int64_t batch, int64_t heads, int64_t length, int dim,
                              int rows, bool bf16) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
               "cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess)
      throw std::runtime_error("cuTensorMapEncodeTiled: expected a driver for CUDA 12.0 or later");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  const auto u = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t size[4] = {u(dim), u(heads), u(length), u(batch)};
  const cuuint64_t stride[3] = {2 * u(s.head), 2 * u(s.row), 2 * u(s.batch)};
  const cuuint32_t box[4] = {64, 1, static_cast<cuuint32_t>(rows), 1}, step[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult e =
      encode(&map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
             const_cast<void*>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (e != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled failed with " + std::to_string(e));
  return map;
}

}  // namespace attnjourney

// Tensor maps for TMA, encoded by the driver, which is looked up when first needed: the library loads without one.
#pragma once
#include <cuda.h>

#include <memory>

#include "launch.h"
#include "recent_cache.h"

namespace attnjourney {

enum class MapElement : int8_t { fp16, bf16, byte };

// A tensor [batch, heads, length, dim] in boxes of `line` bytes, 128 or 64, by `rows` rows of one head.
struct TensorMapOf {
  const void* data;
  Strides strides;
  int64_t batch, heads, length;
  int dim, rows, line;
  MapElement element;
  bool operator==(const TensorMapOf&) const = default;
};

// With the swizzle of `line` bytes. Coordinates: column, head, row, batch.
inline CUtensorMap encode_tensor_map(const TensorMapOf& t) {
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
  const cuuint64_t size[4] = {u(t.dim), u(t.heads), u(t.length), u(t.batch)};
  // the stride of one item is unused and may be 0; a multiple of 16 bytes is required all the same
  const int size_of = t.element == MapElement::byte ? 1 : 2;
  const auto bytes = [&](int64_t items, int64_t stride) { return items > 1 ? u(size_of) * u(stride) : 16; };
  const cuuint64_t stride[3] = {bytes(t.heads, t.strides.head), bytes(t.length, t.strides.row),
                                bytes(t.batch, t.strides.batch)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(t.line / size_of), 1, static_cast<cuuint32_t>(t.rows), 1};
  const cuuint32_t step[4] = {1, 1, 1, 1};
  constexpr CUtensorMapDataType types[] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                           CU_TENSOR_MAP_DATA_TYPE_UINT8};
  CUtensorMap map;
  const CUresult e =
      encode(&map, types[static_cast<int>(t.element)], 4, const_cast<void*>(t.data), size, stride, box, step,
             CU_TENSOR_MAP_INTERLEAVE_NONE, t.line == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (e != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled failed with " + std::to_string(e));
  return map;
}

// A map holds an address and sizes alone, so those of a training step, whose memory the allocator gives again, serve
// the next step as well.
inline CUtensorMap tensor_map(const void* data, const Strides& s, int64_t batch, int64_t heads, int64_t length, int dim,
                              int rows, MapElement element, int line) {
  thread_local const auto recent = std::make_unique<Recent<TensorMapOf, CUtensorMap, 1024>>();
  const TensorMapOf t{.data = data,
                      .strides = s,
                      .batch = batch,
                      .heads = heads,
                      .length = length,
                      .dim = dim,
                      .rows = rows,
                      .line = line,
                      .element = element};
  const uint64_t mixed = (reinterpret_cast<uintptr_t>(data) >> 8 ^ uint64_t(rows) << 40) * 0x9e3779b97f4a7c15ull;
  return recent->get(t, mixed >> 40, [&] { return encode_tensor_map(t); });
}
inline CUtensorMap tensor_map(const void* data, const Strides& s, int64_t batch, int64_t heads, int64_t length, int dim,
                              int rows, bool bf16) {
  return tensor_map(data, s, batch, heads, length, dim, rows, bf16 ? MapElement::bf16 : MapElement::fp16, 128);
}

}  // namespace attnjourney

// What the CUDA entries of the caches share: tensors as rows of bytes.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <initializer_list>

#include "cuda/device.h"
#include "cuda/refusals.h"
#include "decode/kv_cache.h"
#include "launch_cache.h"

namespace attnjourney {

// the largest piece, of 16 bytes at most, in which rows of (outer, heads, slots, dim) can be copied
inline int unit_of(const Tensor& t) {
  const int64_t item = t.element_size();
  int64_t all = static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.data_ptr())) | t.size(3) * item | 16;
  for (int64_t d = 0; d < 3; d++) all |= stride_of(t, d) * item;
  return static_cast<int>(all & -all);
}

inline CacheRows rows_of(const Tensor& t) {
  const int64_t item = t.element_size();
  return {static_cast<unsigned char*>(t.data_ptr()), stride_of(t, 0) * item, stride_of(t, 1) * item,
          stride_of(t, 2) * item};
}

inline ByteKind byte_kind(const Tensor& cache) {
  return cache.scalar_type() == ScalarType::Char ? ByteKind::int8 : ByteKind::e4m3;
}
inline Number number_of(ScalarType t) {  // beside bytes
  return t == ScalarType::Float ? Number::fp32 : t == ScalarType::BFloat16 ? Number::bf16 : Number::fp16;
}

// The scales of caches of bytes, rows of one number.
inline CacheTensors scale_tensors(const OptionalTensor& key, const OptionalTensor& value) {
  CacheTensors c{};
  for (const OptionalTensor* t : {&key, &value})
    if (*t) c.cache[c.count] = rows_of(**t), c.units[c.count++] = 1;
  return c;
}

// Keys, and values where there are any. unit: what the rows of all tensors, those of `others` too, can be copied in.
inline CacheTensors cache_tensors(const Tensor& key, const OptionalTensor& value,
                                  std::initializer_list<const Tensor*> others, int& unit) {
  unit = unit_of(key);
  if (value) unit = std::min(unit, unit_of(*value));
  for (const Tensor* t : others) unit = std::min(unit, unit_of(*t));
  CacheTensors c{};
  c.count = value ? 2 : 1;
  for (int i = 0; i < c.count; i++) {
    const Tensor& t = i ? *value : key;
    c.cache[i] = rows_of(t), c.units[i] = static_cast<int>(t.size(3) * t.element_size() / unit);
  }
  return c;
}

// blocks for that many pieces of each sequence: one up to 64 KB
inline int append_parts(int64_t pieces) {
  return static_cast<int>(pieces <= 4096 ? 1 : std::min<int64_t>((pieces + 2047) / 2048, 1 << 15));
}

inline int64_t* numbers(const Tensor& t) { return static_cast<int64_t*>(t.data_ptr()); }
inline const int64_t* numbers(const OptionalTensor& t) { return t ? numbers(*t) : nullptr; }

// New tokens on their way into a cache; the copies live as long as this.
struct FreshTokens {
  Tensor key;
  OptionalTensor value;
  AppendTask task{};
  AppendBytes bytes{};  // of caches of bytes
  int unit = 0;
  explicit FreshTokens(const AppendInputs& in) : key(aten::rows_contiguous(in.key)) {
    if (in.value) value = aten::rows_contiguous(*in.value);
    if (in.key_scale)
      task.to = cache_tensors(in.key_cache, in.value_cache, {}, unit), describe_bytes(in);
    else
      task.to = value ? cache_tensors(in.key_cache, in.value_cache, {&key, &*value}, unit)
                      : cache_tensors(in.key_cache, in.value_cache, {&key}, unit);
    task.fresh[0] = rows_of(key);
    if (value) task.fresh[1] = rows_of(*value);
    task.lengths = numbers(in.lengths), task.counts = numbers(in.counts);
    task.batch = static_cast<int>(in.lengths.size(0)), task.heads = static_cast<int>(in.key.size(1));
    task.tokens = static_cast<int>(in.key.size(2)), task.capacity = static_cast<int>(in.key_cache.size(2));
    task.parts = append_parts(in.key.size(1) * in.key.size(2) * std::max(task.to.units[0], task.to.units[1]));
    check_value(in.key.size(1) * in.key.size(2) < int64_t{1} << 31 && in.key_cache.size(2) < int64_t{1} << 28,
                "key: expected fewer than 2^31 rows, and a cache of fewer than 2^28, on CUDA");
  }
  void append(cudaStream_t stream) const {
    if (bytes.kind == ByteKind::none)
      launch_cache_append(task, unit, stream);
    else
      launch_cache_append_bytes(task, bytes, number_of(key.scalar_type()), stream);
  }

 private:
  void describe_bytes(const AppendInputs& in) {
    const CacheTensors scales = scale_tensors(in.key_scale, in.value_scale);
    bytes.kind = byte_kind(in.key_cache);
    for (int i = 0; i < scales.count; i++) bytes.scale[i] = scales.cache[i];
    bytes.dim[0] = static_cast<int>(in.key_cache.size(3));
    if (in.value_cache) bytes.dim[1] = static_cast<int>(in.value_cache->size(3));
  }
};

inline void check_reorder_batch(int64_t batch) {
  check_value(batch <= reorder_batch, "batch_index: expected at most ", reorder_batch, " sequences on CUDA, got ",
              batch);
}

}  // namespace attnjourney

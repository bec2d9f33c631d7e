// Checks that the operators on caches share. Checked values are host memory: for CUDA they are checked on the device.
#pragma once
#include <algorithm>

#include "core/aten.h"
#include "core/checks.h"
#include "core/mask.h"

namespace attnjourney {

inline bool is_byte_dtype(ScalarType t) { return t == ScalarType::Char || t == ScalarType::Float8_e4m3fn; }

// The dtype of `like`, or beside a scale one of bytes. Then `like` may be of any dtype that has a smaller kind.
inline void check_cache_dtype(const char* name, const Tensor& cache, const char* scale_name,
                              const OptionalTensor& scale, const char* like_name, const Tensor& like) {
  if (!scale) {
    check_value(!is_byte_dtype(dtype_of(cache)), scale_name, ": expected a tensor beside ", name, " of ",
                dtype_text(dtype_of(cache)), ", got None");
    return check_same_dtype(name, cache, like_name, like);
  }
  check_dtype(is_byte_dtype(dtype_of(cache)), name, cache, "dtype torch.int8 or torch.float8_e4m3fn beside ",
              scale_name);
  const ScalarType t = dtype_of(like);
  check_dtype(is_attention_dtype(t) && t != ScalarType::Double, like_name, like,
              "dtype torch.float32, torch.bfloat16 or torch.float16 beside ", scale_name);
}

// (batch or blocks, heads, capacity or block size, dim), dense last dimension; batch < 0: any. Its dtype is checked
// elsewhere.
inline void check_cache_layout(const char* name, const Tensor& cache, int64_t batch, const char* like_name,
                               const Tensor& like) {
  check_dim(name, cache, 4);
  check_same_device(name, cache, like_name, like);
  check_value(batch < 0 || cache.size(0) == batch, name, ": expected the batch size of ", like_name, ", ", batch,
              ", in dimension 0, got shape ", shape_text(cache));
  check_value(cache.size(3) > 0, name, ": expected a last dimension of at least 1, got shape ", shape_text(cache));
  check_value(cache.stride(3) == 1 || cache.size(3) == 1, name, ": expected a dense last dimension, got stride ",
              cache.stride(3));
}

// Caches of keys and of values, (batch or blocks, heads, capacity or block size, dim), beside query; their
// dtypes are the caller's.
inline void check_caches(const Tensor& key, const Tensor& value, int64_t batch, const Tensor& query, int64_t q_heads,
                         int64_t head_dim) {
  check_cache_layout("key", key, batch, "query", query);
  check_cache_layout("value", value, batch, "query", query);
  const int64_t heads = key.size(1);
  check_value(heads > 0 ? q_heads % heads == 0 : q_heads == 0, "key: expected a head count that divides query's, ",
              q_heads, ", got ", heads, " (key has shape ", shape_text(key), ")");
  check_value(key.size(3) == head_dim, "key: expected the head_dim of query, ", head_dim, ", got shape ",
              shape_text(key));
  check_value(value.size(0) == key.size(0) && value.size(1) == heads && value.size(2) == key.size(2),
              "value: expected the shape of key but for the last dimension (key has shape ", shape_text(key),
              "), got shape ", shape_text(value));
}

// a cache in the dtype of `like`
inline void check_cache(const char* name, const Tensor& cache, int64_t batch, const char* like_name,
                        const Tensor& like) {
  check_same_dtype(name, cache, like_name, like);
  check_cache_layout(name, cache, batch, like_name, like);
}

// float32, of the shape of a cache, of any rank, but for the last dimension
inline void check_scale_of(const char* name, const Tensor& s, const char* cache_name, const Tensor& cache) {
  check_dtype(dtype_of(s) == ScalarType::Float, name, s, "dtype torch.float32");
  bool fits = s.dim() + 1 == cache.dim();
  for (int64_t d = 0; fits && d < s.dim(); d++) fits = s.size(d) == cache.size(d);
  check_tensor(fits, name, s, ": expected the shape of ", cache_name, " but for its last dimension (", cache_name,
               " has shape ", shape_text(cache), "), got shape ", shape_text(s));
  check_same_device(name, s, cache_name, cache);
}

// the same of (batch or blocks, heads, capacity or block size, dim), dense in the last
inline void check_cache_scale(const char* name, const OptionalTensor& scale, const char* cache_name,
                              const Tensor& cache) {
  if (!scale) return;
  check_scale_of(name, *scale, cache_name, cache);
  check_value(scale->stride(2) == 1 || scale->size(2) <= 1, name, ": expected a dense last dimension, got stride ",
              scale->stride(2));
}

// both caches of one kind
inline void check_scale_pair(const OptionalTensor& key_scale, const OptionalTensor& value_scale) {
  check_value(key_scale.has_value() == value_scale.has_value(),
              "value_scale: expected a tensor beside key_scale, and None without one");
}

// (batch,) int64, dense
inline void check_lengths_tensor(const char* name, const Tensor& lengths, int64_t batch, const char* like_name,
                                 const Tensor& like) {
  check_dtype(dtype_of(lengths) == ScalarType::Long, name, lengths, "dtype torch.int64");
  check_value(lengths.dim() == 1 && lengths.size(0) == batch, name, ": expected shape (", batch, ",), got ",
              shape_text(lengths));
  check_same_device(name, lengths, like_name, like);
  check_value(lengths.is_contiguous(), name, ": expected a contiguous tensor");
}

// (batch, max_blocks) int32, dense
inline void check_block_table(const Tensor& table, int64_t batch, const char* like_name, const Tensor& like) {
  check_dtype(dtype_of(table) == ScalarType::Int, "block_table", table, "dtype torch.int32");
  check_value(table.dim() == 2 && table.size(0) == batch, "block_table: expected shape (", batch, ", max_blocks), got ",
              shape_text(table));
  check_same_device("block_table", table, like_name, like);
  check_value(table.is_contiguous(), "block_table: expected a contiguous tensor");
}

// max_blocks blocks of that many tokens each
inline void check_block_size(const char* what, int64_t block_size, const Tensor& table) {
  const int64_t most = KeyRanges::unbounded / std::max<int64_t>(1, table.size(1));
  check_value(block_size > 0 && block_size <= most, what, " of at least 1 and at most ", most,
              " beside a block_table of shape ", shape_text(table), ", got ", block_size);
}

// The values of one row of a block_table in host memory, as far as its `length` keys reach.
inline void check_blocks_of(const Tensor& table, int64_t row, int64_t length, const Tensor& key) {
  const int64_t blocks = key.size(0), block_size = key.size(2);
  const int32_t* const block = static_cast<const int32_t*>(table.const_data_ptr()) + row * table.size(1);
  for (int64_t j = 0; j * block_size < length; j++)
    check_value(block[j] >= 0 && block[j] < blocks, "block_table: expected blocks from 0 to ", blocks - 1, ", got ",
                block[j], " at (", row, ", ", j, ")");
}

// 0 <= value <= limit, `what` saying what the limit is
inline void check_length(const char* name, int64_t row, int64_t value, int64_t limit, const char* what) {
  check_value(value >= 0 && value <= limit, name, ": expected numbers from 0 to ", what, ", ", limit, ", got ", value,
              " for batch row ", row);
}

}  // namespace attnjourney

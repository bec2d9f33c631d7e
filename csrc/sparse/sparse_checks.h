// What the checks of sparse attention and of its indexer share.
#pragma once
#include "core/aten.h"
#include "core/checks.h"

namespace attnjourney {

// query heads per key/value head
inline int64_t check_grouped_heads(const Tensor& query, const Tensor& key, bool enable_gqa) {
  const int64_t heads = query.size(1), own = key.size(1);
  check_value(own > 0 ? heads > 0 && heads % own == 0 : heads == 0, "key: expected a head count that divides query's, ",
              heads, ", got ", own, " (key has shape ", shape_text(key), ")");
  check_value(enable_gqa || own == heads || own == 1, "key: expected ", heads, " heads (dimension -3) or 1, got ", own,
              " (shape ", shape_text(key), "); grouped heads need enable_gqa=True");
  return own > 0 ? heads / own : 1;
}

inline void check_indices(const Tensor& indices, bool per_head, int64_t batch, int64_t kv_heads, int64_t blocks,
                          const Tensor& query) {
  const ScalarType type = dtype_of(indices);
  check_dtype(type == ScalarType::Int || type == ScalarType::Long, "indices", indices,
              "dtype torch.int32 or torch.int64");
  const int64_t count = indices.dim() > 0 ? indices.size(indices.dim() - 1) : 0;
  const std::vector<int64_t> all = {batch, blocks, count}, own = {batch, kv_heads, blocks, count};
  check_value(has_shape(indices, per_head ? own : all), "indices: expected shape (batch, ceil(q_len / block), k) = (",
              batch, ", ", blocks, ", k) or (batch, kv_heads, ceil(q_len / block), k) = (", batch, ", ", kv_heads, ", ",
              blocks, ", k), got ", shape_text(indices));
  check_same_device("indices", indices, "query", query);
}

}  // namespace attnjourney

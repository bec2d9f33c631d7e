#include "kv_cache.h"

#include <torch/csrc/stable/library.h>

namespace attnjourney {
namespace {

void check_new(const char* name, const Tensor& t, const char* cache_name, const Tensor& cache, int64_t batch,
               int64_t count) {
  check_dim(name, t, 4);
  check_same_dtype(name, t, cache_name, cache);
  check_same_device(name, t, cache_name, cache);
  check_value(t.size(0) == batch && t.size(1) == cache.size(1) && t.size(2) == count && t.size(3) == cache.size(3),
              name, ": expected shape (", batch, ", ", cache.size(1), ", ", count, ", ", cache.size(3),
              ") (batch, heads, tokens, dim), got ", shape_text(t));
}

}  // namespace

void check_append(const AppendInputs& in, bool paged) {
  check_dim("lengths", in.lengths, 1);
  check_dim("key", in.key, 4);
  check_floating("key_cache", in.key_cache);
  const int64_t batch = in.lengths.size(0), count = in.key.size(2);
  check_cache("key_cache", in.key_cache, paged ? -1 : batch, "lengths", in.key_cache);
  check_lengths_tensor("lengths", in.lengths, batch, "key_cache", in.key_cache);
  check_new("key", in.key, "key_cache", in.key_cache, batch, count);
  check_value(in.value_cache.has_value() == in.value.has_value(),
              "value: expected a tensor beside value_cache, and "
              "None without one");
  if (in.value) {
    const Tensor &k = in.key_cache, &v = *in.value_cache;
    check_cache("value_cache", v, -1, "key_cache", k);
    check_value(v.size(0) == k.size(0) && v.size(1) == k.size(1) && v.size(2) == k.size(2),
                "value_cache: expected the shape of key_cache but for the last dimension (key_cache has shape ",
                shape_text(k), "), got shape ", shape_text(v));
    check_new("value", *in.value, "value_cache", v, batch, count);
  }
  if (in.counts) check_lengths_tensor("counts", *in.counts, batch, "key_cache", in.key_cache);
}

void check_paged(const Tensor& lengths, const Tensor& block_table, const Tensor& block_refs) {
  check_dim("lengths", lengths, 1);
  check_lengths_tensor("lengths", lengths, lengths.size(0), "lengths", lengths);
  check_block_table(block_table, lengths.size(0), "lengths", lengths);
  check_dim("block_refs", block_refs, 1);
  check_runtime(block_refs.scalar_type() == ScalarType::Int, "block_refs: expected dtype torch.int32, got ",
                dtype_text(block_refs.scalar_type()));
  check_same_device("block_refs", block_refs, "lengths", lengths);
  check_value(block_refs.is_contiguous(), "block_refs: expected a contiguous tensor");
}

void check_truncate(const Tensor& lengths, const Tensor& new_lengths, const OptionalTensor& lowest) {
  check_dim("lengths", lengths, 1);
  const int64_t batch = lengths.size(0);
  check_lengths_tensor("lengths", lengths, batch, "lengths", lengths);
  check_lengths_tensor("new_lengths", new_lengths, batch, "lengths", lengths);
  if (lowest) check_lengths_tensor("lowest", *lowest, batch, "lengths", lengths);
}

void check_reorder(const Tensor& key_cache, const OptionalTensor& value_cache, const Tensor& lengths,
                   const Tensor& batch_index) {
  check_dim("lengths", lengths, 1);
  const int64_t batch = lengths.size(0);
  check_cache("key_cache", key_cache, batch, "lengths", key_cache);
  if (value_cache) check_cache("value_cache", *value_cache, batch, "key_cache", key_cache);
  check_lengths_tensor("lengths", lengths, batch, "key_cache", key_cache);
  check_lengths_tensor("batch_index", batch_index, batch, "lengths", lengths);
}

void check_pool(const Tensor& key_cache, const Tensor& block_refs) {
  check_value(block_refs.size(0) == key_cache.size(0), "block_refs: expected shape (", key_cache.size(0),
              ",), one number for each block of key_cache, got ", shape_text(block_refs));
  check_value(key_cache.size(2) > 0, "key_cache: expected a block size (dimension 2) of at least 1, got shape ",
              shape_text(key_cache));
}

}  // namespace attnjourney

STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def(
      "kv_cache_append(Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor(c!) lengths, Tensor key, Tensor? value, "
      "*, Tensor? counts=None, bool ring=False) -> ()");
  m.def("kv_cache_truncate(Tensor(a!) lengths, Tensor new_lengths, *, Tensor? lowest=None) -> ()");
  m.def(
      "kv_cache_reorder(Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor(c!) lengths, Tensor batch_index) -> ()");
  m.def(
      "paged_cache_append(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) lengths, Tensor(d!) block_table, "
      "Tensor(e!) block_refs, Tensor key, Tensor value, *, Tensor? counts=None) -> ()");
  m.def(
      "paged_cache_truncate(Tensor(a!) lengths, Tensor(b!) block_table, Tensor(c!) block_refs, Tensor new_lengths, *, "
      "int block_size) -> ()");
  m.def(
      "paged_cache_reorder(Tensor(a!) lengths, Tensor(b!) block_table, Tensor(c!) block_refs, Tensor batch_index) "
      "-> ()");
}

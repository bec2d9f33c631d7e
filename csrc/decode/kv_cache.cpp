#include "kv_cache.h"

#include "core/backend.h"
#include "core/overlap.h"

namespace attnjourney {
namespace {

void check_new(const char* name, const Tensor& t, const char* cache_name, const Tensor& cache, int64_t batch,
               int64_t count) {
  check_dim(name, t, 4);
  check_same_device(name, t, cache_name, cache);
  check_value(t.size(0) == batch && t.size(1) == cache.size(1) && t.size(2) == count && t.size(3) == cache.size(3),
              name, ": expected shape (", batch, ", ", cache.size(1), ", ", count, ", ", cache.size(3),
              ") (batch, heads, tokens, dim), got ", shape_text(t));
}

// the dtype of tokens: the cache's, or one that it quantises
void check_tokens(const char* name, const Tensor& t, const char* cache_name, const Tensor& cache,
                  const OptionalTensor& scale) {
  if (!scale) {
    check_floating(cache_name, cache);
    return check_same_dtype(name, t, cache_name, cache);
  }
  const ScalarType type = dtype_of(t);
  check_dtype(is_attention_dtype(type) && type != ScalarType::Double, name, t,
              "dtype torch.float32, torch.bfloat16 or torch.float16 beside ", cache_name, " of ",
              dtype_text(dtype_of(cache)));
}

// scales beside caches of bytes, and beside no other
void check_scales(const Tensor& key_cache, const OptionalTensor& value_cache, const OptionalTensor& key_scale,
                  const OptionalTensor& value_scale) {
  const auto check = [](const char* name, const Tensor& cache, const char* scale_name, const OptionalTensor& scale) {
    check_dim(name, cache, 4);
    const bool bytes = is_byte_dtype(dtype_of(cache));
    check_value(scale || !bytes, scale_name, ": expected a tensor beside ", name, " of ", dtype_text(dtype_of(cache)),
                ", got None");
    check_dtype(bytes || !scale, name, cache, "dtype torch.int8 or torch.float8_e4m3fn beside ", scale_name);
    check_cache_scale(scale_name, scale, name, cache);
  };
  check("key_cache", key_cache, "key_scale", key_scale);
  check_value(value_cache || !value_scale, "value_scale: expected None without value_cache");
  if (value_cache) check("value_cache", *value_cache, "value_scale", value_scale);
}

// what an operator writes, without the tensors that are not given
std::vector<Written> written_of(std::initializer_list<std::pair<const char*, const Tensor*>> tensors) {
  std::vector<Written> written;
  for (const auto& [name, tensor] : tensors)
    if (tensor) written.push_back({name, *tensor});
  return written;
}
const Tensor* given(const OptionalTensor& t) { return t ? &*t : nullptr; }

// paged: the caches' first dimension counts blocks
void check_append(const AppendInputs& in, bool paged) {
  check_given("lengths", in.lengths);
  check_dim("lengths", in.lengths, 1);
  check_dim("key", in.key, 4);
  check_scales(in.key_cache, in.value_cache, in.key_scale, in.value_scale);
  check_tokens("key", in.key, "key_cache", in.key_cache, in.key_scale);
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
    check_tokens("value", *in.value, "value_cache", v, in.value_scale);
    check_new("value", *in.value, "value_cache", v, batch, count);
  }
  if (in.counts) check_lengths_tensor("counts", *in.counts, batch, "key_cache", in.key_cache);
}

void check_paged(const PagedTables& tables) {
  const auto& [lengths, block_table, block_refs] = tables;
  check_given("lengths", lengths);
  check_dim("lengths", lengths, 1);
  check_lengths_tensor("lengths", lengths, lengths.size(0), "lengths", lengths);
  check_block_table(block_table, lengths.size(0), "lengths", lengths);
  check_dim("block_refs", block_refs, 1);
  check_dtype(dtype_of(block_refs) == ScalarType::Int, "block_refs", block_refs, "dtype torch.int32");
  check_same_device("block_refs", block_refs, "lengths", lengths);
  check_value(block_refs.is_contiguous(), "block_refs: expected a contiguous tensor");
}

void check_truncate(const Tensor& lengths, const Tensor& new_lengths, const OptionalTensor& lowest) {
  check_given("lengths", lengths);
  check_dim("lengths", lengths, 1);
  const int64_t batch = lengths.size(0);
  check_lengths_tensor("lengths", lengths, batch, "lengths", lengths);
  check_lengths_tensor("new_lengths", new_lengths, batch, "lengths", lengths);
  if (lowest) check_lengths_tensor("lowest", *lowest, batch, "lengths", lengths);
}

void check_reorder(const ReorderInputs& in) {
  const auto& [key_cache, value_cache, lengths, batch_index, key_scale, value_scale] = in;
  check_given("lengths", lengths);
  check_dim("lengths", lengths, 1);
  const int64_t batch = lengths.size(0);
  check_cache("key_cache", key_cache, batch, "lengths", key_cache);
  if (value_cache) check_cache("value_cache", *value_cache, batch, "key_cache", key_cache);
  check_scales(key_cache, value_cache, key_scale, value_scale);
  if (!key_scale) check_floating("key_cache", key_cache);
  check_lengths_tensor("lengths", lengths, batch, "key_cache", key_cache);
  check_lengths_tensor("batch_index", batch_index, batch, "lengths", lengths);
}

// the pool of a paged cache, next to its counts
void check_pool(const Tensor& key_cache, const PagedTables& tables) {
  check_value(tables.block_refs.size(0) == key_cache.size(0), "block_refs: expected shape (", key_cache.size(0),
              ",), one number for each block of key_cache, got ", shape_text(tables.block_refs));
  check_block_size("key_cache: expected a block size (dimension 2)", key_cache.size(2), tables.block_table);
}

Tensor apart_from_tables(const Tensor& read, const PagedTables& tables) {
  const auto& [lengths, block_table, block_refs] = tables;
  const std::vector<Written> written{{"lengths", lengths}, {"block_table", block_table}, {"block_refs", block_refs}};
  check_apart(written);
  return apart_from(read, written);
}

PagedTables read_tables(Arguments& in) {
  return {.lengths = in.tensor(), .block_table = in.tensor(), .block_refs = in.tensor()};
}

}  // namespace

void kv_cache_append(const Backend& backend, Arguments& in) {
  AppendInputs inputs{.key_cache = in.tensor(),
                      .value_cache = in.optional_tensor(),
                      .lengths = in.tensor(),
                      .key = in.tensor(),
                      .value = in.optional_tensor(),
                      .counts = in.optional_tensor()};
  const bool ring = in.flag();
  inputs.key_scale = in.optional_tensor(), inputs.value_scale = in.optional_tensor();
  check_append(inputs, false);
  const std::vector<Written> written = written_of({{"key_cache", &inputs.key_cache},
                                                   {"value_cache", given(inputs.value_cache)},
                                                   {"lengths", &inputs.lengths},
                                                   {"key_scale", given(inputs.key_scale)},
                                                   {"value_scale", given(inputs.value_scale)}});
  check_apart(written);
  inputs.key = apart_from(inputs.key, written), inputs.value = apart_from(inputs.value, written);
  inputs.counts = apart_from(inputs.counts, written);
  backend.caches.append(inputs, ring);
}

void kv_cache_truncate(const Backend& backend, Arguments& in) {
  const Tensor lengths = in.tensor(), new_lengths = in.tensor();
  const OptionalTensor lowest = in.optional_tensor();
  check_truncate(lengths, new_lengths, lowest);
  backend.caches.truncate(lengths, apart_from(new_lengths, {{"lengths", lengths}}), lowest);
}

void kv_cache_reorder(const Backend& backend, Arguments& in) {
  ReorderInputs inputs{.key_cache = in.tensor(),
                       .value_cache = in.optional_tensor(),
                       .lengths = in.tensor(),
                       .batch_index = in.tensor(),
                       .key_scale = in.optional_tensor(),
                       .value_scale = in.optional_tensor()};
  check_reorder(inputs);
  check_apart(written_of({{"key_cache", &inputs.key_cache},
                          {"value_cache", given(inputs.value_cache)},
                          {"lengths", &inputs.lengths},
                          {"key_scale", given(inputs.key_scale)},
                          {"value_scale", given(inputs.value_scale)}}));
  inputs.batch_index = apart_from(inputs.batch_index, {{"lengths", inputs.lengths}});
  backend.caches.reorder(inputs);
}

void paged_cache_append(const Backend& backend, Arguments& in) {
  const Tensor key_cache = in.tensor();
  const OptionalTensor value_cache = in.optional_tensor();
  const PagedTables tables = read_tables(in);
  AppendInputs inputs{.key_cache = key_cache,
                      .value_cache = value_cache,
                      .lengths = tables.lengths,
                      .key = in.tensor(),
                      .value = in.optional_tensor(),
                      .counts = in.optional_tensor(),
                      .key_scale = in.optional_tensor(),
                      .value_scale = in.optional_tensor()};
  check_append(inputs, true);
  check_paged(tables);
  check_pool(key_cache, tables);
  const auto& [lengths, block_table, block_refs] = tables;
  const std::vector<Written> written = written_of({{"key_cache", &key_cache},
                                                   {"value_cache", given(value_cache)},
                                                   {"lengths", &lengths},
                                                   {"block_table", &block_table},
                                                   {"block_refs", &block_refs},
                                                   {"key_scale", given(inputs.key_scale)},
                                                   {"value_scale", given(inputs.value_scale)}});
  check_apart(written);
  inputs.key = apart_from(inputs.key, written), inputs.value = apart_from(inputs.value, written);
  inputs.counts = apart_from(inputs.counts, written);
  backend.caches.paged_append(inputs, tables);
}

void paged_cache_truncate(const Backend& backend, Arguments& in) {
  const PagedTables tables = read_tables(in);
  const Tensor new_lengths = in.tensor();
  const int64_t block_size = in.integer();
  check_paged(tables);
  check_block_size("block_size: expected a number", block_size, tables.block_table);
  check_lengths_tensor("new_lengths", new_lengths, tables.lengths.size(0), "lengths", tables.lengths);
  backend.caches.paged_truncate(tables, apart_from_tables(new_lengths, tables), block_size);
}

void paged_cache_reorder(const Backend& backend, Arguments& in) {
  const PagedTables tables = read_tables(in);
  const Tensor batch_index = in.tensor();
  check_paged(tables);
  check_lengths_tensor("batch_index", batch_index, tables.lengths.size(0), "lengths", tables.lengths);
  backend.caches.paged_reorder(tables, apart_from_tables(batch_index, tables));
}

}  // namespace attnjourney

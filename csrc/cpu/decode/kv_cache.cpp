// CPU entry of the dense and ring caches. Values are checked before the first write.
#include <cstring>

#include "cache_rows.h"
#include "decode_cpu.h"

namespace attnjourney {

void cpu_cache_append(const AppendInputs& in, bool ring) {
  const auto& [key_cache, value_cache, lengths, key, value, counts, key_scale, value_scale] = in;
  const int64_t batch = lengths.size(0), n = key.size(2), capacity = key_cache.size(2);
  int64_t* const have = static_cast<int64_t*>(lengths.mutable_data_ptr());
  const std::vector<int64_t> fresh = new_tokens(in);
  for (int64_t b = 0; b < batch; b++) {
    check_length("lengths", b, have[b], ring ? int64_t{1} << 40 : capacity, "the cache's capacity");
    check_value(ring || have[b] + fresh[b] <= capacity, "key: the cache overflows: expected at most ",
                capacity - have[b], " new tokens for batch row ", b, " (capacity ", capacity, ", length ", have[b],
                "), got ", fresh[b]);
  }
  const auto write = [&](const Tensor& cache, const OptionalTensor& scale, const Tensor& tokens) {
    const TokenWriter writer(cache, scale, tokens);
    parallel_tokens(batch * cache.size(1), n * cache.size(3), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t b = i / cache.size(1), h = i % cache.size(1), count = fresh[b];
        for (int64_t t = ring ? std::max<int64_t>(0, count - capacity) : 0; t < count; t++) {  // a ring keeps the last
          const int64_t at = have[b] + t;
          writer.write(b, h, ring ? at % capacity : at, b, n - count + t);
        }
      }
    });
  };
  write(key_cache, key_scale, key);
  if (value) write(*value_cache, value_scale, *value);
  for (int64_t b = 0; b < batch; b++) have[b] += fresh[b];
}

void cpu_cache_truncate(const Tensor& lengths, const Tensor& new_lengths, const OptionalTensor& lowest) {
  const int64_t batch = lengths.size(0);
  const int64_t* const wanted = checked_truncation(lengths, new_lengths);
  if (lowest) {
    const int64_t* const low = static_cast<const int64_t*>(lowest->const_data_ptr());
    for (int64_t b = 0; b < batch; b++)
      check_value(wanted[b] >= low[b], "new_lengths: expected at least ", low[b], " for batch row ", b,
                  ", older keys have been overwritten, got ", wanted[b]);
  }
  std::copy(wanted, wanted + batch, static_cast<int64_t*>(lengths.mutable_data_ptr()));
}

void cpu_cache_reorder(const ReorderInputs& in) {
  const auto& [key_cache, value_cache, lengths, batch_index, key_scale, value_scale] = in;
  const int64_t batch = lengths.size(0);
  const int64_t* const index = checked_batch_index(batch_index, lengths);
  int64_t* const have = static_cast<int64_t*>(lengths.mutable_data_ptr());
  const std::vector<int64_t> before(have, have + batch);
  for (int64_t b = 0; b < batch; b++) check_length("lengths", b, before[b], int64_t{1} << 40, "2^40");
  // rows that change go through a copy: the new order may be a cycle
  const auto move = [&](const Tensor& cache) {
    const CacheRows to(cache);
    const int64_t heads = cache.size(1), capacity = cache.size(2);
    std::vector<int64_t> start(static_cast<size_t>(batch) + 1, 0);
    for (int64_t b = 0; b < batch; b++)
      start[b + 1] = start[b] + (index[b] == b ? 0 : heads * std::min(before[index[b]], capacity));
    if (start[batch] == 0) return;
    std::vector<char> copy(static_cast<size_t>(start[batch] * to.row_bytes()));
    const auto each = [&](const auto& f) {
      for (int64_t b = 0; b < batch; b++)
        for (int64_t i = start[b], n = std::min(before[index[b]], capacity); i < start[b + 1]; i++)
          f(b, (i - start[b]) / n, (i - start[b]) % n, copy.data() + i * to.row_bytes());
    };
    each(
        [&](int64_t b, int64_t h, int64_t slot, char* c) { std::memcpy(c, to.at(index[b], h, slot), to.row_bytes()); });
    each([&](int64_t b, int64_t h, int64_t slot, char* c) { std::memcpy(to.at(b, h, slot), c, to.row_bytes()); });
  };
  move(key_cache);
  for (const OptionalTensor* other : {&value_cache, &key_scale, &value_scale})
    if (*other) move(**other);
  for (int64_t b = 0; b < batch; b++) have[b] = before[index[b]];
}

}  // namespace attnjourney

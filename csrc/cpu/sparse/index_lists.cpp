#include "index_lists.h"

#include <algorithm>
#include <atomic>

#include "core/checks.h"
#include "cpu/attention/sequences.h"
#include "cpu/threads.h"

namespace attnjourney {
namespace {

template <class Index>
void check_range(const Index* indices, int64_t count, int64_t row, int64_t kv_len) {
  constexpr int64_t step = 1 << 14;
  std::atomic<int64_t> bad{count};  // the first one
  in_ranges((count + step - 1) / step, 4, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; s++) {
      const int64_t last = std::min(count, (s + 1) * step);
      Index most = -1;
      for (int64_t i = s * step; i < last; i++) most = std::max(most, indices[i]);
      if (most < kv_len) continue;
      int64_t i = s * step;
      while (indices[i] < kv_len) i++;
      for (int64_t known = bad; i < known && !bad.compare_exchange_weak(known, i);) {
      }
      return;
    }
  });
  const int64_t i = bad;
  check_value(i == count, "indices: expected numbers below the number of keys, ", kv_len, " (below 0: none), got ",
              i < count ? static_cast<int64_t>(indices[i]) : 0, " at number ", row ? i % row : 0, " of row ",
              row ? i / row : 0);
}

}  // namespace

std::vector<int64_t> key_lengths_of(const OptionalTensor& key_lengths, int64_t batch, int64_t kv_len) {
  if (!key_lengths) return std::vector<int64_t>(static_cast<size_t>(batch), kv_len);
  std::vector<int64_t> found = index_values(*key_lengths);
  for (size_t i = 0; i < found.size(); i++)
    check_value(found[i] >= 0 && found[i] <= kv_len, "key_lengths: expected numbers from 0 to ", kv_len, ", got ",
                found[i], " at ", i);
  return found;
}

IndexLists::IndexLists(const Tensor& indices, int64_t batch, int64_t heads, int64_t blocks, int64_t kv_len)
    : kept_(aten::contiguous(indices)),
      data_(kept_.const_data_ptr()),
      heads_(heads),
      blocks_(blocks),
      count_(indices.size(indices.dim() - 1)),
      kv_len_(kv_len),
      wide_(kept_.scalar_type() == ScalarType::Long) {
  const int64_t all = batch * heads * blocks * count_;
  if (all == 0) return;
  if (wide_)
    check_range(static_cast<const int64_t*>(data_), all, count_, kv_len);
  else
    check_range(static_cast<const int32_t*>(data_), all, count_, kv_len);
}

void IndexLists::list(const SparseParams& params, int64_t batch, int64_t head, int64_t block, int64_t length,
                      int64_t first, int64_t rows, int64_t bucket, List& to) const {
  const int64_t every = params.limit(first, length), some = params.limit(first + rows - 1, length);
  const size_t from = static_cast<size_t>(((batch * heads_ + (heads_ > 1 ? head : 0)) * blocks_ + block) * count_);
  to.keys.resize(static_cast<size_t>(count_));
  to.last = first + (params.bottom_right ? length - params.q_len : 0);
  int32_t* const keys = to.keys.data();
  int64_t n = 0;
  const auto collect = [&](const auto* indices, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < count_; i++) {
      const int64_t key = indices[i];
      keys[n] = static_cast<int32_t>(key);
      n += key >= begin && key < end;
      if (n == count_) break;
    }
  };
  const auto both = [&](const auto* indices) {
    collect(indices, 0, every);
    to.whole = n;
    if (some > every && n < count_) collect(indices, every, some);
  };
  if (wide_)
    both(static_cast<const int64_t*>(data_) + from);
  else
    both(static_cast<const int32_t*>(data_) + from);
  to.keys.resize(static_cast<size_t>(n));
  if (bucket < kv_len_) {
    const auto before = [bucket](int32_t a, int32_t b) { return a / bucket < b / bucket; };
    for (const auto& [begin, end] : {std::pair{int64_t{0}, to.whole}, std::pair{to.whole, n}})
      if (!std::is_sorted(keys + begin, keys + end, before)) std::stable_sort(keys + begin, keys + end, before);
  }
}

}  // namespace attnjourney

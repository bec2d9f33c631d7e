// Gradients of keys, each a sum over rows anywhere in the sequence: some units of rows at a time compute what they give
// to their keys, then ranges of keys add it up, each key by one thread and in the order of the rows. With as many heads
// as threads, each thread does all of a head by itself, with one range.
#pragma once
#include <algorithm>
#include <cstring>

#include "cpu/threads.h"
#include "index_lists.h"
#include "kernels.h"

namespace attnjourney {

// A unit's call, kept for its keys' turn.
struct KeptRows {
  SparseRows in;
  IndexLists::List list;
};

struct KeyUnits {
  int64_t heads, of_head;  // heads, and units of one, which come one after the other
  int64_t kv_len;
  int64_t sums_bytes, saved_bytes, rows_bytes;  // sums of a head, what a unit keeps, scratch; multiples of 64
  int64_t threads;
  bool keys = true;  // wanted
};

// f(begin, end): numbers of a list's keys in range number `range` of `bucket` keys; those that every row sees and those
// that some do, each of them by ranges, come apart
template <class F>
void each_part_of_range(const SparseRows& in, int64_t range, int64_t bucket, const F& f) {
  for (const auto& [from, to] : {std::pair{int64_t{0}, in.whole}, std::pair{in.whole, in.n}}) {
    const auto before = [&](int32_t key, int64_t r) { return key / bucket < r; };
    const int32_t *const first = in.keys + from, *const last = in.keys + to;
    const int64_t begin = std::lower_bound(first, last, range, before) - in.keys;
    const int64_t end = std::lower_bound(first, last, range + 1, before) - in.keys;
    if (begin < end) f(begin, end);
  }
}

// compute(unit, bucket, KeptRows&, saved, scratch): with a list by ranges of `bucket` keys; units of all heads
// add(KeptRows, begin, end, saved, sums): of keys of these numbers to the sums of the head, which begin with 0
// write(head, sums, begin, end): the gradients of keys [begin, end)
template <class Compute, class Add, class Write>
void run_key_units(const Tensor& like, const KeyUnits& k, const Compute& compute, const Add& add, const Write& write) {
  const auto clear = [&](char* sums) { memset(sums, 0, static_cast<size_t>(k.sums_bytes)); };
  if (k.heads >= k.threads) {
    run_queue(k.heads, k.threads, k.sums_bytes + k.saved_bytes + k.rows_bytes, [&](int64_t i, void* memory) {
      char *const sums = static_cast<char*>(memory), *const saved = sums + k.sums_bytes;
      clear(sums);
      KeptRows rows;
      for (int64_t u = 0; u < k.of_head; u++) {
        compute(i * k.of_head + u, std::max<int64_t>(1, k.kv_len), rows, saved, saved + k.saved_bytes);
        if (k.keys && rows.in.n) add(rows, int64_t{0}, rows.in.n, saved, sums);
      }
      write(i, sums, int64_t{0}, k.kv_len);
    });
    return;
  }
  const int64_t ranges = std::min(4 * k.threads, std::max<int64_t>(1, k.kv_len)), round = std::min(k.of_head, ranges);
  const int64_t bucket = std::max<int64_t>(1, (k.kv_len + ranges - 1) / ranges);
  const Tensor memory = aten::empty(like, {64 + k.sums_bytes + round * k.saved_bytes}, ScalarType::Byte);
  char* const sums = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.mutable_data_ptr()) + 63) / 64 * 64);
  char* const saved = sums + k.sums_bytes;
  std::vector<KeptRows> rows(static_cast<size_t>(round));
  for (int64_t i = 0; i < k.heads; i++) {
    clear(sums);
    for (int64_t first = 0; first < k.of_head; first += round) {
      const int64_t count = std::min(round, k.of_head - first);
      run_queue(count, std::min(k.threads, count), k.rows_bytes, [&](int64_t u, void* space) {
        compute(i * k.of_head + first + u, bucket, rows[static_cast<size_t>(u)], saved + u * k.saved_bytes, space);
      });
      if (!k.keys) continue;
      run_queue(ranges, k.threads, 0, [&](int64_t range, void*) {
        for (int64_t u = 0; u < count; u++)
          each_part_of_range(rows[static_cast<size_t>(u)].in, range, bucket, [&](int64_t begin, int64_t end) {
            add(rows[static_cast<size_t>(u)], begin, end, saved + u * k.saved_bytes, sums);
          });
      });
    }
    in_ranges(k.kv_len, 64, [&](int64_t begin, int64_t end) { write(i, sums, begin, end); });
  }
}

}  // namespace attnjourney

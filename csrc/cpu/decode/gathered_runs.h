// Keys that lie one by one, as in blocks of a token each, copied side by side: the kernels take many keys at a time.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "decode/params.h"

namespace attnjourney {

constexpr int64_t rows_that_gather = 4;  // fewer read the keys where they lie in the time of the copy

// Rows of keys and values in scratch, and runs that read them there.
class GatheredRuns {
 public:
  // bytes for `keys` keys; item: of their numbers
  static int64_t space(const DecodeParams& p, int64_t item, int64_t keys) {
    return lines(keys * p.head_dim * item) + lines(keys * p.v_head_dim * item) + lines(2 * keys * scale_bytes);
  }
  // Replaces runs of one key each, whose rows p describes, by one for all consecutive keys, and describes its rows.
  static void gather(std::vector<DecodeRun>& runs, DecodeParams& p, int64_t item, char* scratch) {
    if (runs.empty()) return;
    const size_t n = runs.size(), key_bytes = static_cast<size_t>(p.head_dim * item),
                 value_bytes = static_cast<size_t>(p.v_head_dim * item);
    const auto offset = [](const DecodeRun& r) {
      return static_cast<const char*>(r.value) - static_cast<const char*>(r.key);
    };
    const int64_t at = offset(runs[0]);  // values that are a part of their keys are copied with them
    const bool inside = at >= 0 && at + p.v_head_dim * item <= p.head_dim * item &&
                        std::all_of(runs.begin(), runs.end(), [&](const DecodeRun& r) { return offset(r) == at; });
    char *const keys = scratch, *const values = keys + lines(static_cast<int64_t>(n * key_bytes));
    float* const scales =
        reinterpret_cast<float*>(values + (inside ? 0 : lines(static_cast<int64_t>(n * value_bytes))));
    const bool scaled = runs[0].key_scale;
    std::vector<DecodeRun> found;
    for (size_t i = 0; i < n; i++) {
      const DecodeRun& r = runs[i];
      if (i + ahead < n) {
        prefetch(runs[i + ahead].key, key_bytes);
        if (!inside) prefetch(runs[i + ahead].value, value_bytes);
      }
      char *const key = keys + i * key_bytes, *const value = inside ? key + at : values + i * value_bytes;
      std::memcpy(key, r.key, key_bytes);
      if (!inside) std::memcpy(value, r.value, value_bytes);
      if (scaled) scales[i] = *r.key_scale, scales[n + i] = *r.value_scale;
      if (found.empty() || found.back().first + found.back().count != r.first)
        found.push_back({.key = key,
                         .value = value,
                         .first = r.first,
                         .count = 0,
                         .key_scale = scaled ? scales + i : nullptr,
                         .value_scale = scaled ? scales + n + i : nullptr});
      found.back().count++;
    }
    runs.swap(found);
    p.k_row = p.head_dim, p.v_row = inside ? p.head_dim : p.v_head_dim;
  }

 private:
  static constexpr int64_t line = 64, scale_bytes = sizeof(float);
  static constexpr size_t ahead = 4;  // keys: they lie anywhere
  static int64_t lines(int64_t bytes) { return (bytes + line - 1) / line * line; }
  static void prefetch(const void* row, size_t bytes) {
    for (size_t b = 0; b < bytes; b += line) __builtin_prefetch(static_cast<const char*>(row) + b);
  }
};

}  // namespace attnjourney

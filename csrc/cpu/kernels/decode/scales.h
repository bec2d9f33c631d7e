// Keys and values as bytes, a scale for each: scores times the scales of keys, weights times those of values.
#pragma once
#include "line_prefetch.h"

namespace attnjourney {
namespace {

// x[key][R] times scale[key]
template <int R>
ATTN_NOINLINE void scale_scores(float* __restrict__ x, const float* __restrict__ scale, int64_t n) {
  for (int64_t k = 0; k < n; k++)
    for (int r = 0; r < R; r++) x[k * R + r] *= scale[k];
}
// The same where a weight of exactly 0 hides a key: it stays, even beside a scale that is a NaN.
template <int R>
ATTN_NOINLINE void scale_weights(float* __restrict__ x, const float* __restrict__ scale, int64_t n) {
  for (int64_t k = 0; k < n; k++)
    for (int r = 0; r < R; r++) {
      const float scaled = x[k * R + r] * scale[k];
      x[k * R + r] = x[k * R + r] == 0.f ? 0.f : scaled;
    }
}

// the lines of the scales of the next block of the walk
ATTN_INLINE void prefetch_scales(const DecodeRun* runs, BlockWalk walk) {
  DecodeBlock next;
  if (!walk.next(next)) return;
  constexpr int64_t line = 64 / sizeof(float);
  BlockWalk::pieces(runs, next, [](const DecodeRun& run, int64_t k, int64_t count, int64_t) {
    for (int64_t i = k; i < k + count; i += line) {
      __builtin_prefetch(run.key_scale + i);
      __builtin_prefetch(run.value_scale + i);
    }
  });
}

}  // namespace
}  // namespace attnjourney

// Dropout on a tile of P^T, keys down and lanes over rows: the bits of csrc/core/philox.h, a vector of rows at a time.
#pragma once
#include "common.h"
#include "core/philox.h"

namespace attnjourney {
namespace {

// Philox on lanes: rows first_row + lane
ATTN_INLINE void philox_lanes(uint64_t seed, uint32_t head, uint32_t first_row, uint32_t octet, Lanes (&word)[4]) {
  Lanes c0 = lanes_set(first_row) + lanes_iota(), c1 = lanes_set(octet), c2 = lanes_set(head), c3 = lanes_set(0);
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  ATTN_UNROLL for (int i = 0; i < Philox::rounds; i++) {
    Lanes high_a, low_a, high_b, low_b;
    multiply_wide(c0, Philox::mul0, high_a, low_a);
    multiply_wide(c2, Philox::mul1, high_b, low_b);
    c0 = high_b ^ c1 ^ lanes_set(k0);
    c2 = high_a ^ c3 ^ lanes_set(k1);
    c1 = low_b;
    c3 = low_a;
    k0 += Philox::weyl0;
    k1 += Philox::weyl1;
  }
  word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

// The same for the eight keys from `key` on, which is no multiple of 8 in the counter: parts of two octets.
ATTN_NOINLINE void unaligned_words(uint64_t seed, uint32_t head, uint32_t first_row, int64_t key, Lanes (&word)[4]) {
  Lanes next[4];
  philox_lanes(seed, head, first_row, uint32_t(key >> 3), word);
  philox_lanes(seed, head, first_row, uint32_t((key >> 3) + 1), next);
  const int shift = int(key & 7), words = shift / 2;
  Lanes all[8] = {word[0], word[1], word[2], word[3], next[0], next[1], next[2], next[3]};
  for (int e = 0; e < 4; e++) {
    word[e] = all[e + words];
    if (shift % 2 == 0) continue;
    Lanes upper, lower, other;  // halves moved by 16 bits
    multiply_wide(all[e + words], 1u << 16, upper, other);
    multiply_wide(all[e + words + 1], 1u << 16, other, lower);
    word[e] = upper ^ lower;
  }
}

// The bits of the eight keys from `key` of the call on, a multiple of 8 there; rows first_row + lane.
ATTN_INLINE void dropout_words(const Dropout& dropout, uint32_t head, int64_t first_row, int64_t key,
                               Lanes (&word)[4]) {
  const uint32_t row = uint32_t(dropout.first_row + first_row);
  key += dropout.first_key;
  if (key % 8 == 0)
    philox_lanes(dropout.seed, head, row, uint32_t(key >> 3), word);
  else
    unaligned_words(dropout.seed, head, row, key, word);
}

// P[key][lane], keys k0 + begin .. k0 + end - 1 (k0 a multiple of 8), rows first_row + lane. Where dropped, 0 is
// written, or with `mark` the value's sign is set instead (P itself is never negative).
template <class Real>
ATTN_NOINLINE void drop_tile(const Dropout& dropout, uint32_t head, int64_t first_row, int64_t rows, int64_t k0,
                             int64_t begin, int64_t end, bool mark, Real* P, int64_t ldp) {
  if constexpr (sizeof(Real) == 4) {
    for (int64_t k8 = begin & ~int64_t(7); k8 < end; k8 += 8)
      for (int64_t i = 0; i < rows; i += Vf::width) {
        Lanes word[4];
        dropout_words(dropout, head, first_row + i, k0 + k8, word);
        ATTN_UNROLL for (int e = 0; e < 8; e++) {
          const int64_t k = k8 + e;
          if (k < begin || k >= end) continue;
          Real* x = P + k * ldp + i;
          const Vf p = load(x), kept = keep_where(word[e >> 1], e & 1, dropout.threshold, p);
          store(x, mark ? kept + (kept - p) : kept);  // kept - p is 0 or -p
        }
      }
  } else {
    for (int64_t k = begin; k < end; k++)
      for (int64_t i = 0; i < rows; i++)
        if (!dropout.keep(head, first_row + i, k0 + k)) P[k * ldp + i] = mark ? -P[k * ldp + i] : Real(0);
  }
}

}  // namespace
}  // namespace attnjourney

// Counter-based dropout bits (Philox4x32, 7 rounds; Salmon et al., SC'11). The bits of an element depend on
// (seed, batch * heads + head, row, key) alone: the same on every ISA, tile size, thread count and device. A call that
// is a part of a larger one counts as that does (Origin in attention/options.h).
//
// One call yields 128 bits: 16 for each of the 8 keys 8c .. 8c+7 of a row. Key 8c + e takes the low (e even) or high
// (e odd) half of word e / 2. An element is dropped where its 16 bits are below round(dropout_p * 65536).
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define ATTNJOURNEY_PHILOX_HD __host__ __device__ inline
#else
#define ATTNJOURNEY_PHILOX_HD __attribute__((always_inline)) inline  // see mask.h
#endif

namespace attnjourney {

struct Philox {
  static constexpr int rounds = 7;
  static constexpr uint32_t mul0 = 0xD2511F53u, mul1 = 0xCD9E8D57u;
  static constexpr uint32_t weyl0 = 0x9E3779B9u, weyl1 = 0xBB67AE85u;

  uint32_t word[4];

  // counter (row, key / 8, head, 0), key = the two halves of the seed
  ATTNJOURNEY_PHILOX_HD Philox(uint64_t seed, uint32_t head, uint32_t row, uint32_t key_octet) {
    uint32_t c0 = row, c1 = key_octet, c2 = head, c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int i = 0; i < rounds; i++) {
      const uint64_t a = uint64_t{mul0} * c0, b = uint64_t{mul1} * c2;
      c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
      c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(b);
      c3 = static_cast<uint32_t>(a);
      k0 += weyl0;
      k1 += weyl1;
    }
    word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
  }
  ATTNJOURNEY_PHILOX_HD uint32_t bits16(int e) const { return (e & 1) ? word[e >> 1] >> 16 : word[e >> 1] & 0xffffu; }
};

struct Dropout {
  uint64_t seed = 0;
  uint32_t threshold = 0;                // dropped where bits16 < threshold; 0 keeps all, 65536 drops all
  double keep_scale = 1;                 // 1 / (1 - p), 0 for p = 1
  int64_t first_row = 0, first_key = 0;  // where the call's row 0 and key 0 stand in the counter

  bool on() const { return threshold != 0; }
  static Dropout from(double p, uint64_t seed) {
    Dropout d;
    d.seed = seed;
    d.threshold = static_cast<uint32_t>(p * 65536.0 + 0.5);
    d.keep_scale = p < 1.0 ? 1.0 / (1.0 - p) : 0.0;
    return d;
  }
  ATTNJOURNEY_PHILOX_HD bool keep(uint32_t head, int64_t row, int64_t key) const {
    row += first_row, key += first_key;
    return Philox(seed, head, static_cast<uint32_t>(row), static_cast<uint32_t>(key >> 3)).bits16(key & 7) >= threshold;
  }
};

}  // namespace attnjourney

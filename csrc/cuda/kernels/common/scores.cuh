// What the options of attention do to a tile of scores: softcap, ALiBi, mask tensors, dropout. Written once for all
// kernels, which hold a tile in fragments of different shapes.
#pragma once
#include "block_tiles.cuh"
#include "core/constants.h"
#include "core/philox.h"
#include "cuda/ptx/sm80.cuh"

namespace attnjourney {

// The elements of a thread, (row, key) from that of element 0: m16n8k16 accumulators with rows down (forward),
template <int Tiles>
struct RowFragment {
  static constexpr int kCount = 4 * Tiles;
  static constexpr __host__ __device__ int row(int i) { return i / 2 % 2 * 8; }
  static constexpr __host__ __device__ int key(int i) { return i / 4 * 8 + i % 2; }
};
// and with keys down (backward).
template <int KeyTiles, int RowTiles>
struct KeyFragment {
  static constexpr int kCount = 4 * KeyTiles * RowTiles;
  static constexpr __host__ __device__ int row(int i) { return i / 4 % RowTiles * 8 + i % 2; }
  static constexpr __host__ __device__ int key(int i) { return i / (4 * RowTiles) * 16 + i / 2 % 2 * 8; }
};

// One bit for each element: does its row see its key? f: a fragment whose rows and keys are known when it runs
// (backward_jvp_task.cuh)
template <class F>
constexpr uint32_t kAllSeen = F::kCount == 32 ? ~0u : (1u << F::kCount % 32) - 1;

template <class F>
__device__ __forceinline__ uint32_t seen_in_range(const Sequence& s, int row, int key, F f = {}) {
  uint32_t seen = 0;
#pragma unroll
  for (int i = 0; i < F::kCount; i++) {
    const int r = row + f.row(i);
    if (r < s.q_len && s.keys.visible(r, key + f.key(i))) seen |= 1u << i;
  }
  return seen;
}

template <class Real>
__device__ __forceinline__ int64_t batch_offset(const ScoresOf<Real>& s, const int64_t (&strides)[kMaskDims],
                                                int batch) {
  int64_t at = 0;
  for (int d = s.mask_dims - 1; d >= 0; d--) {
    at += batch % s.mask_size[d] * strides[d];
    batch /= s.mask_size[d];
  }
  return at;
}

// One head's part of the options.
template <class Real>
struct HeadScoresOf {
  const unsigned char* mask;  // of its first row and key, or its offsets of blocks
  Real slope;                 // in the unit of scores
  uint32_t index;             // batch * q_heads + head
  __device__ __forceinline__ HeadScoresOf(const SequenceTaskOf<Real>& p, int q_heads, int batch, int head)
      : mask(nullptr), slope(0), index(batch * q_heads + head) {
    const ScoresOf<Real>& s = p.scores;
    if (s.slopes) slope = s.slopes[index] * s.unit;
    if (s.mask_kind == MaskElement::none) return;
    const int64_t at = head * s.mask_head + batch_offset(s, s.mask_batch, batch);
    mask = static_cast<const unsigned char*>(s.mask) + at * s.mask_bytes;
  }
  // item_mask: where the item's mask begins, found before
  __device__ __forceinline__ HeadScoresOf(const SequenceTaskOf<Real>& p, int q_heads, int batch, int head,
                                          int64_t item_mask)
      : mask(nullptr), slope(0), index(batch * q_heads + head) {
    if (p.scores.slopes) slope = p.scores.slopes[index] * p.scores.unit;
    if (p.scores.mask_kind == MaskElement::none) return;
    mask = static_cast<const unsigned char*>(p.scores.mask) +
           (item_mask + head * p.scores.mask_head) * p.scores.mask_bytes;
  }
  __device__ __forceinline__ HeadBlocks blocks(const ScoresOf<Real>& s) const {
    return {s.blocks, reinterpret_cast<const int*>(mask)};
  }
};
using HeadScores = HeadScoresOf<float>;

// `seen` without what a boolean mask hides
template <class F, class Real>
__device__ __forceinline__ uint32_t seen_in_mask(const ScoresOf<Real>& s, const HeadScoresOf<Real>& h, int row, int key,
                                                 uint32_t seen, F f = {}) {
  const unsigned char* mask = h.mask + row * s.mask_row + key * s.mask_col;
#pragma unroll
  for (int i = 0; i < F::kCount; i++)
    if (seen >> i & 1 && !mask[f.row(i) * s.mask_row + f.key(i) * s.mask_col]) seen &= ~(1u << i);
  return seen;
}

// An element of a floating mask, of which only -inf hides
template <class T, class Real>
__device__ __forceinline__ Real mask_value(const ScoresOf<Real>& s, const HeadScoresOf<Real>& h, int row, int key) {
  const int64_t at = row * s.mask_row + key * s.mask_col;
  return s.mask_kind == MaskElement::fp32 ? reinterpret_cast<const float*>(h.mask)[at]
                                          : ptx::to_float(reinterpret_cast<const T*>(h.mask)[at]);
}

// A sink in the unit of scores; where that is beyond the largest number, that number.
template <class Real>
__device__ __forceinline__ Real sink_score(const ScoresOf<Real>& s, Real sink) {
  constexpr Real kHighest = sizeof(Real) == 4 ? Real(3.402823466e38) : Real(1.7976931348623157e308);
  return fmax(-kHighest, fmin(sink * s.unit, kHighest));
}

// tanh of the capped score; exp2 and a reciprocal are exact enough for 16 bits: 1.5e-7
template <class T, class Real>
__device__ __forceinline__ Real cap_tanh(const ScoresOf<Real>& s, Real product) {
  if constexpr (sizeof(T) > 2)
    return ptx::tanh(product * s.cap_factor * Real(ln_2 / 2));
  else
    return 1.f - 2.f * ptx::reciprocal(1.f + ptx::exp2(product * s.cap_factor));
}

// a modified score from q . k
template <class T, class Real>
__device__ __forceinline__ Real modified_score(const ScoresOf<Real>& s, Real product) {
  return s.cap * cap_tanh<T>(s, product);
}

// One score from q . k; `slope`: its derivative by scale * q . k
template <class Real>
struct Score {
  Real value, slope;
};
template <class T, class Real>
__device__ __forceinline__ Score<Real> capped(const ScoresOf<Real>& s, Real product, Real score_scale) {
  if (!s.modified()) return {ptx::rounded_product(product, score_scale), 1};
  const Real t = cap_tanh<T>(s, product);
  return {s.cap * t, 1 - t * t};
}

template <class Real = float>
__device__ __forceinline__ Real distance(int row, int key, int offset) {
  return static_cast<Real>(abs(row + offset - key));
}

// In the backward: the weight before dropout, the gradient of the score after its cap, and what the cap brings.
template <class Real>
struct WeightedScore {
  Real weight, grad, slope;
};
// product: q . k; grad: dO . v; keep: dropout keeps the weight; away() -> distance, bias() -> the mask's value
template <class T, class Real, class Away, class Bias>
__device__ __forceinline__ WeightedScore<Real> weighted_by(const ScoresOf<Real>& s, Real slope, Away&& away,
                                                           Bias&& bias, bool visible, bool keep, Real product,
                                                           Real score_scale, const RowStats<Real>& row, Real grad,
                                                           Real delta) {
  Score<Real> x = capped<T>(s, product, score_scale);
  if (s.slopes) x.value -= ptx::rounded_product(slope, away());
  if (s.mask_kind > MaskElement::boolean && visible) {
    const Real b = bias();
    x.value += b;
    visible = b != -INFINITY;
  }
  const Real weight = visible ? ptx::exp2((x.value - row.reference) * s.exponent) * row.inverse : 0;
  if (s.seed) grad = keep ? grad * s.keep_scale : 0;
  const bool counts = weight != 0;  // asked of the weight: `visible` of many elements held until here would be spilled
  return {weight, counts ? weight * (grad - delta) : 0, counts ? x.slope : 0};
}
template <class T, class Real>
__device__ __forceinline__ WeightedScore<Real> weighted(const ScoresOf<Real>& s, const HeadScoresOf<Real>& h, int row,
                                                        int key, int offset, bool visible, bool keep, Real product,
                                                        Real score_scale, const RowStats<Real>& stats, Real grad,
                                                        Real delta) {
  return weighted_by<T>(
      s, h.slope, [&] { return distance<Real>(row, key, offset); }, [&] { return mask_value<T>(s, h, row, key); },
      visible, keep, product, score_scale, stats, grad, delta);
}

// Bits of eight keys of a row: kept or dropped.
template <class Real>
__device__ __forceinline__ uint32_t kept_octet(const ScoresOf<Real>& s, uint32_t head, int row, int octet) {
  if (s.heads_between) head += head / s.heads * s.heads_between;
  const int parts = s.first_key % 8 ? 2 : 1;  // octets of the counter that have a part of it
  uint32_t kept = 0;
#pragma unroll 1
  for (int part = 0; part < parts; part++) {
    const Philox bits(*s.seed, head + s.first_head, static_cast<uint32_t>(row + s.first_row),
                      static_cast<uint32_t>(octet + s.first_key / 8 + part));
    uint32_t these = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) these |= (bits.bits16(e) >= s.threshold ? 1u : 0u) << e;
    kept |= these << (8 * part);
  }
  return kept >> s.first_key % 8 & 0xff;
}

// What a thread's elements have of the octets that it and its neighbours have drawn (kept). Rows down:
template <int Tiles>
__device__ __forceinline__ uint32_t of_octets(uint32_t mine, int lane, RowFragment<Tiles>) {
  constexpr int kCount = 4 * Tiles;
  const int t = lane % 4;
  uint32_t bits = 0;
#pragma unroll
  for (int u = 0; u < 4; u++) {
    const uint32_t theirs = ptx::shfl(mine, (lane & ~3) | u) >> (2 * t);
#pragma unroll
    for (int m = 0; m < (kCount + 7) / 8; m++) bits |= (theirs >> (8 * m) & 3) << (2 * (m * 4 + u));
  }
  return bits;
}
// and keys down.
template <int KeyTiles, int RowTiles>
__device__ __forceinline__ uint32_t of_octets(uint32_t mine, int lane, KeyFragment<KeyTiles, RowTiles>) {
  constexpr int kCount = 4 * KeyTiles * RowTiles;
  const int g = lane / 4, t = lane % 4;
  uint32_t bits = 0;
#pragma unroll
  for (int u = 0; u < 8; u++) {
    const uint32_t theirs = ptx::shfl(mine, u * 4 + t) >> g;
#pragma unroll
    for (int m = 0; m < (kCount + 7) / 8; m++) {
      const int c = m * 8 + u, octet = c / 2 / RowTiles;
      // element 4 (octet / 2 * RowTiles + tile of rows) + 2 (octet % 2) + c % 2: see KeyFragment
      const int tile = octet / 2 * RowTiles + c / 2 % RowTiles, element = tile * 4 + octet % 2 * 2 + c % 2;
      bits |= (theirs >> (8 * m) & 1) << element;
    }
  }
  return bits;
}

// Dropout of a fragment with rows down: the four threads of a row draw a quarter of its octets each. row, key: of
// the thread's element 0, so key = a multiple of 8, plus 2 t.
template <class F, class Real>
__device__ __forceinline__ uint32_t kept(const ScoresOf<Real>& s, const HeadScoresOf<Real>& h, int row, int key,
                                         int lane, F f) {
  const int t = lane % 4;
  uint32_t mine = 0;
#pragma unroll
  for (int m = 0; m < (F::kCount + 7) / 8; m++) {
    const int c = m * 4 + t;  // octet c / 2 of row + 8 (c % 2)
    mine |= kept_octet(s, h.index, row + c % 2 * 8, key / 8 + c / 2) << (8 * m);
  }
  return of_octets(mine, lane, f);
}
// With keys down: eight threads, of the same rows, an eighth each. key = a multiple of 8, plus lane / 4.
template <int KeyTiles, int RowTiles, class Real>
__device__ __forceinline__ uint32_t kept(const ScoresOf<Real>& s, const HeadScoresOf<Real>& h, int row, int key,
                                         int lane, KeyFragment<KeyTiles, RowTiles> f) {
  constexpr int kCount = 4 * KeyTiles * RowTiles;
  uint32_t mine = 0;
#pragma unroll
  for (int m = 0; m < (kCount + 7) / 8; m++) {
    const int c = m * 8 + lane / 4, octet = c / 2 / RowTiles;  // of row 8 (c / 2 % RowTiles) + c % 2
    mine |= kept_octet(s, h.index, row + c / 2 % RowTiles * 8 + c % 2, key / 8 + octet) << (8 * m);
  }
  return of_octets(mine, lane, f);
}

// A fragment with rows down: products to scores, -inf where hidden; returns `seen` without what a
// floating mask hides.
template <class T, class F, class Real>
__device__ __forceinline__ uint32_t score(Real (&s)[F::kCount / 4][4], const ScoresOf<Real>& options,
                                          const HeadScoresOf<Real>& h, Real score_scale, int offset, int row, int key,
                                          uint32_t seen) {
#pragma unroll
  for (int i = 0; i < F::kCount; i++) s[i / 4][i % 4] = capped<T>(options, s[i / 4][i % 4], score_scale).value;
  if (options.slopes) {
    const int distance = row + offset - key;
#pragma unroll
    for (int i = 0; i < F::kCount; i++)
      s[i / 4][i % 4] -= ptx::rounded_product(h.slope, static_cast<Real>(abs(distance + F::row(i) - F::key(i))));
  }
  if (options.mask_kind > MaskElement::boolean) {
#pragma unroll
    for (int i = 0; i < F::kCount; i++)
      if (seen >> i & 1) {
        const Real bias = mask_value<T>(options, h, row + F::row(i), key + F::key(i));
        s[i / 4][i % 4] += bias;
        if (bias == -INFINITY) seen &= ~(1u << i);
      }
  }
#pragma unroll
  for (int i = 0; i < F::kCount; i++)
    if (!(seen >> i & 1)) s[i / 4][i % 4] = -INFINITY;
  return seen;
}

// 0 for the weights that dropout takes
template <class F, class Real>
__device__ __forceinline__ void drop(Real (&s)[F::kCount / 4][4], const ScoresOf<Real>& options,
                                     const HeadScoresOf<Real>& h, int row, int key) {
  const uint32_t bits = kept(options, h, row, key, threadIdx.x % 32, F{});
#pragma unroll
  for (int i = 0; i < F::kCount; i++)
    if (!(bits >> i & 1)) s[i / 4][i % 4] = 0;
}

// Is `here` true for any thread of the block? One barrier; `flags`: two words for each warp, used in turns.
__device__ __forceinline__ bool block_any(bool here, uint32_t* flags, int& turn, int warps) {
  const bool mine = ptx::any(here);
  uint32_t* now = flags + turn * warps;
  turn ^= 1;
  if (threadIdx.x % 32 == 0) now[threadIdx.x / 32] = mine;
  __syncthreads();
  uint32_t some = 0;
  for (int w = 0; w < warps; w++) some |= now[w];
  return some != 0;
}

// ---- d += a b for two tiles of 8 columns; and where b may hold numbers that are not finite: these count only for rows
// whose weight is not 0 ----

template <class T>
__device__ __forceinline__ void pair_mma(float (&d0)[4], float (&d1)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  ptx::mma_m16n8k16<T>(d0, a, b[0], b[1]);
  ptx::mma_m16n8k16<T>(d1, a, b[2], b[3]);
}

// all ones in the halves that are not finite
template <class T>
__device__ __forceinline__ uint32_t not_finite(uint32_t x) {
  constexpr uint32_t kExponent = ptx::is_bf16<T> ? 0x7f807f80u : 0x7c007c00u, kLow = kExponent & ~(kExponent << 1);
  return (((x & kExponent) + kLow) >> 15 & 0x00010001u) * 0xffffu;
}
template <class T>
__device__ __forceinline__ bool all_finite(const uint32_t (&b)[4]) {
  return !(not_finite<T>(b[0]) | not_finite<T>(b[1]) | not_finite<T>(b[2]) | not_finite<T>(b[3]));
}
// numbers that are not finite count, as NaN, for the rows alone whose weight is not 0
template <class T>
__device__ __forceinline__ void guarded_mma(float (&d0)[4], float (&d1)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[4]) {
  uint32_t weight[4];
#pragma unroll
  for (int e = 0; e < 4; e++) weight[e] = a[e] & 0x7fff7fffu;
  const auto one = [&](float (&d)[4], uint32_t b0, uint32_t b1) {
    constexpr uint32_t kOne = ptx::is_bf16<T> ? 0x3f803f80u : 0x3c003c00u;
    const uint32_t bad0 = not_finite<T>(b0), bad1 = not_finite<T>(b1);
    float y[4] = {};
    ptx::mma_m16n8k16<T>(y, weight, bad0 & kOne, bad1 & kOne);
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (y[e] != 0.f) d[e] = NAN;
    ptx::mma_m16n8k16<T>(d, a, b0 & ~bad0, b1 & ~bad1);
  };
  one(d0, b[0], b[1]);
  one(d1, b[2], b[3]);
}

}  // namespace attnjourney

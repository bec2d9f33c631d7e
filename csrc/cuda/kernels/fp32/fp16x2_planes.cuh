// float32 in halves, for tensor cores that multiply those alone (Ootomo and Yokota, arXiv 2203.03341, with a scale): x
// times a power of two is high + low, both rounded to nearest, with an error of 2^-24 of x. A tile of 8192 / D rows has
// one power of two, which brings its largest number to [2^14, 2^15); below 2^-16 of that number, low runs out of bits
// (where low halves are kept times 2^11: 2^-27). Tiles that hold such rows (or columns, where these are summed over),
// numbers that are not finite or beyond 2^33 are counted: one is enough for the call to be left to the fp32 kernels,
// which do without scales.
//
// Within a row of Q or K, an element below 2^-16 of its tile's largest number has an error of 2^-40 of that one. Planes
// take as much memory as the inputs.
#pragma once
#include <cstring>

#include "cuda/ptx/sm80.cuh"
#include "fp16x2_task.cuh"

namespace attnjourney {

__device__ __forceinline__ float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
__device__ __forceinline__ uint32_t magnitude_bits(float x) {  // ordered as magnitudes are, NaN last
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits & 0x7fffffffu;
}

// What brings a largest magnitude to [2^14, 2^15).
struct PowerOfTwo {
  static constexpr uint32_t kBias = 127, kTop = 14;  // of float's exponents; the largest magnitude's, then
  uint32_t exponent;                                 // of that magnitude, with the bias
  __device__ __forceinline__ float scale() const { return float_of_bits((2 * kBias + kTop - exponent) << 23); }
  __device__ __forceinline__ float inverse() const { return float_of_bits((exponent - kTop) << 23); }
};

// Two numbers as halves.
struct Fp16x2Pair {
  uint32_t high, low;
  float2 rounded;  // high
  __device__ __forceinline__ Fp16x2Pair(float a, float b, float low_factor)
      : high(ptx::pack2<Half>(a, b)), rounded(ptx::unpack2<Half>(high)) {
    low = ptx::pack2<Half>((a - rounded.x) * low_factor, (b - rounded.y) * low_factor);
  }
};

// Some rows of one head, and how they are split.
struct Fp16x2Rows {
  const float* from;  // row 0
  unsigned char* to;  // its planes
  int64_t stride;     // of rows, in elements
  int end, dim;       // beyond these rows and columns there are zeros
  int length;         // rows that are written
  float low_factor;   // of low halves
  uint32_t range;     // what is smaller by a greater power of two does not split
  uint32_t lowest;    // exponent of the least largest number, plus 127
  bool columns;       // do small columns count?
};

// One tile, from row `row0` on; the whole block. Returns its power of two.
template <int D>
__device__ __forceinline__ PowerOfTwo fp16x2_tile(const Fp16x2Rows& r, int row0, uint32_t* count) {
  constexpr int kLanes = D / 4, kStep = 1024 / D, kPasses = 8;
  const int tid = threadIdx.x, lane = tid % 32, column = tid % kLanes * 4;
  row0 += tid / kLanes;
  const float* from = r.from + column;
  float x[kPasses][4];
#pragma unroll
  for (int i = 0; i < kPasses; i++) {
    const int row = row0 + i * kStep;
    float4 v{0.f, 0.f, 0.f, 0.f};
    if (row < r.end && column < r.dim) v = *reinterpret_cast<const float4*>(from + row * r.stride);
    x[i][0] = v.x, x[i][1] = v.y, x[i][2] = v.z, x[i][3] = v.w;
  }

  uint32_t rows[kPasses], columns[4] = {}, most = 0;  // the largest magnitudes
#pragma unroll
  for (int i = 0; i < kPasses; i++) {
    rows[i] = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const uint32_t bits = magnitude_bits(x[i][e]);
      rows[i] = max(rows[i], bits), columns[e] = max(columns[e], bits);
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) rows[i] = max(rows[i], ptx::shfl_xor(rows[i], mask));
    most = max(most, rows[i]);
  }
  if (kLanes < 32) most = max(most, ptx::shfl_xor(most, 16));
  uint32_t* parts = reinterpret_cast<uint32_t*>(ptx::dynamic_smem());
  if (lane == 0) parts[tid / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Fp16x2Size<D>::kThreads / 32; i++) most = max(most, parts[i]);

  const uint32_t exponent = max(r.lowest, min(most >> 23, 127u + 32));
  const auto small = [&](uint32_t bits) { return bits != 0 && (bits >> 23) + r.range < exponent; };
  bool needs_fallback = most >> 23 > exponent;
#pragma unroll
  for (int i = 0; i < kPasses; i++) needs_fallback = needs_fallback || small(rows[i]);
#pragma unroll
  for (int e = 0; e < 4; e++) needs_fallback = needs_fallback || (r.columns && small(columns[e]));
  if (ptx::any(needs_fallback) && lane == 0) ptx::atomic_add(count, 1);
  const PowerOfTwo power{exponent};
  const float scale = power.scale();
  unsigned char* to = r.to + 2 * column;
#pragma unroll
  for (int i = 0; i < kPasses; i++) {
    const int row = row0 + i * kStep;
    const Fp16x2Pair a(x[i][0] * scale, x[i][1] * scale, r.low_factor);
    const Fp16x2Pair b(x[i][2] * scale, x[i][3] * scale, r.low_factor);
    if (row < r.length) {
      *reinterpret_cast<int2*>(to + int64_t(row) * (4 * D)) = int2{int(a.high), int(b.high)};
      *reinterpret_cast<int2*>(to + int64_t(row) * (4 * D) + 2 * D) = int2{int(a.low), int(b.low)};
    }
  }
  return power;
}

// For the forward. grid: batch * (q_heads * query_tiles + 2 * kv_heads * key_tiles)
template <int D>
__global__ void __launch_bounds__(Fp16x2Size<D>::kThreads)
    fp16x2_planes(const __grid_constant__ ForwardTask p, const __grid_constant__ Fp16x2Planes w) {
  const int queries = p.batch * p.q_heads * w.query_tiles, keys = p.batch * w.kv_heads * w.key_tiles;
  int tile = blockIdx.x;
  const bool is_query = tile < queries, is_value = tile >= queries + keys;
  if (!is_query) tile -= is_value ? queries + keys : queries;
  const int tiles = is_query ? w.query_tiles : w.key_tiles, heads = is_query ? p.q_heads : w.kv_heads;
  const int pair = tile / tiles, batch = pair / heads, head = pair - batch * heads;
  const Sequence sequence = sequence_of(p, batch);
  const Strides s = is_query ? p.query_strides : is_value ? p.value_strides : p.key_strides;
  Fp16x2Rows r;
  r.from = static_cast<const float*>(is_query ? p.query : is_value ? p.value : p.key) + batch * s.batch + head * s.head;
  r.length = is_query ? p.q_len : p.kv_len, r.end = is_query ? sequence.q_len : sequence.keys.key_length;
  r.to = (is_query ? w.query : is_value ? w.value : w.key) + int64_t(pair) * r.length * (4 * D);
  r.stride = s.row, r.dim = is_value ? p.v_head_dim : p.head_dim;
  r.low_factor = is_value ? kLowFactor : 1.f, r.range = is_value ? 27 : 16, r.lowest = 127 - 32, r.columns = is_value;
  const PowerOfTwo power = fp16x2_tile<D>(r, (tile - pair * tiles) * Fp16x2Size<D>::kRows, w.needs_fallback);
  const float scale = power.scale(), inverse = power.inverse();
  if (threadIdx.x != 0) return;
  if (is_query)
    w.query_scale[tile] = inverse;
  else if (is_value)
    w.key_scale[tile].y = scale, w.key_scale[tile].z = w.key_scale[tile].w = inverse;
  else
    w.key_scale[tile].x = inverse;
}

}  // namespace attnjourney

// Rows between memory and the tiles of linear attention: feature maps, 16-byte chunks, single elements where rows do
// not lie in chunks.
#pragma once
#include "cuda/kernels/common/numbers.cuh"
#include "task.cuh"

namespace attnjourney {

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

template <class Real>
__device__ __forceinline__ Real feature(FeatureMap map, Real x) {
  if (map == FeatureMap::relu) return x <= Real(0) ? Real(0) : x;  // a NaN stays
  if (map == FeatureMap::elu_plus_one) return x >= Real(0) ? x + Real(1) : exponential(x);
  return x;
}
template <class Real>
__device__ __forceinline__ Real feature_slope(FeatureMap map, Real x) {
  if (map == FeatureMap::relu) return x <= Real(0) ? Real(0) : Real(1);
  if (map == FeatureMap::elu_plus_one) return x >= Real(0) ? Real(1) : exponential(x);
  return Real(1);
}

template <class T>
struct LinearElement {  // of tensors; arithmetic is in C
  using Real = Compute<T>;
  static constexpr int kChunk = kVector<T>;
  static __device__ __forceinline__ void unpack(const uint4& chunk, Real (&values)[kChunk]) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 pair = ptx::unpack2<T>(words[i]);
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
  }
  static __device__ __forceinline__ uint4 pack(const Real (&values)[kChunk]) {
    return {ptx::pack2<T>(values[0], values[1]), ptx::pack2<T>(values[2], values[3]),
            ptx::pack2<T>(values[4], values[5]), ptx::pack2<T>(values[6], values[7])};
  }
};
template <class Real_>
struct LinearPlainElement {
  using Real = Real_;
  static constexpr int kChunk = kVector<Real>;
  static __device__ __forceinline__ void unpack(const uint4& chunk, Real (&values)[kChunk]) {
#pragma unroll
    for (int i = 0; i < kChunk; i++) values[i] = reinterpret_cast<const Real*>(&chunk)[i];
  }
  static __device__ __forceinline__ uint4 pack(const Real (&values)[kChunk]) {
    return *reinterpret_cast<const uint4*>(values);
  }
};
template <>
struct LinearElement<float> : LinearPlainElement<float> {};
template <>
struct LinearElement<double> : LinearPlainElement<double> {};

// Elements `at` .. of a row, kChunk of them of which `count` exist; others 0.
template <class T>
__device__ __forceinline__ void load_chunk(const void* base, int64_t at, int count, bool chunks,
                                           typename LinearElement<T>::Real (&values)[LinearElement<T>::kChunk]) {
  using Element = LinearElement<T>;
  if (chunks && count >= Element::kChunk) {
    Element::unpack(*reinterpret_cast<const uint4*>(static_cast<const T*>(base) + at), values);
    return;
  }
#pragma unroll
  for (int j = 0; j < Element::kChunk; j++)
    values[j] = j < count ? ptx::to_float(static_cast<const T*>(base)[at + j]) : typename Element::Real(0);
}
template <class T>
__device__ __forceinline__ void store_chunk(void* base, int64_t at, int count, bool chunks,
                                            const typename LinearElement<T>::Real (&values)[LinearElement<T>::kChunk]) {
  using Element = LinearElement<T>;
  if (chunks && count >= Element::kChunk) {
    *reinterpret_cast<uint4*>(static_cast<T*>(base) + at) = Element::pack(values);
    return;
  }
#pragma unroll
  for (int j = 0; j < Element::kChunk; j++)
    if (j < count) store_one(static_cast<T*>(base) + at + j, values[j]);
}

// One head of A, B or C.
template <class T>
struct LinearHeadRows {
  using Element = LinearElement<T>;
  using Real = typename Element::Real;
  const T* data;
  const Real* scales;
  const uint8_t* blocked;
  __device__ __forceinline__ LinearHeadRows(const LinearRows& rows, int batch, int head, int heads, int length)
      : data(static_cast<const T*>(rows.data) + batch * rows.batch + head * rows.head),
        scales(rows.scales ? static_cast<const Real*>(rows.scales) + (int64_t(batch) * heads + head) * length
                           : nullptr),
        blocked(rows.blocked ? rows.blocked + int64_t(batch) * length : nullptr) {}
};

// A tile of Rows x Cols on its way from memory to shared memory: fetched before it is needed, mapped when put.
template <class T, int Rows, int Cols, int Threads>
struct LinearTile {
  using Element = LinearElement<T>;
  using Real = typename Element::Real;
  static constexpr int kPer = Cols / Element::kChunk, kCount = Rows * kPer / Threads;
  static_assert(Rows * kPer % Threads == 0);

  uint4 raw[kCount];
  uint32_t exists;  // a bit for each chunk

  static __device__ __forceinline__ int row_of(int i) { return (i * Threads + int(threadIdx.x)) / kPer; }
  static __device__ __forceinline__ int col_of(int i) {
    return (i * Threads + int(threadIdx.x)) % kPer * Element::kChunk;
  }

  __device__ __forceinline__ void fetch(const LinearRows& rows, const LinearHeadRows<T>& head, int row0, int end,
                                        int col0) {
    exists = 0;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const int row = row0 + row_of(i), col = col0 + col_of(i);
      const bool there = row < end && col < rows.cols && !(head.blocked && head.blocked[row]);
      raw[i] = uint4{0, 0, 0, 0};
      if (!there) continue;
      exists |= 1u << i;
      const T* x = head.data + row * rows.row + col;
      if (rows.chunks) {
        raw[i] = *reinterpret_cast<const uint4*>(x);
      } else {
        Real values[Element::kChunk];
        load_chunk<T>(x, 0, rows.cols - col, false, values);
        raw[i] = Element::pack(values);
      }
    }
  }
  // Round: to what tensor cores read. Tells whether all numbers are finite.
  template <int Pitch, bool Round>
  __device__ __forceinline__ bool put(const LinearRows& rows, const LinearHeadRows<T>& head, int row0, int col0,
                                      Real* tile) const {
    Real sum = 0;  // x - x is 0 for a finite x, else NaN
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      Real x[Element::kChunk];
      Element::unpack(raw[i], x);
      Real factor = Real(rows.factor);
      if (head.scales && exists >> i & 1) factor *= head.scales[row0 + row_of(i)];
      const int left = exists >> i & 1 ? rows.cols - col0 - col_of(i) : 0;
#pragma unroll
      for (int j = 0; j < Element::kChunk; j++) {
        x[j] = j < left ? feature(rows.map, x[j]) * factor : Real(0);
        sum += x[j] - x[j];
        if constexpr (Round) x[j] = ptx::round_tf32(x[j]);
      }
      if constexpr (sizeof(Real) == 4) {
#pragma unroll
        for (int j = 0; j < Element::kChunk; j += 4)
          *reinterpret_cast<float4*>(tile + row_of(i) * Pitch + col_of(i) + j) =
              float4{x[j], x[j + 1], x[j + 2], x[j + 3]};
      } else {
        Real* to = tile + row_of(i) * Pitch + col_of(i);
        to[0] = x[0], to[1] = x[1];
      }
    }
    return sum == Real(0);
  }
};

}  // namespace attnjourney

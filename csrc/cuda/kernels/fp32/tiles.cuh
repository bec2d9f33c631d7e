// Tiles of float or double in shared memory and their products on tensor cores, of which those for 16 bits lose too
// much. Float: three products of TF32, high x high and high x low twice (Ootomo and Yokota, arXiv 2203.03341); the two
// small ones have sums of their own, and so has every slice of 64 columns and every tile of keys, since these units do
// not round but cut; ordinary addition joins the sums, and the error does not grow with the length. Double: its own
// instruction. Both hold fragments of 16 x 8 numbers in the same places: C and D elements (g, 2t), (g, 2t + 1), (g + 8,
// 2t), (g + 8, 2t + 1) with g = lane / 4, t = lane % 4.
#pragma once
#include "cuda/kernels/common/scores.cuh"

namespace attnjourney {

template <class Real>
inline constexpr int kFp32Lanes = 16 / sizeof(Real);  // numbers in a chunk of 16 bytes

// ---- tiles: rows of D numbers ----

template <class Real, int D>
inline constexpr int kFp32Row = D * static_cast<int>(sizeof(Real));

// Where a chunk is. The XOR puts into different banks what eight threads read at once: two rows by four chunks, or
// four rows of one parity by two chunks.
template <class Real, int D>
__device__ __forceinline__ int fp32_at(int row, int chunk) {
  const int parity = row & 1, pair = row & 6;  // pair: twice that of the row among eight
  return row * kFp32Row<Real, D> + ((chunk ^ (parity << 2) ^ pair) << 4);
}
// Four chunks on from where a thread is, or one row down from an even one, this changes as well: few addresses serve.
constexpr int kOtherHalf = 64;
// Where a thread reads row0 + lane / 4 (row0: a multiple of 8), chunks `first` + lane % 4 for multiples of 4.
template <class Real, int D>
struct RowReader {
  const unsigned char *even, *odd;
  __device__ __forceinline__ RowReader(const unsigned char* tile, int row0, int lane) {
    const int at = fp32_at<Real, D>(row0 + lane / 4, lane % 4);
    even = tile + at, odd = tile + (at ^ kOtherHalf);
  }
  // `below` more rows, a multiple of 8
  __device__ __forceinline__ const unsigned char* at(int below, int first) const {
    return (first / 4 % 2 ? odd : even) + below * kFp32Row<Real, D> + first / 8 * 128;
  }
};
// Rows 8 k + 2 (lane % 4) and the next, chunk 8 group + lane / 4.
template <class Real, int D>
struct ColumnReader {
  const unsigned char *even, *odd;
  __device__ __forceinline__ ColumnReader(const unsigned char* tile, int group, int lane) {
    const int at = fp32_at<Real, D>(lane % 4 * 2, lane / 4);
    even = tile + at + group * 128, odd = tile + (at ^ kOtherHalf) + group * 128 + kFp32Row<Real, D>;
  }
};

// Starts the copy of rows [row0, row0 + Count) of one head; rows past the end and columns past `dim` become zeros.
template <class Real, int D, int Count, int Threads>
__device__ __forceinline__ void fp32_load(uint32_t tile, const Real* base, int64_t stride, int row0, int rows,
                                          int dim) {
  constexpr int kChunks = D / kFp32Lanes<Real>;
  static_assert(Count * kChunks % Threads == 0);
  const int tid = ptx::opaque(threadIdx.x);
#pragma unroll
  for (int i = 0; i < Count * kChunks / Threads; i++) {
    const int c = i * Threads + tid, row = c / kChunks, chunk = c % kChunks;
    const bool valid = row0 + row < rows && chunk * kFp32Lanes<Real> < dim;
    ptx::cp_async_16(tile + fp32_at<Real, D>(row, chunk),
                     base + (valid ? (row0 + row) * stride + chunk * kFp32Lanes<Real> : 0), valid);
  }
}

__device__ __forceinline__ void read_chunk(float (&x)[4], const unsigned char* at) {
  const float4 v = *reinterpret_cast<const float4*>(at);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
__device__ __forceinline__ void read_chunk(double (&x)[2], const unsigned char* at) {
  const double2 v = *reinterpret_cast<const double2*>(at);
  x[0] = v.x, x[1] = v.y;
}
__device__ __forceinline__ void write_chunk(void* at, const float (&x)[4]) {
  *static_cast<float4*>(at) = float4{x[0], x[1], x[2], x[3]};
}
__device__ __forceinline__ void write_chunk(void* at, const double (&x)[2]) {
  *static_cast<double2*>(at) = double2{x[0], x[1]};
}
// two neighbours, of which the first has an even number
__device__ __forceinline__ void read_pair(float (&x)[2], const unsigned char* at) {
  const float2 v = *reinterpret_cast<const float2*>(at);
  x[0] = v.x, x[1] = v.y;
}
__device__ __forceinline__ void read_pair(double (&x)[2], const unsigned char* at) { read_chunk(x, at); }

// ---- fragments: A of 16 x 8, B of 8 x 8, sums of 16 x 8 ----

template <class Real>
struct Fp32Operand {  // double
  double x[4];
  // (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)
  __device__ __forceinline__ void set(double a, double b, double c, double d) {
    x[0] = a, x[1] = b, x[2] = c, x[3] = d;
  }
};
template <>
struct Fp32Operand<float> {
  uint32_t high[4], low[4];
  __device__ __forceinline__ void set(float a, float b, float c, float d) {
    ptx::split(a, high[0], low[0]);
    ptx::split(b, high[1], low[1]);
    ptx::split(c, high[2], low[2]);
    ptx::split(d, high[3], low[3]);
  }
};

template <class Real>
struct Fp32Sum {  // double
  double x[4] = {};
  __device__ __forceinline__ double operator[](int e) const { return x[e]; }
  __device__ __forceinline__ void add(const Fp32Operand<double>& a, double b0, double b1) {
    ptx::mma_m8n8k4(x[0], x[1], a.x[0], b0);
    ptx::mma_m8n8k4(x[2], x[3], a.x[1], b0);
    ptx::mma_m8n8k4(x[0], x[1], a.x[2], b1);
    ptx::mma_m8n8k4(x[2], x[3], a.x[3], b1);
  }
};
template <>
struct Fp32Sum<float> {
  float large[4] = {}, small[4] = {};
  __device__ __forceinline__ float operator[](int e) const { return large[e] + small[e]; }
  __device__ __forceinline__ void add(const Fp32Operand<float>& a, float b0, float b1) {
    uint32_t high[2], low[2];
    ptx::split(b0, high[0], low[0]);
    ptx::split(b1, high[1], low[1]);
    ptx::mma_m16n8k8(small, a.low, high[0], high[1]);
    ptx::mma_m16n8k8(small, a.high, low[0], low[1]);
    ptx::mma_m16n8k8(large, a.high, high[0], high[1]);
  }
};

// The A fragments of rows g and g + 8 of a reader from chunk `chunks` on: steps over 8 columns, which are taken in an
// order of their own, the same as that of B in rows_product.
template <class Real, int D>
__device__ __forceinline__ void row_operands(Fp32Operand<Real> (&a)[kFp32Lanes<Real> / 2],
                                             const RowReader<Real, D>& reader, int chunks) {
  Real x[kFp32Lanes<Real>], y[kFp32Lanes<Real>];
  read_chunk(x, reader.at(0, chunks));
  read_chunk(y, reader.at(8, chunks));
#pragma unroll
  for (int s = 0; s < kFp32Lanes<Real> / 2; s++) a[s].set(x[2 * s], y[2 * s], x[2 * s + 1], y[2 * s + 1]);
}

// sum += A B^T over Columns columns from `first` on. `operands(a, chunks)` supplies rows of A; b: rows of B.
template <class Real, int D, int Columns, int Tiles, class Operands>
__device__ __forceinline__ void add_rows_product(Fp32Sum<Real> (&sum)[Tiles], Operands&& operands,
                                                 const RowReader<Real, D>& b, int first) {
  constexpr int kStep = 4 * kFp32Lanes<Real>;
  constexpr int kUnroll = sizeof(Real) == 4 ? Columns / kStep : 2;  // double: more of them would spill
#pragma unroll kUnroll
  for (int c = first; c < first + Columns; c += kStep) {
    const int chunks = c / kFp32Lanes<Real>;
    Fp32Operand<Real> a[kFp32Lanes<Real> / 2];
    operands(a, chunks);
#pragma unroll
    for (int j = 0; j < Tiles; j++) {
      Real x[kFp32Lanes<Real>];
      read_chunk(x, b.at(8 * j, chunks));
#pragma unroll
      for (int i = 0; i < kFp32Lanes<Real> / 2; i++) sum[j].add(a[i], x[2 * i], x[2 * i + 1]);
    }
  }
}

// s = A B^T: B: rows [row0, row0 + 8 Tiles) of a tile. Columns from `dim` on are zeros.
constexpr int kSumColumns = 64;  // that have sums of their own
template <class Real, int D, int Tiles, class Operands>
__device__ __forceinline__ void rows_product(Real (&s)[Tiles][4], Operands&& operands, const unsigned char* b, int row0,
                                             int dim, int lane) {
  constexpr int kSlice = D < kSumColumns ? D : kSumColumns;
  const RowReader<Real, D> reader(b, row0, lane);
#pragma unroll
  for (int slice = 0; slice < D; slice += kSlice) {
    Fp32Sum<Real> sum[Tiles];
    if (slice && slice >= dim) break;
    add_rows_product<Real, D, kSlice>(sum, operands, reader, slice);
#pragma unroll
    for (int j = 0; j < Tiles; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[j][e] = slice ? s[j][e] + sum[j][e] : sum[j][e];
  }
}

// An accumulator fragment as the A of columns_product.
template <class Real>
__device__ __forceinline__ void weight_operand(Fp32Operand<Real>& a, const Real (&s)[4]) {
  a.set(s[0], s[2], s[1], s[3]);
}

// Column groups: 8 chunks. Tile j of a group has columns kFp32Lanes n + j, so that a thread owns whole chunks: 2t and
// 2t
// + 1.
template <class Real, int D>
inline constexpr int kGroups = D / (8 * kFp32Lanes<Real>);

// sum = A B for one group of columns of B, rows [0, 8 Steps) of a tile. `operand(a, k)`: rows 8 k + 2t count as columns
// t of A's fragment k, rows 8 k + 2t + 1 as t + 4.
template <class Real, int D, int Steps, class Operand>
__device__ __forceinline__ void columns_product(Fp32Sum<Real> (&sum)[kFp32Lanes<Real>], Operand&& operand,
                                                const unsigned char* b, int group, int lane) {
  const ColumnReader<Real, D> reader(b, group, lane);
#pragma unroll
  for (int k = 0; k < Steps; k++) {
    Fp32Operand<Real> a;
    operand(a, k);
    Real x[kFp32Lanes<Real>], y[kFp32Lanes<Real>];
    read_chunk(x, reader.even + 8 * k * kFp32Row<Real, D>);
    read_chunk(y, reader.odd + 8 * k * kFp32Row<Real, D>);
#pragma unroll
    for (int j = 0; j < kFp32Lanes<Real>; j++) sum[j].add(a, x[j], y[j]);
  }
}

// ---- numbers that are not finite: where some rows do not see some keys, 0 x NaN must not count ----

template <class Real>
__device__ __forceinline__ bool is_finite(Real x) {
  return x - x == 0;
}

// Is this thread's share of a tile finite?
template <class Real, int D, int Count, int Threads>
__device__ __forceinline__ bool share_finite(const unsigned char* tile) {
  bool finite = true;
#pragma unroll 1
  for (int i = threadIdx.x; i < Count * D / kFp32Lanes<Real>; i += Threads) {
    Real x[kFp32Lanes<Real>];
    read_chunk(x, tile + 16 * i);
#pragma unroll
    for (int j = 0; j < kFp32Lanes<Real>; j++) finite = finite && is_finite(x[j]);
  }
  return finite;
}
// 0 in its place
template <class Real, int D, int Count, int Threads>
__device__ __forceinline__ void clear_share(unsigned char* tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < Count * D / kFp32Lanes<Real>; i += Threads) {
    Real x[kFp32Lanes<Real>];
    read_chunk(x, tile + 16 * i);
#pragma unroll
    for (int j = 0; j < kFp32Lanes<Real>; j++) x[j] = is_finite(x[j]) ? x[j] : 0;
    write_chunk(tile + 16 * i, x);
  }
}

// Which weights of the rows g and g + 8 of a fragment are not 0, one bit for each of up to 32 columns.
template <int Tiles, class Real>
__device__ __forceinline__ void weight_bits(uint32_t (&bits)[2], const Real (&s)[Tiles][4], int lane) {
  static_assert(Tiles <= 4);
  bits[0] = bits[1] = 0;
#pragma unroll
  for (int i = 0; i < 4 * Tiles; i++)
    if (s[i / 4][i % 4] != 0) bits[i / 2 % 2] |= 1u << (i / 4 * 8 + lane % 4 * 2 + i % 2);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    bits[h] |= ptx::shfl_xor(bits[h], 1);
    bits[h] |= ptx::shfl_xor(bits[h], 2);
  }
}
// NaN in the sums of weights with rows of a tile, where a number that is not finite has a weight; columns of `Groups`
// groups.
template <class Real, int D, int Groups>
__device__ __forceinline__ void mark_not_finite(Real (&d)[Groups * kFp32Lanes<Real>][4], const uint32_t (&bits)[2],
                                                const unsigned char* tile, int first_group, int lane) {
#pragma unroll 1
  for (int r = 0; r < 32; r++) {
    const bool weight[2] = {(bits[0] >> r & 1) != 0, (bits[1] >> r & 1) != 0};
    if (!weight[0] && !weight[1]) continue;
#pragma unroll
    for (int i = 0; i < 2 * Groups; i++) {
      Real x[kFp32Lanes<Real>];
      read_chunk(x, tile + fp32_at<Real, D>(r, (first_group + i / 2) * 8 + lane % 4 * 2 + i % 2));
#pragma unroll
      for (int e = 0; e < 2 * kFp32Lanes<Real>; e++)
        if (weight[e % 2] && !is_finite(x[e / 2])) d[i / 2 * kFp32Lanes<Real> + e / 2][e % 2 * 2 + i % 2] = NAN;
    }
  }
}

}  // namespace attnjourney

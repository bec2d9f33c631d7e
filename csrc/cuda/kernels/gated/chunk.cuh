// What the kernels of gated linear attention share: where a chunk lies, its rows on their way to shared memory, and
// products of 16 rows a warp.
#pragma once
#include "cuda/kernels/linear/products.cuh"
#include "task.cuh"

namespace attnjourney {

struct GatedChunk {
  int sequence, batch;     // batch: of the tensors
  int slot, first, count;  // its rows are first .. first + count - 1 of the tensors'
};
struct GatedSequence {
  int batch, first, len, slot;  // slot: of its first chunk
};
__device__ __forceinline__ GatedSequence gated_sequence(const GatedTask& t, int n, int rows) {
  if (!t.offsets) return {n, 0, t.len, n * ((t.len + rows - 1) / rows)};
  const int first = t.offsets[n];
  return {0, first, t.offsets[n + 1] - first, first / rows + n};
}
// count 0: nothing is there
__device__ __forceinline__ GatedChunk gated_chunk(const GatedTask& t, int slot, int rows) {
  int n = 0;
  if (t.offsets) {  // the last sequence whose first slot is not behind this one
    for (int end = t.sequences; end - n > 1;) {
      const int middle = (n + end) / 2;
      (t.offsets[middle] / rows + middle <= slot ? n : end) = middle;
    }
  } else {
    n = slot / ((t.len + rows - 1) / rows);
  }
  const GatedSequence s = gated_sequence(t, n, rows);
  const int at = (slot - s.slot) * rows;
  return {n, s.batch, slot, s.first + at, max(0, min(rows, s.len - at))};
}

template <class Real>
__device__ __forceinline__ Real gated_exp(Real x) {
  return exponential(x);
}

// a number of a row: of `numbers` [batch, heads, len], 1 where there is none
template <class Real>
__device__ __forceinline__ Real gated_scalar(const void* numbers, int64_t at) {
  return numbers ? static_cast<const Real*>(numbers)[at] : Real(1);
}
template <class Real>
__device__ __forceinline__ Real gated_beta(const GatedTask& t, int batch, int head, int row) {
  return t.beta
             ? static_cast<const Real*>(t.beta)[batch * t.beta_batch + head * t.beta_head + int64_t(row) * t.beta_row]
             : Real(1);
}

// What a block knows: its warps over 16-row tiles, and pitches of shared memory.
template <class T_>
struct GatedBlock {
  using T = T_;
  using Real = Compute<T>;
  using Products = LinearProducts<T>;
  static constexpr int kRows = gated_rows(sizeof(Real)), kThreads = kGatedThreads, kDepth = kGatedDepth;
  static constexpr int kRowWarps = kRows / 16, kColWarps = 4 / kRowWarps, kBlocks = kRows / kGatedBlock;
  static constexpr int kPartPitch = kDepth + 4, kPairPitch = kRows + 4;
  template <int Tiles>
  using Sums = typename Products::template Sums<Tiles>;
  using Part = LinearTile<T, kRows, kDepth, kThreads>;  // of the tensors
  using RealPart = LinearTile<Real, kRows, kDepth, kThreads>;

  const GatedTask& task;
  int warp, batch, head;  // head: of the states
  __device__ __forceinline__ explicit GatedBlock(const GatedTask& task_)
      : task(task_), warp(ptx::uniform(threadIdx.x / 32)), batch(0), head(0) {}

  __device__ __forceinline__ int row_tile() const { return warp % kRowWarps * 16; }
  __device__ __forceinline__ int column(int i) const { return (i * kColWarps + warp / kRowWarps) * 8; }

  // ---- heads and rows ----

  __device__ __forceinline__ int key_head() const { return head / (task.v_heads / task.kv_heads); }
  __device__ __forceinline__ int out_head(int g) const { return head * task.group + g; }
  __device__ __forceinline__ int query_head(int g) const {
    return static_cast<int>(int64_t(head) * task.q_heads / task.v_heads) + g;
  }
  __device__ __forceinline__ LinearHeadRows<T> query_rows(int g) const {
    return LinearHeadRows<T>(task.query, batch, query_head(g), task.q_heads, task.len);
  }
  __device__ __forceinline__ LinearHeadRows<T> key_rows() const {
    return LinearHeadRows<T>(task.key, batch, key_head(), task.kv_heads, task.len);
  }
  // [batch, heads, len, cols] in compute precision
  __device__ __forceinline__ LinearRows dense_rows(const void* data, int heads, int cols) const {
    return {data,
            int64_t(heads) * task.len * cols,
            int64_t(task.len) * cols,
            cols,
            cols,
            FeatureMap::identity,
            1,
            nullptr,
            nullptr,
            cols % (16 / int(sizeof(Real))) == 0};
  }
  // of row 0 of this head, in [batch, v_heads, len]
  __device__ __forceinline__ int64_t head_row() const { return (int64_t(batch) * task.v_heads + head) * task.len; }
  __device__ __forceinline__ Real key_inverse(int row) const {
    return gated_scalar<Real>(task.key_inverse, (int64_t(batch) * task.kv_heads + key_head()) * task.len + row);
  }
  // of the query times scale
  __device__ __forceinline__ Real query_factor(int g, int row) const {
    const int64_t at = (int64_t(batch) * task.q_heads + query_head(g)) * task.len + row;
    return Real(task.scale) * gated_scalar<Real>(task.query_inverse, at);
  }
  __device__ __forceinline__ Real* pairs_at(int slot, int which) const {
    return static_cast<Real*>(task.pairs) +
           ((int64_t(slot) * task.v_heads + head) * task.products() + which) * (kRows * kRows);
  }
  __device__ __forceinline__ int64_t state_at(int64_t slot) const {
    return (slot * task.v_heads + head) * task.head_dim * task.v_head_dim;
  }

  // A fetched tile to shared memory, row r times scales[r] and, where there are factors ([len][head_dim] of this head),
  // times those of its row; row0, col0: of the tile's first number. Round: as tensor cores read it.
  template <int Pitch, bool Round, class Tile>
  __device__ __forceinline__ void put(const Tile& tile, const Real* scales, const Real* factors, int row0, int col0,
                                      Real* to) const {
    using Element = typename Tile::Element;
#pragma unroll
    for (int i = 0; i < Tile::kCount; i++) {
      Real x[Element::kChunk];
      Element::unpack(tile.raw[i], x);
      const int row = Tile::row_of(i), col = Tile::col_of(i);
      const Real scale = scales ? scales[row] : Real(1);
      const int left = factors && tile.exists >> i & 1 ? task.head_dim - col0 - col : 0;
      const Real* const factor = factors + int64_t(row0 + row) * task.head_dim + col0 + col;
#pragma unroll
      for (int j = 0; j < Element::kChunk; j++) {
        x[j] *= scale;
        if (j < left) x[j] *= factor[j];
        if constexpr (Round) x[j] = Products::stored(x[j]);
      }
      store_numbers<Real, Element::kChunk>(to + row * Pitch + col, x);
    }
  }

  // P, T or their gradients to shared memory; Round: as tensor cores read them
  template <bool Round = true>
  __device__ __forceinline__ void put_pairs(const Real* from, Real* to) const {
    constexpr int kPer = kRows / kVector<Real>;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kPer; i += kThreads) {
      const int row = i / kPer, col = i % kPer * kVector<Real>;
      Real x[kVector<Real>];
      load_numbers<Real, kVector<Real>>(x, from + row * kRows + col);
#pragma unroll
      for (int j = 0; j < kVector<Real>; j++)
        if constexpr (Round) x[j] = Products::stored(x[j]);
      store_numbers<Real, kVector<Real>>(to + row * kPairPitch + col, x);
    }
  }

  // ---- products ----

  // sums += a b over begin <= k < end; seen(row, k): which terms there are, the others of a being 0
  template <int Tiles, class A, class B, class Columns, class Used, class Seen>
  static __device__ __forceinline__ void multiply(Sums<Tiles>& sums, int begin, int end, A&& a, B&& b,
                                                  Columns&& columns, Used&& used, Seen&& seen) {
    const auto none = [](int) { return Real(0); };
    if constexpr (Products::kTensor)
      Products::template on_tensor_cores<true>(sums, begin, end, a, b, false, none, columns, used);
    else
      Products::one_by_one(sums, begin, end, a, b, false, none, columns, seen);
  }
  // The product with a triangle: Upper: terms k >= row, else k <= row; Strict: not k == row. Where a number that a row
  // does not see is not finite, the sums are not, and are made again one by one.
  template <bool Upper, bool Strict = false, int Tiles, class A, class B, class Columns>
  __device__ __forceinline__ void add_triangle(Sums<Tiles>& sums, A&& a, B&& b, Columns&& columns) const {
    const int row = row_tile(), begin = Upper ? row : 0, end = Upper ? kRows : row + 16;
    const auto seen = [&](int r, int k) { return Upper ? k >= row + r + int(Strict) : k + int(Strict) <= row + r; };
    Sums<Tiles> part;
    part.clear();
    multiply(part, begin, end, a, b, columns, [](int) { return true; }, seen);
    if constexpr (Products::kTensor) {
      Real sum = 0;
#pragma unroll
      for (int i = 0; i < Tiles; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum += part.acc[i][e] - part.acc[i][e];
      if (ptx::any(sum != Real(0))) {  // @not_finite
        part.clear();
        Products::one_by_one(part, begin, end, a, b, false, [](int) { return Real(0); }, columns, seen);
      }
    }
#pragma unroll
    for (int i = 0; i < Tiles; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) sums.acc[i][e] += part.acc[i][e];
  }

  // f(row, column, number) for the numbers of a warp's sums
  template <int Tiles, class F>
  __device__ __forceinline__ void each(Sums<Tiles>& sums, F&& f) const {
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int e = 0; e < 4; e++)
#pragma unroll
      for (int i = 0; i < Tiles; i++) f(row_tile() + g + e / 2 * 8, column(i) + 2 * t + e % 2, sums.acc[i][e]);
  }
};

}  // namespace attnjourney

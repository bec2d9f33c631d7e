// Decoding over latents with ordinary arithmetic: float and double, and 16-bit numbers whose rows are not whole 16-byte
// chunks. One block: up to kRows rows of a sequence against its share of the keys. A tile of keys lies in shared memory
// in the type of the arithmetic, bytes times their scale; for scores a thread takes two rows and two keys of a slice of
// the columns, for the output columns of its own.
#pragma once
#include "latent_mma.cuh"

namespace attnjourney {

// Bytes: the cache is of bytes.
template <class T_, bool Bytes = false>
struct LatentFma {
  using T = T_;
  using Stored = std::conditional_t<Bytes, unsigned char, T>;
  using Real = Compute<T>;
  static constexpr int kThreads = 128, kRows = sizeof(Real) == 8 ? 8 : 16, kKeys = kRows;
  static constexpr int kSlices = kThreads * 4 / (kRows * kKeys);  // threads that share four products
  static constexpr int kColumns = kLatentValueDim / kThreads;
  static constexpr int kBlocks = sizeof(Real) == 8 ? 2 : 3;  // of a multiprocessor: 255 or 168 registers a thread

  // numbers from one row to the next in shared memory: whole slices, and four more against bank conflicts
  static constexpr __host__ __device__ int pitch(int head_dim) {
    return (head_dim + 4 * kSlices - 1) / (4 * kSlices) * (4 * kSlices) + 4;
  }
  static constexpr int smem_bytes(
      int head_dim) {  // queries, keys, weights, what shrinks outputs, sums; whether a key is anywhere
    return static_cast<int>(((kRows + kKeys) * pitch(head_dim) + kKeys * kRows + 3 * kRows) * sizeof(Real)) + kKeys * 4;
  }

  struct alignas(16) Four {
    Real x[4];
  };
  // One row by one warp, zeros behind it; from null: zeros.
  static __device__ __forceinline__ void load_row(Real* to, const T* from, int dim, int width) {
    for (int d = threadIdx.x % 32; d < width; d += 32) to[d] = from && d < dim ? Real(ptx::to_float(from[d])) : Real(0);
  }

  static __device__ __forceinline__ void load_bytes(Real* to, const unsigned char* from, ByteKind kind, float scale,
                                                    int dim, int width) {
#pragma unroll 1
    for (int d = ptx::opaque(threadIdx.x) % 32; d < width; d += 32)
      to[d] = from && d < dim ? Real(byte_number(kind, from[d]) * scale) : Real(0);
  }

  static __device__ __forceinline__ void run(const DecodeTask& task) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, width = pitch(task.head_dim) - 4, step = width + 4;
    const DecodePart<kKeys> part(task, kRows);
    const DecodeSequence& sequence = part.sequence;
    Real* const queries = reinterpret_cast<Real*>(ptx::dynamic_smem());
    Real *const keys = queries + kRows * step, *const weights = keys + kKeys * step;  // weights [key][row]
    Real *const shrinks = weights + kKeys * kRows, *const stats = shrinks + kRows;    // [row], [row][2]
    uint32_t* const there = reinterpret_cast<uint32_t*>(stats + 2 * kRows);
    const Stored* const latent = static_cast<const Stored*>(task.key) + part.head * task.k.head;
    for (int r = warp; r < kRows; r += kThreads / 32) {
      const int i = part.row0 + r;
      const T* from = static_cast<const T*>(task.query) + part.batch * task.q_batch +
                      (part.head * task.group + i / task.q_len) * task.q_head + i % task.q_len * task.q_row;
      load_row(queries + r * step, i < task.rows ? from : nullptr, task.head_dim, width);
    }

    // rows 2 a and 2 a + 1, keys 2 b and 2 b + 1
    const int slice = tid % kSlices, a = tid / kSlices % (kRows / 2), b = tid / kSlices / (kRows / 2);
    const DecodeRow<Real> rows[2] = {{task, part.batch, part.head, sequence.origin, part.row0 + 2 * a},
                                     {task, part.batch, part.head, sequence.origin, part.row0 + 2 * a + 1}};
    RowSum<Real> row{-Real(INFINITY), Real(0)};  // of row tid, for tid < kRows
    Real acc[kColumns][kRows] = {};
    for (int tile = part.first; tile < part.last; tile++) {
      __syncthreads();  // @tile_read: every thread is past the tile before
      for (int k = warp; k < kKeys; k += kThreads / 32) {
        const Place at = place_of(task, sequence, part.batch, tile * kKeys + k, sequence.total);
        const Stored* const from = at.outer < 0 ? nullptr : latent + at.outer * task.k.outer + at.slot * task.k.row;
        if constexpr (Bytes) {
          const float scale = from ? task.key_scale[at.outer * task.key_scale_outer + at.slot] : 0.f;
          load_bytes(keys + k * step, from, task.bytes, scale, task.head_dim, width);
        } else {
          load_row(keys + k * step, from, task.head_dim, width);
        }
        if (lane == 0) there[k] = at.outer >= 0;
      }
      __syncthreads();
      Real products[2][2] = {};
      for (int d = 4 * slice; d < width; d += 4 * kSlices) {
        Four q[2], k[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          q[i] = *reinterpret_cast<const Four*>(queries + (2 * a + i) * step + d);
          k[i] = *reinterpret_cast<const Four*>(keys + (2 * b + i) * step + d);
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
          for (int i = 0; i < 4; i++) products[i / 2][i % 2] += q[i / 2].x[e] * k[i % 2].x[e];
      }
      const bool whole = !task.table && sequence.is_whole(tile * kKeys, kKeys);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        Real product = products[i / 2][i % 2];
#pragma unroll
        for (int w = kSlices / 2; w > 0; w /= 2) product += ptx::shfl_xor(product, w);
        if (i % kSlices != slice) continue;
        const int k = 2 * b + i % 2, key = sequence.key(tile * kKeys + k);
        const DecodeRow<Real>& r = rows[i / 2];
        const bool seen = there[k] && (whole || sequence.keys.visible(r.row, key));
        weights[k * kRows + 2 * a + i / 2] =
            seen ? decode_score<T>(task, r, sequence.keys.offset, key, product) : -Real(INFINITY);
      }
      __syncthreads();
      if (tid < kRows) softmax(weights + tid, row, shrinks[tid], score_exponent<Real>(task));
      __syncthreads();
      add_values(acc, task, keys, step, weights, shrinks, !whole || task.mask_kind != MaskElement::none);
    }
    if (tid < kRows) stats[2 * tid] = row.top, stats[2 * tid + 1] = row.sum;
    __syncthreads();
    write(task, DecodePart<kKeys>(task, kRows, ptx::opaque(blockIdx.x)), acc, stats);  // held, it would spill
  }

  // A row's scores of a tile to weights, by one thread.
  static __device__ __forceinline__ void softmax(Real* weights, RowSum<Real>& row, Real& shrink, Real exponent) {
    Real top = row.top;
    for (int key = 0; key < kKeys; key++) {
      const Real score = weights[key * kRows];
      top = score > top ? score : top;
    }
    shrink = part_weight(row.top, top, exponent);
    Real sum = 0;
    for (int key = 0; key < kKeys; key++) {
      const Real weight = part_weight(weights[key * kRows], top, exponent);
      weights[key * kRows] = weight;
      sum += weight;
    }
    row = {top, row.sum * shrink + sum};
  }

  // The tile's weighted values are summed by themselves first: sums that start from the total would round every
  // product at its size. guarded: a weight of exactly 0 hides a value, whatever that is.
  static __device__ __forceinline__ void add_values(Real (&acc)[kColumns][kRows], const DecodeTask& task,
                                                    const Real* keys, int step, const Real* weights,
                                                    const Real* shrinks, bool guarded) {
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const int column = c * kThreads + threadIdx.x;
      if (column >= task.v_head_dim) break;
      Real sum[kRows] = {};
#pragma unroll 2
      for (int key = 0; key < kKeys; key++) {
        const Real value = keys[key * step + column];
#pragma unroll
        for (int r = 0; r < kRows; r++) {
          const Real weight = weights[key * kRows + r];
          sum[r] += guarded && weight == Real(0) ? Real(0) : weight * value;
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; r++) acc[c][r] = acc[c][r] * shrinks[r] + sum[r];
    }
  }

  static __device__ __forceinline__ void write(const DecodeTask& task, const DecodePart<kKeys>& part,
                                               const Real (&acc)[kColumns][kRows], const Real* stats) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int i = part.row0 + r;
      if (i >= task.rows) break;
      const RowSum<Real> all{stats[2 * r], stats[2 * r + 1]};
      const int64_t at = (part.unit * task.splits + part.split) * kRows + r;
      const int64_t to = (static_cast<int64_t>(part.batch) * task.kv_heads + part.head) * task.rows + i;
      Real lse, factor = 1;
      if (task.splits > 1) {
        if (threadIdx.x < 2) static_cast<Real*>(task.part_stats)[2 * at + threadIdx.x] = stats[2 * r + threadIdx.x];
      } else {
        factor = end_row(task, part.batch, part.head * task.group + i / task.q_len, all, lse);
        if (threadIdx.x == 0) static_cast<Real*>(task.lse)[to] = lse;
      }
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        const int column = c * kThreads + threadIdx.x;
        if (column >= task.v_head_dim) break;
        if (task.splits > 1)
          static_cast<Real*>(task.part_out)[at * task.v_head_dim + column] = acc[c][r];
        else
          store_one<T>(static_cast<T*>(task.out) + to * task.v_head_dim + column, acc[c][r] * factor);
      }
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks) latent_fma(const DecodeTask task) {
  Kernel::run(task);
}

}  // namespace attnjourney

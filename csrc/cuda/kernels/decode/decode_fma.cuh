// Decoding with ordinary arithmetic: float and double, and 16-bit numbers and bytes in caches whose rows are not whole
// 16-byte chunks. One block: up to 8 rows of one key head against its share of a sequence's keys, in tiles that pass by
// in shared memory. Scores: a group of threads for each key, a slice of head_dim each; values: a thread for each
// column.
#pragma once
#include "decode_scores.cuh"

namespace attnjourney {

// Sizes that depend on the call: rows of tiles in bytes, whole chunks, zeros behind the last element.
// Bytes: the caches are of bytes.
template <class T, bool Bytes = false>
struct DecodeFmaShape {
  using Real = Compute<T>;
  using Stored = std::conditional_t<Bytes, uint8_t, T>;  // in the caches
  static constexpr int kRows = 8, kThreads = 128, kKeys = sizeof(Real) == 8 ? 8 : 16, kChunk = 16 / sizeof(Stored);
  int q_pitch, k_pitch, v_pitch, stages;  // q_pitch in numbers of C
  constexpr __host__ __device__ DecodeFmaShape(int head_dim, int v_head_dim)
      : q_pitch(0), k_pitch(0), v_pitch(0), stages(0) {
    const int chunks = (head_dim + kChunk - 1) / kChunk;
    q_pitch = chunks * kChunk;
    k_pitch = chunks * 16;
    v_pitch = (v_head_dim + kChunk - 1) / kChunk * 16;
    stages = fixed_bytes() + 4 * stage_bytes() <= (96 << 10) ? 4 : 2;
  }
  constexpr __host__ __device__ int stage_bytes() const { return kKeys * (k_pitch + v_pitch); }
  // queries, scores, weights, what shrinks outputs, references and sums, flags, places of eight tiles, their scales
  constexpr __host__ __device__ int fixed_bytes() const {
    return (kRows * q_pitch + 2 * kRows * kKeys + 3 * kRows) * int(sizeof(Real)) + 16 + 8 * kKeys * (Bytes ? 16 : 8);
  }
  constexpr __host__ __device__ int bytes() const { return fixed_bytes() + stages * stage_bytes(); }
};

template <class T_, bool Bytes = false>
struct DecodeFma {
  using T = T_;
  using Shape = DecodeFmaShape<T, Bytes>;
  using Stored = Shape::Stored;
  using Real = Compute<T>;
  static_assert(!Bytes || sizeof(Real) == 4);
  static constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kThreads = Shape::kThreads, kChunk = Shape::kChunk;
  static constexpr int kBlocks = sizeof(Real) == 8 ? 2 : 4;       // of a multiprocessor, as far as registers go
  static constexpr int kSlices = kThreads / kKeys, kColumns = 2;  // threads for a key; columns of a thread, Dv <= 256
  static_assert(kSlices == 8 || kSlices == 16);

  // Starts the copy of a tile of K or V. Rows that do not begin on chunks are copied number by number.
  static __device__ __forceinline__ void load_tile(unsigned char* tile, const Stored* base, const CacheStrides& strides,
                                                   const Place* places, int dim, int pitch, bool chunked) {
    const int chunks = pitch / 16;
    if (chunked) {
      for (int i = threadIdx.x; i < kKeys * chunks; i += kThreads) {
        const int row = i / chunks, chunk = i - row * chunks;
        const Place at = places[row];
        const Stored* from = base;
        if (at.outer >= 0) from += at.outer * strides.outer + at.slot * strides.row + chunk * kChunk;
        ptx::cp_async_16(ptx::smem_addr(tile + row * pitch + chunk * 16), from, at.outer >= 0);
      }
      return;
    }
    constexpr int kEach = Bytes ? 4 : 1;  // numbers of a thread: whole words
    const int width = chunks * kChunk / kEach;
    for (int i = threadIdx.x; i < kKeys * width; i += kThreads) {
      const int row = i / width, d = (i - row * width) * kEach;
      const Place at = places[row];
      Stored* to = reinterpret_cast<Stored*>(tile + row * pitch) + d;
      const Stored* from = base;
      if (at.outer >= 0) from += at.outer * strides.outer + at.slot * strides.row + d;
      if constexpr (Bytes) {
        uint32_t word = 0;
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (at.outer >= 0 && d + e < dim) word |= uint32_t{from[e]} << (8 * e);
        *reinterpret_cast<uint32_t*>(to) = word;
      } else if (at.outer >= 0 && d < dim) {
        *to = *from;
      } else {
        store_one<T>(to, Real(0));
      }
    }
  }

  // numbers that lie together, read in 16-byte pieces
  template <class X, int N>
  struct alignas(16) Together {
    X x[N];
    static __device__ __forceinline__ Together at(const void* from) { return *static_cast<const Together*>(from); }
  };

  static __device__ __forceinline__ Real number(ByteKind kind, const Stored& x) {
    if constexpr (Bytes)
      return byte_number(kind, x);
    else
      return ptx::to_float(x);
  }

  // Products of the thread's key with all rows, over its slice; then that of row `slice` % 8, whole.
  static __device__ __forceinline__ Real product(const Shape& shape, const Real* q, const unsigned char* k_row,
                                                 int live, ByteKind kind) {
    const int slice = threadIdx.x % kSlices;
    Real sum[kRows] = {};
    for (int c = slice; c < shape.k_pitch / 16; c += kSlices) {
      const auto x = Together<Stored, kChunk>::at(k_row + c * 16);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        if (r >= live) break;
        const auto y = Together<Real, kChunk>::at(q + r * shape.q_pitch + c * kChunk);
#pragma unroll
        for (int e = 0; e < kChunk; e++) sum[r] += y.x[e] * number(kind, x.x[e]);
      }
    }
#pragma unroll
    for (int w = kRows / 2; w > 0; w /= 2) {
      const bool upper = slice & w;
#pragma unroll
      for (int r = 0; r < w; r++) {
        const Real keep = upper ? sum[r + w] : sum[r], send = upper ? sum[r] : sum[r + w];
        sum[r] = keep + ptx::shfl_xor(send, w);
      }
    }
    return kSlices == 16 ? sum[0] + ptx::shfl_xor(sum[0], 8) : sum[0];
  }

  static __device__ __forceinline__ void run(const DecodeTask& task, bool chunked) {
    const Shape shape(task.head_dim, task.v_head_dim);
    const DecodePart<kKeys, true> part(task, kRows);
    if (part.row0 >= part.rows) return;
    const DecodeSequence& sequence = part.sequence;
    const int tid = threadIdx.x, live = min(kRows, part.rows - part.row0), q_len = sequence.q_len;
    Real* const q = reinterpret_cast<Real*>(ptx::dynamic_smem());
    Real *const scores = q + kRows * shape.q_pitch, *const weights = scores + kRows * kKeys;  // [row][key], [key][row]
    Real *const shrink = weights + kRows * kKeys, *const stats = shrink + kRows;              // [row], [row][2]
    int* const flags = reinterpret_cast<int*>(stats + 2 * kRows);                             // of each warp
    Place* const places = reinterpret_cast<Place*>(flags + 4);                                // [tile % 8][key]
    [[maybe_unused]] float* const key_scales = reinterpret_cast<float*>(places + 8 * kKeys);  // as places; then values'
    [[maybe_unused]] float* const value_scales = key_scales + 8 * kKeys;
    unsigned char* const stages = reinterpret_cast<unsigned char*>(places + (Bytes ? 16 : 8) * kKeys);
    const Stored* const key = static_cast<const Stored*>(task.key) + part.head * task.k.head;
    const Stored* const value = static_cast<const Stored*>(task.value) + part.head * task.v.head;

    const int prefetched = shape.stages - 1;
    const auto locate = [&](int tile) {
      if (tid >= kKeys) return;
      const Place at = place_of(task, sequence, part.batch, tile * kKeys + tid, tile < part.last ? sequence.total : 0);
      const int i = tile % 8 * kKeys + tid;
      places[i] = at;
      if constexpr (Bytes) {
        const bool there = at.outer >= 0;
        key_scales[i] =
            there ? task.key_scale[at.outer * task.key_scale_outer + part.head * task.key_scale_head + at.slot] : 0.f;
        value_scales[i] =
            there ? task.value_scale[at.outer * task.value_scale_outer + part.head * task.value_scale_head + at.slot]
                  : 0.f;
      }
    };
    const auto start = [&](int tile) {
      unsigned char* at = stages + tile % shape.stages * shape.stage_bytes();
      load_tile(at, key, task.k, places + tile % 8 * kKeys, task.head_dim, shape.k_pitch, chunked);
      load_tile(at + kKeys * shape.k_pitch, value, task.v, places + tile % 8 * kKeys, task.v_head_dim, shape.v_pitch,
                chunked);
      ptx::cp_async_commit();
    };
    for (int i = 0; i <= prefetched; i++) locate(part.first + i);
    for (int i = tid; i < kRows * shape.q_pitch; i += kThreads) {
      const int r = i / shape.q_pitch, d = i - r * shape.q_pitch, row = part.row0 + r;
      Real value = 0;
      if (r < live && d < task.head_dim)
        value = ptx::to_float(static_cast<const T*>(
            task.query)[part.batch * task.q_batch + (part.head * task.group + row / q_len) * task.q_head +
                        (sequence.q_begin + row % q_len) * task.q_row + d]);
      q[i] = value;
    }
    __syncthreads();
    for (int i = 0; i < prefetched; i++) start(part.first + i);

    // a thread's score: row `slice`, key tid / kSlices; its weight: row tid / kKeys, key tid % kKeys
    const int slice = tid % kSlices, score_key = tid / kSlices, weight_row = tid / kKeys, weight_key = tid % kKeys;
    const DecodeRow<Real> own(task, part.batch, part.head, sequence.origin, part.row0 + (slice < live ? slice : 0),
                              part.rows, q_len);
    const Real exponent = score_exponent<Real>(task);
    RowSum<Real> row{-Real(INFINITY), Real(0)};  // of weight_row, this thread's share of the sum
    Real acc[kColumns][kRows] = {};
    for (int tile = part.first; tile < part.last; tile++) {
      if (shape.stages == 4)
        ptx::cp_async_wait<2>();
      else
        ptx::cp_async_wait<0>();
      __syncthreads();  // @tile_landed: every thread is past the one before
      start(tile + prefetched);
      locate(tile + prefetched + 1);
      const unsigned char* k_tile = stages + tile % shape.stages * shape.stage_bytes();
      Real dot = product(shape, q, k_tile + score_key * shape.k_pitch, live, task.bytes);
      if constexpr (Bytes) dot *= key_scales[tile % 8 * kKeys + score_key];
      if (slice < live) {
        const int item = tile * kKeys + score_key, at = sequence.key(item);
        const bool seen = places[tile % 8 * kKeys + score_key].outer >= 0 && sequence.keys.visible(own.row, at);
        scores[slice * kKeys + score_key] =
            seen ? decode_score<T>(task, own, sequence.keys.offset, at, dot) : -Real(INFINITY);
      }
      __syncthreads();
      bool hides = false;
      if (weight_row < kRows) {  // whole warps: shuffles stay within a row
        const Real score = weight_row < live ? scores[weight_row * kKeys + weight_key] : Real(0);
        hides = score == -Real(INFINITY);
        Real top = score;
#pragma unroll
        for (int w = 1; w < kKeys; w *= 2) {
          const Real other = ptx::shfl_xor(top, w);
          top = other > top || !(top == top) ? other : top;
        }
        top = row.top > top || !(top == top) ? row.top : top;
        const Real weight = part_weight(score, top, exponent), old = part_weight(row.top, top, exponent);
        row = {top, row.sum * old + weight};
        if constexpr (Bytes)
          weights[weight_key * kRows + weight_row] =
              score == -Real(INFINITY) ? 0.f : weight * value_scales[tile % 8 * kKeys + weight_key];
        else
          weights[weight_key * kRows + weight_row] = weight;
        if (weight_key == 0) shrink[weight_row] = old;
      }
      hides = ptx::any(hides);
      if (tid % 32 == 0) flags[tid / 32] = hides;
      __syncthreads();
      const bool guarded = flags[0] | flags[1] | flags[2] | flags[3];
      add_values(acc, task, k_tile + kKeys * shape.k_pitch, shape.v_pitch, weights, shrink, live, guarded);
    }
    ptx::cp_async_wait<0>();

    if (weight_row < kRows) {
#pragma unroll
      for (int w = 1; w < kKeys; w *= 2) row.sum += ptx::shfl_xor(row.sum, w);
      if (weight_key == 0) stats[2 * weight_row] = row.top, stats[2 * weight_row + 1] = row.sum;
    }
    __syncthreads();
    write(task, part, acc, stats, live);
  }

  // The tile's weighted values are summed by themselves first: sums that start from the total would round every
  // product at its size. guarded: a weight of exactly 0 hides a value, whatever that is.
  static __device__ __forceinline__ void add_values(Real (&acc)[kColumns][kRows], const DecodeTask& task,
                                                    const unsigned char* v_tile, int pitch, const Real* weights,
                                                    const Real* shrink, int live, bool guarded) {
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const int column = c * kThreads + threadIdx.x;
      if (column >= task.v_head_dim) break;
      Real part[kRows] = {};
#pragma unroll 4
      for (int key = 0; key < kKeys; key++) {
        const Real value = number(task.bytes, reinterpret_cast<const Stored*>(v_tile + key * pitch)[column]);
        const auto weight = Together<Real, kRows>::at(weights + key * kRows);
#pragma unroll
        for (int r = 0; r < kRows; r++) part[r] += guarded && weight.x[r] == Real(0) ? Real(0) : weight.x[r] * value;
      }
#pragma unroll
      for (int r = 0; r < kRows; r++)
        if (r < live) acc[c][r] = acc[c][r] * shrink[r] + part[r];
    }
  }

  static __device__ __forceinline__ void write(const DecodeTask& task, const DecodePart<kKeys, true>& part,
                                               const Real (&acc)[kColumns][kRows], const Real* stats, int live) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (r >= live) break;
      const RowSum<Real> row{stats[2 * r], stats[2 * r + 1]};
      if (task.splits > 1) {
        const int64_t at = (part.unit * task.splits + part.split) * kRows + r;
        if (threadIdx.x < 2) static_cast<Real*>(task.part_stats)[2 * at + threadIdx.x] = stats[2 * r + threadIdx.x];
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
          const int column = c * kThreads + threadIdx.x;
          if (column < task.v_head_dim && row.sum != Real(0))
            static_cast<Real*>(task.part_out)[at * task.v_head_dim + column] = acc[c][r];
        }
        continue;
      }
      const int i = part.row0 + r, head = part.head * task.group + i / part.sequence.q_len;
      const DecodeResult to(task, part.batch, part.head, i);
      Real lse;
      const Real factor = end_row(task, part.batch, head, row, lse);
      if (threadIdx.x == 0) static_cast<Real*>(task.lse)[to.lse] = lse;
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        const int column = c * kThreads + threadIdx.x;
        if (column < task.v_head_dim) store_one<T>(static_cast<T*>(task.out) + to.out + column, acc[c][r] * factor);
      }
    }
  }
};

template <class T>
__global__ void __launch_bounds__(DecodeFma<T>::kThreads, DecodeFma<T>::kBlocks)
    decode_fma(const DecodeTask task, bool chunked) {
  DecodeFma<T>::run(task, chunked);
}

// over caches of bytes
template <class T>
__global__ void __launch_bounds__(DecodeFma<T, true>::kThreads, DecodeFma<T, true>::kBlocks)
    decode_bytes_fma(const DecodeTask task, bool chunked) {
  DecodeFma<T, true>::run(task, chunked);
}

}  // namespace attnjourney

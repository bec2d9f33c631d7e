// Keys and values in the blocks of a paged cache, read where they lie: packed rows of any lengths, each sequence with
// its row of a block table (csrc/attention/attention.h).
#pragma once
#include "numbers.cuh"
#include "scores.cuh"

namespace attnjourney {

// Where a key lies: slot `slot` of sequence or block `outer`; outer < 0: nowhere.
struct Place {
  int outer, slot;
};

struct PagedKeys {
  const int* table;  // [sequences, max_blocks]; a number that is no block's stands for keys that no row sees
  int blocks, block_size, max_blocks;
  int64_t key_block, value_block;  // strides from a block to the next, in elements
  int key_dim, value_dim;          // of the rows in memory
  bool chunked;                    // rows are whole 16-byte chunks; others are read number by number
  int few_rows;                    // sequences of up to so many rows are left to decoding's kernels
};
struct NoPages {};

__device__ __forceinline__ Place place_in_pages(const int* table, int blocks, int block_size, int64_t first, int key) {
  const int j = key / block_size, block = table[first + j];
  return {block < blocks ? block : -1, key - j * block_size};
}

// As sequence_of for packed sequences, whose keys are numbered from 0 on in pages.
template <class Real>
__device__ __forceinline__ Sequence paged_sequence(const SequenceTaskOf<Real>& p, int batch) {
  Sequence s{p.q_len, p.keys, p.q_len, p.kv_len, 0, 0};
  s.q_begin = max(0, min(p.cu_q[batch], p.q_len));
  s.q_len = s.rows = max(0, min(p.cu_q[batch + 1], p.q_len) - s.q_begin);
  s.k_rows = max(0, min(p.cu_k[batch + 1] - p.cu_k[batch], p.kv_len));
  s.keys.set_length(s.k_rows);
  if (p.bottom_right) s.keys.offset = s.k_rows - s.q_len;
  return s;
}

// The places of the keys of two tiles, used in turns, in shared memory: those of the tile at hand and of the one to
// come.
template <int Keys>
struct PagedTiles {
  static constexpr int kWords = (Keys + 31) / 32, kTurn = Keys * 8 + 16, kBytes = 2 * kTurn;
  unsigned char* data;
  __device__ __forceinline__ Place* places(int turn) const { return reinterpret_cast<Place*>(data + turn * kTurn); }
  __device__ __forceinline__ uint32_t* there(int turn) const {  // a bit for each key: does it lie anywhere?
    return reinterpret_cast<uint32_t*>(data + turn * kTurn + Keys * 8);
  }
  // Looks up tile n; keys from key_end on lie nowhere, and what lies nowhere is read as zeros. The whole block, a
  // barrier before anyone reads.
  __device__ __forceinline__ void locate(const PagedKeys& p, int batch, int n, int turn, int key_end) const {
    const int tid = threadIdx.x;
    if (tid >= 32 * kWords) return;
    Place at{-1, 0};
    const int key = n * Keys + tid;
    if (tid < Keys) {
      if (key < key_end)
        at = place_in_pages(p.table, p.blocks, p.block_size, static_cast<int64_t>(batch) * p.max_blocks, key);
      places(turn)[tid] = at;
    }
    const uint32_t bits = ptx::ballot(at.outer >= 0);
    if (tid % 32 == 0) there(turn)[tid / 32] = bits;
  }
  // `seen` without keys that lie nowhere; key: of the thread's element 0, in the tile
  template <class F>
  __device__ __forceinline__ uint32_t seen_in(int turn, int key, uint32_t seen) const {
#pragma unroll
    for (int w = 0; w < kWords; w++) {
      const uint32_t bits = there(turn)[w] >> key;
#pragma unroll
      for (int i = 0; i < F::kCount; i++)
        if (F::key(i) / 32 == w && !(bits >> F::key(i) % 32 & 1)) seen &= ~(1u << i);
    }
    return seen;
  }
};

// Starts the copy of a tile of rows of D numbers: chunk_at(row, chunk) is where a chunk goes, from the begin of `tile`.
template <class T, int D, int Keys, int Threads, class ChunkAt>
__device__ __forceinline__ void load_pages(unsigned char* tile, const T* base, int64_t block_stride, int64_t row_stride,
                                           const Place* places, int dim, bool chunked, ChunkAt&& chunk_at) {
  constexpr int kLanes = 16 / sizeof(T), kChunks = D / kLanes;
  static_assert(Keys * kChunks % Threads == 0);
  const int tid = ptx::opaque(threadIdx.x);
  if (chunked) {
#pragma unroll
    for (int i = 0; i < Keys * kChunks / Threads; i++) {
      const int c = i * Threads + tid, row = c / kChunks, chunk = c % kChunks;
      const Place at = places[row];
      const bool valid = at.outer >= 0 && chunk * kLanes < dim;
      const T* from = base;
      if (valid) from += at.outer * block_stride + at.slot * row_stride + chunk * kLanes;
      ptx::cp_async_16(ptx::smem_addr(tile + chunk_at(row, chunk)), from, valid);
    }
  } else {
#pragma unroll 1
    for (int i = tid; i < Keys * D; i += Threads) {
      const int row = i / D, d = i % D;
      const Place at = places[row];
      T* const to = reinterpret_cast<T*>(tile + chunk_at(row, d / kLanes)) + d % kLanes;
      if (at.outer >= 0 && d < dim)
        *to = base[at.outer * block_stride + at.slot * row_stride + d];
      else
        store_one<T>(to, Compute<T>(0));
    }
  }
  ptx::cp_async_commit();
}

}  // namespace attnjourney

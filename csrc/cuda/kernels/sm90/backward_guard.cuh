// Numbers of K, Q and dO that are not finite, in the Hopper backward where something is hidden: wgmma would multiply
// them by weights of 0. They become zeros in shared memory, and NaN where they are seen comes by another way: for Q
// from the scores, which were computed before; for K from scores made NaN; for dO from weights made NaN (all of a row's
// gradients then are). Both warpgroups together.
#pragma once
#include "backward_shape.cuh"
#include "finite.cuh"

namespace attnjourney {

// S: rows and bytes of a tile, or of a part of it that counts as a tile
template <class Shape, class Memory = Sm90BackwardMemory<Shape>>
struct Sm90BackwardGuard {
  using T = typename Shape::T;
  static constexpr int kD = Shape::kD, kScoreRows = Shape::kScoreRows;

  // of the two warpgroups; opaque, or what is computed from it would be held through the loop
  static __device__ __forceinline__ int thread() { return static_cast<int>(ptx::opaque(threadIdx.x)) - 128; }

  // Zeros for what is not finite in Rows rows of Columns columns, Rows * Share == 256: a thread has 1 / Share of one,
  // and what is found of it goes to marks[row]. Was there any?
  template <int Rows, int Columns, int Panel>
  static __device__ __forceinline__ bool clean_rows(unsigned char* tile, uint32_t* marks) {
    constexpr int kShare = 256 / Rows, kChunks = Columns / 8 / kShare;
    const int row = thread() / kShare, first = thread() % kShare * kChunks;
    uint32_t some = 0;
#pragma unroll 2
    for (int i = first; i < first + kChunks; i++) {
      uint4& at = reinterpret_cast<uint4*>(tile + i / 8 * Panel + row * 128)[i % 8];
      uint4 x = at;
      const uint32_t bad[4] = {not_finite<T>(x.x), not_finite<T>(x.y), not_finite<T>(x.z), not_finite<T>(x.w)};
      if (!(bad[0] | bad[1] | bad[2] | bad[3])) continue;
      some = 1;
      x.x &= ~bad[0], x.y &= ~bad[1], x.z &= ~bad[2], x.w &= ~bad[3];
      at = x;
    }
#pragma unroll
    for (int n = 1; n < kShare; n *= 2) some |= ptx::shfl_xor(some, n);
    if (marks && thread() % kShare == 0) marks[row] = some ? 0x7fffffffu : 0u;
    return some;
  }
  // Is `here` true for any thread of the two warpgroups? Their writes to shared memory are visible to all afterwards,
  // to wgmma too.
  static __device__ __forceinline__ bool vote(bool here, const Memory& memory, unsigned char* smem) {
    uint32_t* votes = reinterpret_cast<uint32_t*>(smem + (memory.votes - memory.k));
    const bool mine = ptx::any(here);
    if (threadIdx.x % 32 == 0) votes[thread() / 32] = mine;
    ptx::fence_proxy_async();
    ptx::bar_sync(1, 256);
    uint32_t some = 0;
    for (int w = 0; w < 8; w++) some |= votes[w];
    return some;
  }

  // Once, before K is used: are there such keys?
  static __device__ __forceinline__ bool clean_keys(const Memory& memory, unsigned char* smem) {
    uint32_t* marks = reinterpret_cast<uint32_t*>(smem + (memory.keys - memory.k));
    const bool here = clean_rows<Shape::kKeys, kD, Shape::kKeyPanel>(smem, marks);
    return vote(here, memory, smem);
  }
  // The answer of clean_keys, read again, by whole warps.
  static __device__ __forceinline__ bool found_keys(const Memory& memory, const unsigned char* smem) {
    const uint32_t* votes = reinterpret_cast<const uint32_t*>(smem + (memory.votes - memory.k));
    return ptx::any(votes[ptx::opaque(threadIdx.x) % 8] != 0);
  }
  // Element 4 j + e of the scores: key + 8 (e / 2).
  static __device__ __forceinline__ void poison_scores(float (&s)[kScoreRows / 2], const Memory& memory,
                                                       const unsigned char* smem, int key) {
    const float* marks = reinterpret_cast<const float*>(smem + (memory.keys - memory.k)) + key;
    const float low = marks[0], high = marks[8];
#pragma unroll
    for (int i = 0; i < kScoreRows / 2; i++) s[i] += i & 2 ? high : low;
  }

  // rows of `Panels` panels, by a warpgroup
  template <int Panels>
  static __device__ __forceinline__ uint32_t not_finite_rows(const unsigned char* rows) {
    uint32_t bad = 0;
#pragma unroll
    for (int i = 0; i < Panels; i++) bad |= not_finite_in<T, kScoreRows * 128>(rows + i * Shape::kQueryPanel);
    return bad;
  }
  // Before the products with kScoreRows rows of Q, whose scores are done, and of dO: were there any? part: of an
  // iteration, where it has several.
  static __device__ __forceinline__ bool clean_rows_of(const Memory& memory, unsigned char* smem, uint32_t query_rows,
                                                       uint32_t out_rows, int part) {
    unsigned char *query = smem + (query_rows - memory.k), *out = smem + (out_rows - memory.k);
    const uint32_t bad = not_finite_rows<Shape::kPanels>(query) | not_finite_rows<Shape::kOutPanels>(out);
    uint32_t* votes = reinterpret_cast<uint32_t*>(smem + (memory.votes - memory.k)) + 8 + 8 * part + thread() / 128 * 4;
    int turn = 0;  // one for each part will do: there is a barrier of the warpgroup in every iteration
    if (!group_any(bad != 0, votes, turn, 10 + thread() / 128)) return false;
    ptx::bar_sync(1, 256);  // @both_looked: and are done with the scores of this tile
    uint32_t* marks = reinterpret_cast<uint32_t*>(smem + (memory.rows - memory.k));
    clean_rows<kScoreRows, kD, Shape::kQueryPanel>(query, nullptr);
    clean_rows<kScoreRows, Shape::kDv, Shape::kQueryPanel>(out, marks);
    ptx::fence_proxy_async();
    ptx::bar_sync(1, 256);
    return true;
  }
  // pf: weights of 64 keys by those rows, from `first` on
  static __device__ __forceinline__ void poison_weights(uint32_t (&pf)[kScoreRows / 16][4], const Memory& memory,
                                                        const unsigned char* smem, int first) {
    const uint32_t* marks = reinterpret_cast<const uint32_t*>(smem + (memory.rows - memory.k)) + first;
#pragma unroll
    for (int j = 0; j < kScoreRows / 8; j++) {
      const uint32_t* of = marks + 8 * j + threadIdx.x % 4 * 2;
      const uint32_t mask = (of[0] ? 0x7fffu : 0u) | (of[1] ? 0x7fff0000u : 0u);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint32_t& x = pf[j / 2][j % 2 * 2 + h];
        x |= mask & not_zero(x);
      }
    }
  }
  static __device__ __forceinline__ void clean_queries(uint32_t (&pf)[kScoreRows / 16][4], const Memory& memory,
                                                       unsigned char* smem, uint32_t query_rows, uint32_t out_rows,
                                                       int part = 0) {
    if (clean_rows_of(memory, smem, query_rows, out_rows, part)) poison_weights(pf, memory, smem, 0);
  }
};

}  // namespace attnjourney

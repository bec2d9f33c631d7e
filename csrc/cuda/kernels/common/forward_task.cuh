// The parameters of a forward kernel, and the order in which its tiles of query rows are worked on.
#pragma once
#include <cstdint>

#include "core/constants.h"
#include "cuda/ptx/sm80.cuh"
#include "sequence.cuh"

namespace attnjourney {

struct Strides {  // in elements; head_dim is dense
  int64_t batch, head, row;
  bool operator==(const Strides&) const = default;
};

template <class Real>
struct ForwardTaskOf : SequenceTaskOf<Real> {
  const void *query, *key,
      *value;             // [batch, q_heads, q_len, head_dim], [batch, kv_heads, kv_len, head_dim or v_head_dim]
  void* out;              // [batch, q_heads, q_len, v_head_dim]
  Real* lse;              // [batch, q_heads, q_len], dense, natural logarithm; -inf: the row sees no key
  RowStats<Real>* stats;  // like lse
  Strides query_strides, key_strides, value_strides, out_strides;
  int batch, q_heads, group;  // group: query heads per key head
  int head_dim, v_head_dim;
  Real score_scale;  // softmax scale * ScoresOf::unit; without options positive
  // filled in by plan_forward
  int tiles, total;   // tiles of one head; of all
  int section;        // causal: heads that run side by side, longest tiles first
  float headroom;     // log2 of kv_len and of the 2^8 by which the reference of a row may lag behind its maximum
  uint32_t* counter;  // two zeros, zeros again afterwards: blocks fetch tiles; null: tile i, i + grid, ...
};
using ForwardTask = ForwardTaskOf<float>;

// Row `at` of lse and stats; inverse: 1 / sum of all its weights against the reference; 0: it has seen nothing.
template <class Real>
__device__ __forceinline__ void write_row(const ForwardTaskOf<Real>& p, int64_t at, Real reference, Real inverse,
                                          Real lse) {
  const bool none = inverse == 0;
  p.lse[at] = none ? -INFINITY : lse;
  p.stats[at] = none ? RowStats<Real>{0, 0} : RowStats<Real>{reference, inverse};
}
template <class Real>
__device__ __forceinline__ void write_stats(const ForwardTaskOf<Real>& p, int64_t at, Real reference, Real sum,
                                            Real lse) {
  write_row(p, at, reference, sum == 0 ? Real(0) : 1 / sum, lse);
}
// log2: is the unit of scores log2(e)?
template <class Real>
__device__ __forceinline__ void write_stats(const ForwardTaskOf<Real>& p, int64_t at, Real reference, Real sum,
                                            bool log2) {
  const Real of_sum = ptx::log2(sum);
  write_stats(p, at, reference, sum, log2 ? (reference + of_sum) * Real(ln_2) : reference + of_sum * Real(ln_2));
}

struct ForwardTile {
  int row, head, batch;
};

template <int Rows, bool Ranged, class Real>
__device__ __forceinline__ ForwardTile forward_tile(const ForwardTaskOf<Real>& p, int i) {
  int tile, pair;  // pair: batch * q_heads + head
  if (Ranged) {
    const int span = p.section * p.tiles, first = i / span * p.section, r = i % span;
    const int width = min(p.section, p.batch * p.q_heads - first);
    tile = p.tiles - 1 - r / width;
    pair = first + r % width;
  } else {
    pair = i / p.tiles;
    tile = i - pair * p.tiles;
  }
  ForwardTile t;
  t.batch = pair / p.q_heads;
  t.head = pair - t.batch * p.q_heads;
  t.row = tile * Rows;
  return t;
}

// The tile of a block, packed or not; of a sequence the last rows first, which see most keys where that is causal.
template <int Rows, class Real>
__device__ __forceinline__ ForwardTile packed_tile(const ForwardTaskOf<Real>& p, int i) {
  if (!p.cu_q) return forward_tile<Rows, true>(p, i);
  const int* const cu = p.order + p.batch;
  const int number = i / p.q_heads, at = packed_item(cu, p.batch, Rows, number);
  const int first = first_packed_tile(cu, Rows, at), last = first_packed_tile(cu, Rows, at + 1) - 1;
  // behind the last sequence are numbers of no rows
  return {(number > last ? number - first : last - number) * Rows, i % p.q_heads, p.order[at]};
}

// Heads side by side: as many as keep 32 MB of keys and values in the second-level cache, 8 to 32 key heads.
// element: bytes of one
template <class Real>
inline void plan_forward(ForwardTaskOf<Real>& p, int rows, int element = 2) {
  p.tiles = (p.q_len + rows - 1) / rows;
  p.headroom = 8;
  for (int n = p.kv_len; n > 1; n = (n + 1) / 2) p.headroom += 1;
  p.total = p.cu_q ? (p.q_len / rows + p.batch) * p.q_heads : p.tiles * p.q_heads * p.batch;
  const int64_t bytes = int64_t{p.kv_len} * (p.head_dim + p.v_head_dim) * element;
  const int64_t fit = bytes > 0 ? (int64_t{32} << 20) / bytes : 32, heads = fit < 8 ? 8 : fit > 32 ? 32 : fit;
  const int64_t pairs = int64_t{p.q_heads} * p.batch, section = heads * p.group;
  p.section = static_cast<int>(section < pairs ? section : pairs);
}

}  // namespace attnjourney

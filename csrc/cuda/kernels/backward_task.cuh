// What a backward kernel is told, and the order in which its tiles are worked on.
#pragma once
#include <cstdint>

#include "forward_task.cuh"

namespace attnjourney {

struct BackwardTask {
  const void *query, *key, *value, *out, *grad_out;
  const float* lse;       // [batch, q_heads, q_len], dense, natural logarithm
  const float* grad_lse;  // like lse, or null
  // null where not needed; grad_key, grad_value per key head
  void *grad_query, *grad_key, *grad_value;
  Strides query_strides, key_strides, value_strides, out_strides, grad_out_strides;
  Strides grad_query_strides, grad_key_strides, grad_value_strides;
  int batch, q_heads, kv_heads, group, q_len, kv_len, head_dim, v_head_dim;
  int offset;               // causal: row i sees keys j <= i + offset
  float scale, scale_log2;  // positive
  // Scratch. rows: q_len rounded up to the kernel's query tile.
  // [batch, q_heads, rows]; lse2 = lse * log2(e), +inf for rows that see no key and rows past the end, so that their
  // weights are 0; within 16 rows permuted, see backward_prepare
  float *lse2, *delta;
  float* query_sum;      // [batch, q_heads, rows, D], inside a query tile in the kernel's own order of fragments
  float* key_value_sum;  // null, or zeros [2, batch, kv_heads, key_tiles, tile, D]: one block for each query head adds
                         // here
  int* turn;             // deterministic: zeros [batch, q_heads, rows / tile, 2]
  int rows, key_tiles;
  int span;    // (head, batch) pairs worked on at a time, all key tiles of these, the first tiles first
  int rotate;  // deterministic: all blocks that share queries are resident at once, so they start at staggered query
               // tiles
};

// Which tile of keys a block works on, and for which query heads. Causal: the first tiles have the most queries, so
// they start first; a small span keeps the queries that are in use in the second-level cache.
struct BackwardTile {
  int key_tile, head_k, batch, first_head, heads;
  explicit __device__ __forceinline__ BackwardTile(const BackwardTask& p) {
    const int heads_n = p.key_value_sum ? p.q_heads : p.kv_heads;
    const int first = blockIdx.x / (p.span * p.key_tiles) * p.span, here = min(p.span, heads_n * p.batch - first);
    const int r = blockIdx.x - first * p.key_tiles, pair = first + r % here, head = pair % heads_n;
    key_tile = r / here;
    batch = pair / heads_n;
    heads = p.key_value_sum ? 1 : p.group;
    head_k = p.key_value_sum ? head / p.group : head;
    first_head = p.key_value_sum ? head : head * p.group;
  }
};

// The query tiles of a block, one query head after the other.
template <int Rows, int Keys, bool Causal, bool Deterministic>
struct BackwardQueries {
  int first, tiles, head, tile, left;
  __device__ __forceinline__ BackwardQueries(const BackwardTask& p, const BackwardTile& t) {
    tiles = p.rows / Rows;
    first = Causal ? min(max(0, t.key_tile * Keys - p.offset) / Rows, tiles) : 0;
    head = t.first_head;
    left = tiles - first;
    tile = first;
    if (Deterministic && !Causal && p.rotate) tile = t.key_tile * tiles / p.key_tiles;
  }
  __device__ __forceinline__ int per_head() const { return tiles - first; }
  __device__ __forceinline__ void next() {
    if (++tile == tiles) {
      tile = first;
      if (!Deterministic) head++;
    }
    if (Deterministic && --left == 0) {
      left = tiles - first;
      head++;
    }
  }
  // How many blocks add to this query tile before this one: in the order in which they get to it.
  __device__ __forceinline__ int turn(const BackwardTask& p, const BackwardTile& t) const {
    if (!p.rotate) return t.key_tile;
    if (Causal) return min(p.key_tiles - 1, ((tile + 1) * Rows + p.offset - 1) / Keys) - t.key_tile;
    const int first_here = min(p.key_tiles - 1, ((tile + 1) * p.key_tiles - 1) / tiles);
    return first_here - t.key_tile + (t.key_tile > first_here ? p.key_tiles : 0);
  }
};

// How many (head, batch) pairs run at a time: enough for longest-first to fill the machine, few enough for the cache.
inline int backward_span(const BackwardTask& p, int head_dim, bool causal, bool deterministic) {
  if (!causal || deterministic || p.key_tiles == 0) return 1;
  const int64_t head_bytes = int64_t{p.q_len} * head_dim * 8,
                pairs = int64_t{p.key_value_sum ? p.q_heads : p.kv_heads} * p.batch;
  int64_t span = 256 / p.key_tiles;
  span = span < 1 ? 1 : span > pairs ? pairs : span;
  while (span > 1 && span * head_bytes > (int64_t{24} << 20) && span * p.key_tiles > 128) span /= 2;
  return static_cast<int>(span);
}

}  // namespace attnjourney

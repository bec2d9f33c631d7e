// The parameters of a backward kernel, and the order in which its tiles are worked on.
#pragma once
#include <cstdint>

#include "forward_task.cuh"

namespace attnjourney {

// The gradient of a floating mask, in its own shape, dense; strides are 0 where the mask broadcasts.
template <class Real>
struct MaskGradientOf {
  Real* sum;  // null: not wanted
  int64_t batch[kMaskDims], head, row, col;
  int items, heads;  // of the mask's own
  void* own;  // null, or the gradient itself, in the dtype of query, which the main kernel writes (mask_tiles.cuh)
};
using MaskGradient = MaskGradientOf<float>;

template <class Real>
struct BackwardTaskOf : SequenceTaskOf<Real> {
  const void *query, *key, *value, *out, *grad_out;
  const RowStats<Real>* stats;  // [batch, q_heads, q_len], dense
  const Real* grad_lse;         // like stats, or null
  // null where not needed; grad_key, grad_value per key head
  void *grad_query, *grad_key, *grad_value;
  Strides query_strides, key_strides, value_strides, out_strides, grad_out_strides;
  Strides grad_query_strides, grad_key_strides, grad_value_strides;
  int batch, q_heads, kv_heads, group, head_dim, v_head_dim;
  Real scale, score_scale;  // as in the forward
  // Scratch. rows: q_len rounded up to the kernel's query tile.
  // [batch, q_heads, rows]; RowStats in parts, and lse2 = reference - log2(inverse) for kernels without options; +inf,
  // 0 and +inf for rows that see no key and rows past the end, so that their weights are 0; within 16 rows permuted,
  // see backward_prepare
  Real *reference, *inverse, *lse2, *delta;
  Real* query_sum;      // [batch, q_heads, rows, D], inside a query tile in the kernel's own order of fragments
  Real* key_value_sum;  // null, or zeros [2, batch, kv_heads, key_tiles, tile, D]: one block for each query head adds
                        // here
  uint32_t* query_blocks;  // null, or [batch, q_heads]: how many blocks have added to a head's query_sum, whose last
                           // one makes grad_query of it then
  int* turn;               // deterministic: zeros [batch, q_heads, rows / tile, 2]
  Real *grad_sinks, *grad_slopes;  // null, or [q_heads], or per item [batch, q_heads]
  bool sinks_per_item, slopes_per_item;
  MaskGradientOf<Real> mask_gradient;
  Real* slope_sum;  // null, or zeros [batch, key_tiles, q_heads]: parts of the gradient of ALiBi's slopes
  int rows, key_tiles;
  int tile_rows, tile_keys;  // of the kernel; packed: scratch is [q_heads, tiles of all sequences]
  int span;                  // (head, batch) pairs worked on at a time, all key tiles of these, the first tiles first
};
using BackwardTask = BackwardTaskOf<float>;

// Which tile of keys a block works on, and for which query heads. Where causal, the first tiles have the most queries,
// so they start first; a small span keeps the queries that are in use in the second-level cache. Deterministic blocks
// add to a tile of queries in turns, and the last tiles start first: their queries are those that all the others come
// to later. From the first tile on a causal block would stand still until all before it had come as far as its
// diagonal.
struct BackwardTile {
  int key_tile, head_k, batch, first_head, heads;
  // block: a number among all. Packed: tiles of `keys` keys
  template <class Task>
  __device__ __forceinline__ BackwardTile(const Task& p, unsigned block, int keys) {
    const int number = block / p.kv_heads;
    batch = packed_item(p.cu_k, p.batch, keys, number);
    key_tile = p.turn ? first_packed_tile(p.cu_k, keys, batch + 1) - 1 - number
                      : number - first_packed_tile(p.cu_k, keys, batch);
    heads = p.group;
    head_k = block % p.kv_heads;
    first_head = head_k * p.group;
  }
  template <class Task>
  __device__ __forceinline__ BackwardTile(const Task& p, unsigned block) : BackwardTile(p, block, p.turn != nullptr) {}
  template <class Task>
  __device__ __forceinline__ BackwardTile(const Task& p, unsigned block, bool deterministic) {
    const int heads_n = p.key_value_sum ? p.q_heads : p.kv_heads;
    const int first = block / (p.span * p.key_tiles) * p.span, here = min(p.span, heads_n * p.batch - first);
    const int r = block - first * p.key_tiles, pair = first + r % here, head = pair % heads_n;
    key_tile = deterministic ? p.key_tiles - 1 - r / here : r / here;
    batch = pair / heads_n;
    heads = p.key_value_sum ? 1 : p.group;
    head_k = p.key_value_sum ? head / p.group : head;
    first_head = p.key_value_sum ? head : head * p.group;
  }
};

// Where a head's rows of an item lie in the scratch: [batch, q_heads, rows], packed [q_heads, rows].
template <class Task>
__device__ __forceinline__ int64_t scratch_row(const Task& p, int batch, int head) {
  if (!p.cu_q) return (int64_t(batch) * p.q_heads + head) * p.rows;
  return int64_t(head) * p.rows + first_packed_tile(p.cu_q, p.tile_rows, batch) * p.tile_rows;
}
// And which item and row of it lies there.
struct ScratchRow {
  int batch, head, row;
  template <class Task>
  __device__ __forceinline__ ScratchRow(const Task& p, int pair, int row_) : row(row_) {
    batch = pair / p.q_heads, head = pair - batch * p.q_heads;
    if (!p.cu_q) return;
    batch = packed_item(p.cu_q, p.batch, p.tile_rows, row / p.tile_rows);
    row -= first_packed_tile(p.cu_q, p.tile_rows, batch) * p.tile_rows;
  }
};
// The number of a row among all of a head, in lse.
template <class Task>
__device__ __forceinline__ int64_t stat_row(const Task& p, const ScratchRow& at, int q_begin) {
  return (p.cu_q ? int64_t(at.head) : int64_t(at.batch) * p.q_heads + at.head) * p.q_len + q_begin + at.row;
}

// What the pass before the kernel leaves of a row. A NaN of its sum shows in all of it.
template <class Task, class Real>
__device__ __forceinline__ void write_row(const Task& p, int64_t at, const RowStats<Real>& stats, Real delta) {
  const bool none = stats.inverse == 0;
  p.reference[at] = none ? INFINITY : stats.inverse == stats.inverse ? stats.reference : stats.inverse;
  p.inverse[at] = stats.inverse;
  p.lse2[at] = stats.reference - ptx::log2(stats.inverse);
  p.delta[at] = none ? 0 : delta;
}

// The query tiles of a block, one query head after the other.
template <int Rows, int Keys, bool Ranged>
struct BackwardQueries {
  int first, end, tiles, head, tile;  // [first, end) of `tiles` see a key of the block
  int whole_begin, whole_end;         // these rows see all of them
  template <class Task>
  __device__ __forceinline__ BackwardQueries(const Task& p, const BackwardTile& t, const Sequence& s) {
    tiles = p.rows / Rows;
    const int n0 = t.key_tile * Keys;
    if (Ranged) {
      const Range any = s.keys.rows(n0, min(n0 + Keys, s.keys.key_length) - 1, s.q_len);
      const Range all = s.keys.rows_of_all(n0, n0 + Keys - 1, s.q_len);
      const bool some = !any.empty();
      first = some ? any.begin / Rows : 0;
      end = some ? (any.end + Rows - 1) / Rows : 0;
      whole_begin = all.begin;
      whole_end = all.end;
      if (whole_end == p.q_len) whole_end = p.rows;  // rows past the tensor's end have weights of 0 anyway
    } else {
      first = whole_begin = 0;
      end = tiles;
      whole_end = n0 + Keys <= p.kv_len ? p.rows : 0;
    }
    head = t.first_head;
    tile = first;
  }
  __device__ __forceinline__ int per_head() const { return end - first; }
  __device__ __forceinline__ void next() {
    if (++tile == end) {
      tile = first;
      head++;
    }
  }
  // the query tile of this number among those of all heads
  __device__ __forceinline__ void go(int number, int first_head) {
    head = first_head + number / per_head();
    tile = first + number % per_head();
  }
  struct At {
    int head, tile;
  };
  __device__ __forceinline__ At number(int n, int first_head) const {
    const int per = per_head(), heads_before = n / per;
    return {first_head + heads_before, first + n - heads_before * per};
  }
  // do rows [row, row + Rows) see all keys of the block?
  __device__ __forceinline__ bool whole(int row) const { return row >= whole_begin && row + Rows <= whole_end; }
  // How many blocks add to this query tile before this one: those of later keys that its rows see.
  template <class Task>
  __device__ __forceinline__ int turn(const Task& p, const BackwardTile& t, const Sequence& s) const {
    if (!Ranged) return p.key_tiles - 1 - t.key_tile;
    return tiles_after<Keys>(s.keys.any(tile * Rows, min(tile * Rows + Rows, s.q_len) - 1), t.key_tile);
  }
};

// How many (head, batch) pairs run at a time: enough for longest-first to fill the machine, few enough for the cache.
template <class Task>
inline int backward_span(const Task& p, int head_dim, bool ranged, bool deterministic) {
  if (!ranged || deterministic || p.key_tiles == 0) return 1;
  const int64_t head_bytes = int64_t{p.q_len} * head_dim * 8,
                pairs = int64_t{p.key_value_sum ? p.q_heads : p.kv_heads} * p.batch;
  int64_t span = 256 / p.key_tiles;
  span = span < 1 ? 1 : span > pairs ? pairs : span;
  while (span > 1 && span * head_bytes > (int64_t{24} << 20) && span * p.key_tiles > 128) span /= 2;
  return static_cast<int>(span);
}

}  // namespace attnjourney

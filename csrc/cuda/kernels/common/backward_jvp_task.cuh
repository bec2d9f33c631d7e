// The parameters of the kernels for the derivative of attention's backward in a direction, what they do to a tile of
// scores, and which tiles a block works on. With mu = d(lse) and d(out) known from the jvp (jvp_task.cuh):
//
//   A = d(score),  dP = dO V^T,  delta = rowsum(dO out) - grad_lse,  dS = P (dP - delta)
//   d(P) = P (A - mu),  d(dS) = d(P) (dP - delta) + P (d(dP) - d(delta))
//   d(dQ) = scale (d(dS) K + dS dK'),  d(dK) = scale (d(dS)^T Q + dS^T dQ'),  d(dV) = d(P)^T dO + P^T d(dO)
//
// where dQ', dK' are the directions of Q and K. With a score modifier f: dS by the scores is f' dS, its derivative f'
// d(dS) + f'' d(score before f) dS. Dropout multiplies P and dP where the backward has it.
#pragma once
#include "jvp_task.cuh"
#include "next_tile.cuh"

namespace attnjourney {

// What the pass before leaves of a row; inverse is 0 where it sees no key.
template <class Real>
struct alignas(16) RowChange {
  Real reference, inverse, mu, delta, delta_change;
  Real none[3];  // to whole chunks of 16 bytes
};

enum class Gradient : int { query, key, value };
constexpr int kOwnRows = 64;  // of a block's own tile

// [batch, heads, length, dim] or null
struct Operand {
  const void* data;
  Strides strides;
};

// Of the backward's scratch there is one row for each of query (tile_rows = 1): `changes`, and where the gradient of
// sinks is wanted reference, inverse and delta, here what the sink's weight is multiplied by. slope_sum: a number for
// each tile of kOwnRows queries, of which there are key_tiles.
template <class Real>
struct BackwardJvpTaskOf : BackwardTaskOf<Real>, DirectionsOf<Real> {
  const void *grad_out_tangent, *out_tangent;
  Strides grad_out_tangent_strides, out_tangent_strides;
  const Real *grad_lse_tangent, *lse_tangent;  // like stats; grad_lse_tangent or null
  RowChange<Real>* changes;                    // [batch, q_heads, rows], packed [q_heads, rows]

  // of one launch: which gradient; its blocks for each tile, which have their part of its columns; slices of the
  // products for scores; places for those of a block's own tile
  Gradient gradient;
  int column_blocks, slices, own_places;
  Operand operands[2][4];  // [queries, keys][Q and its direction, dO and its direction | K, dK', V, dV']

  __device__ __forceinline__ bool by_keys() const { return gradient != Gradient::query; }
};

template <class Real>
inline void plan_operands(BackwardJvpTaskOf<Real>& p) {
  const Operand all[2][4] = {{{p.query, p.query_strides},
                              {p.query_tangent, p.query_tangent_strides},
                              {p.grad_out, p.grad_out_strides},
                              {p.grad_out_tangent, p.grad_out_tangent_strides}},
                             {{p.key, p.key_strides},
                              {p.key_tangent, p.key_tangent_strides},
                              {p.value, p.value_strides},
                              {p.value_tangent, p.value_tangent_strides}}};
  for (int i = 0; i < 8; i++) p.operands[i / 4][i % 4] = all[i / 4][i % 4];
}
// columns: of a slice; sum_slices: that a block has of the gradient
template <class Real>
inline void plan_gradient(BackwardJvpTaskOf<Real>& p, Gradient gradient, int columns, int sum_slices) {
  const bool of_values = gradient == Gradient::value;
  const int most = of_values || p.head_dim > p.v_head_dim ? p.head_dim : p.v_head_dim;
  const int part = columns * sum_slices, dim = of_values ? p.v_head_dim : p.head_dim;
  p.gradient = gradient;
  p.slices = (most + columns - 1) / columns, p.own_places = p.slices < 2 ? p.slices : 2;
  p.column_blocks = gradient == Gradient::query && !p.grad_query ? 1 : (dim + part - 1) / part;
}
// The task of backward_per_head, to which slope_sum's tiles are those of keys.
template <class Real>
inline BackwardTaskOf<Real> by_queries(const BackwardJvpTaskOf<Real>& p) {
  BackwardTaskOf<Real> task = p;
  task.cu_k = p.cu_q, task.kv_len = p.q_len, task.tile_keys = kOwnRows;
  return task;
}

// A tile of Own rows of the tensor whose gradient is computed, its head and batch item. Queries with the most keys and
// keys with the most queries start first where the call is causal.
struct OwnTile {
  int tile, head, batch;
  template <class Task>
  __device__ __forceinline__ OwnTile(const Task& p, unsigned block, int own) {
    const bool by_keys = p.by_keys();
    const int heads = by_keys ? p.kv_heads : p.q_heads;
    const int* cu = by_keys ? p.cu_k : p.cu_q;
    const int number = block / heads;
    head = block % heads;
    if (cu) {
      batch = packed_item(cu, p.batch, own, number);
      tile = number - first_packed_tile(cu, own, batch);
    } else {
      const int tiles = ((by_keys ? p.kv_len : p.q_len) + own - 1) / own;
      batch = number / tiles;
      tile = number - batch * tiles;
      if (!by_keys) tile = tiles - 1 - tile;
    }
  }
  template <class Task>
  static int64_t count(const Task& p, bool by_keys, int own) {
    const int64_t heads = by_keys ? p.kv_heads : p.q_heads, length = by_keys ? p.kv_len : p.q_len;
    return heads * (p.cu_q ? length / own + p.batch : (length + own - 1) / own * p.batch);
  }
};

// What a block works on: a tile of Own rows, and the tiles of Others rows of the other side that it walks over: keys
// that its queries see, or the queries that see its keys, of all the query heads of its key head. Lies in shared
// memory: held in registers, it would spill.
template <int Own, int Others>
struct OwnWork {
  OwnTile where;
  Sequence sequence;
  int first_head, heads;
  KeyTiles tiles;  // of a head, by the numbers of tiles of Others rows

  template <class Task>
  __device__ __forceinline__ OwnWork(const Task& p, unsigned block)
      : where(p, block, Own), sequence(sequence_of<true>(p, where.batch)), first_head(where.head), heads(1) {
    const Ranges& keys = sequence.keys;
    const int first = where.tile * Own, last = first + Own - 1;
    if (p.by_keys()) {
      first_head *= p.group, heads = p.group;
      const Range any = keys.rows(first, min(last + 1, keys.key_length) - 1, sequence.q_len);
      const Range all = keys.rows_of_all(first, last, sequence.q_len);
      const int begin = any.begin / Others, end = any.empty() ? begin : (any.end + Others - 1) / Others;
      tiles = {0, begin, end, (all.begin + Others - 1) / Others, all.end / Others, 0};
    } else {
      tiles = key_tiles_of<Others, true>(p, sequence, first, last);
      if (last >= sequence.q_len) tiles.whole_end = 0;
    }
  }
};

// The walk over these tiles (next_tile.cuh), numbered from 0 on.
template <int Own, int Others, class Real>
struct OtherTileWalk {
  const BackwardJvpTaskOf<Real>& p;
  const OwnWork<Own, Others>& work;
  int head, tile;  // to come

  __device__ __forceinline__ OtherTileWalk(const BackwardJvpTaskOf<Real>& p_, const OwnWork<Own, Others>& work_)
      : p(p_), work(work_) {
    if (end() > 0) to(0);
  }
  __device__ __forceinline__ void place_of(int n, int& head_, int& tile_) const {
    const KeyTiles& tiles = work.tiles;
    const int per = tiles.count(), i = n % per;
    head_ = work.first_head + n / per, tile_ = i < tiles.prefix ? i : i - tiles.prefix + tiles.begin;
  }
  __device__ __forceinline__ void to(int n) { place_of(n, head, tile); }

  __device__ __forceinline__ const Sequence& sequence() const { return work.sequence; }
  __device__ __forceinline__ HeadScoresOf<Real> scores() const {
    return HeadScoresOf<Real>(p, p.q_heads, work.where.batch, head);
  }
  __device__ __forceinline__ int lane() const { return ptx::opaque(threadIdx.x % 32); }
  __device__ __forceinline__ int end() const { return work.tiles.count() * work.heads; }
  __device__ __forceinline__ int after(int n) {
    to(n + 1);
    return n + 1;
  }
  __device__ __forceinline__ int go(int, int n) {
    to(n);
    return n;
  }
  __device__ __forceinline__ void leave(int) const {}
  __device__ __forceinline__ TilePlace place(int, const Sequence&) const {
    const int own = work.where.tile * Own + static_cast<int>(threadIdx.x) / 32 * 16 + lane() / 4;
    const int other = tile * Others + lane() % 4 * 2;
    return {p.by_keys() ? other : own, p.by_keys() ? own : other, work.tiles.whole(tile)};
  }
  __device__ __forceinline__ TileKind kind(int n) const {
    int head_, tile_;
    place_of(n, head_, tile_);
    const HeadScoresOf<Real> scores(p, p.q_heads, work.where.batch, head_);
    const int own = work.where.tile * Own, other = tile_ * Others, key = p.by_keys() ? own : other;
    return scores.blocks(p.scores).kind(p.by_keys() ? other : own, p.by_keys() ? Others : Own, key,
                                        min(p.by_keys() ? Own : Others, p.kv_len - key));
  }
};

// A fragment of scores with rows of the own tile down: queries, or keys.
template <int Others>
struct OwnFragment {
  using Queries = RowFragment<Others / 8>;
  using Keys = KeyFragment<1, Others / 8>;
  static constexpr int kCount = Queries::kCount;
  bool by_keys;
  __device__ __forceinline__ int row(int i) const { return by_keys ? Keys::row(i) : Queries::row(i); }
  __device__ __forceinline__ int key(int i) const { return by_keys ? Keys::key(i) : Queries::key(i); }
};
template <int Others, class Real>
__device__ __forceinline__ uint32_t kept(const ScoresOf<Real>& s, const HeadScoresOf<Real>& h, int row, int key,
                                         int lane, OwnFragment<Others> f) {
  constexpr int kTiles = Others / 8;
  uint32_t mine = 0;
#pragma unroll 1
  for (int m = 0; m < (f.kCount + 7) / 8; m++) {
    const int c = f.by_keys ? m * 8 + lane / 4 : m * 4 + lane % 4;
    const int r = f.by_keys ? c / 2 % kTiles * 8 + c % 2 : c % 2 * 8, octet = f.by_keys ? c / 2 / kTiles : c / 2;
    mine |= kept_octet(s, h.index, row + r, key / 8 + octet) << (8 * m);
  }
  using F = OwnFragment<Others>;
  return f.by_keys ? of_octets(mine, lane, typename F::Keys{}) : of_octets(mine, lane, typename F::Queries{});
}

// One pair, from its products: what the gradient of the values takes, and of the score before any modifier.
template <class Real>
struct ChangedPair {
  Real weight, weight_change;  // P and d(P) after dropout, without what it scales by
  Real grad, grad_change;      // dS and d(dS)
  Real of_score;               // d(dS) by the score as the modifier left it
};
// product: q . k; move: its derivative; grad, grad_change: dO . v and its derivative
template <class T, class Real>
__device__ __forceinline__ ChangedPair<Real> changed_pair(const BackwardJvpTaskOf<Real>& p,
                                                          const HeadScoresOf<Real>& scores,
                                                          const HeadChange<Real>& change, int row, int key, int offset,
                                                          bool visible, bool keep, const RowChange<Real>& of,
                                                          Real product, Real move, Real grad, Real grad_change) {
  const WeightedScore<Real> x = weighted<T>(p.scores, scores, row, key, offset, visible, keep, product, p.score_scale,
                                            {of.reference, of.inverse}, grad, of.delta);
  const bool counts = x.weight != 0;
  move *= p.scale;
  Real moved = move * x.slope;
  if (p.mask_tangent && counts) moved += change.template of_mask<T>(p, row, key);
  if (p.slopes_tangent) moved -= change.slope * distance<Real>(row, key, offset);
  const Real weight_change = counts ? x.weight * (moved - of.mu) : 0;
  const Real keep_scale = p.scores.seed ? p.scores.keep_scale : Real(1);
  const auto after = [&](Real y) { return keep ? y * keep_scale : 0; };
  ChangedPair<Real> y;
  y.weight = keep ? x.weight : 0, y.weight_change = keep ? weight_change : 0;
  y.grad = x.grad;
  y.of_score =
      counts ? weight_change * (after(grad) - of.delta) + x.weight * (after(grad_change) - of.delta_change) : 0;
  y.grad_change = y.of_score;
  if (p.scores.modified() && counts) {
    const Real bend = -2 * cap_tanh<T>(p.scores, product) * p.scores.unit / p.scores.cap;  // f'' / f'
    y.grad_change = x.slope * (y.of_score + bend * move * x.grad);
    y.grad = x.slope * x.grad;
  }
  return y;
}

}  // namespace attnjourney

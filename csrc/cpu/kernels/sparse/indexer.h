// Scores of the lightning indexer, some rows of query against a block of keys: I[t][s] = sum_h w[h][t] relu(q[h][t]
// k[s]). The keys are packed with lanes over keys, once for all rows; heads are the rows of a tile, and its epilogue
// is relu, weight and the sum over the heads, so that no product of a single head is stored. `filter` gives the keys
// above a threshold: what is left of a row once the highest scores are known.
#pragma once
#include "cpu/kernels/common/pack.h"
#include "cpu/kernels/common/scratch.h"
#include "cpu/kernels/common/tile.h"
#include "cpu/sparse/kernels.h"

namespace attnjourney {
namespace {

template <class Real>
struct IndexerTiles {
  using V = Vec<Real>;
  static constexpr int M = Tuning::rows, N = Tuning::vectors;
  static constexpr int64_t panel = N * V::width, keys = (288 + panel - 1) / panel * panel;  // of a block

  // scores of one row against `panels` of keys [dim][panel]
  static ATTN_NOINLINE void row(const Real* query, const Real* weights, int64_t heads, int64_t dim, const Real* packed,
                                int64_t panels, Real* scores) {
    const V zero = V::zero();
    for (int64_t i = 0; i < panels; i++, packed += dim * panel, scores += panel) {
      V sum[N];
      ATTN_UNROLL for (int j = 0; j < N; j++) sum[j] = zero;
      split_rows<M>(heads, [&](int64_t first, auto m) {
        Tile<Real, m.count, N> t;
        t.clear();
        t.add_rows(query + first * dim, dim, packed, panel, dim);
        ATTN_UNROLL for (int r = 0; r < m.count; r++) {
          const V weight = V::broadcast(weights + first + r);
          ATTN_UNROLL for (int j = 0; j < N; j++) sum[j] = fma(weight, max(zero, t.acc[r][j]), sum[j]);
        }
      });
      ATTN_UNROLL for (int j = 0; j < N; j++) store(scores + j * V::width, sum[j]);
    }
  }
};

template <class T>
struct Indexer {
  using Real = Compute<T>;
  using V = Vec<Real>;
  using Tiles = IndexerTiles<Real>;
  static constexpr int64_t block = Tiles::keys, panel = Tiles::panel;
  static constexpr Real infinity = Real(__builtin_inff());

  struct Buffers {
    Real *query, *weights;  // [row][head][dim], times the scale; [row][head]
    Real* packed;           // [panel][dim][lane]
    Real* scores;           // [row][block]
    Buffers(const IndexerParams& p, int64_t rows, Scratch& scratch) {
      query = scratch.take<Real>(rows * p.heads * p.head_dim);
      weights = scratch.take<Real>(rows * p.heads);
      packed = scratch.take<Real>(block * p.head_dim);
      scores = scratch.take<Real>(rows * block);
    }
  };
  static int64_t space(const IndexerParams& p, int64_t rows) { return scratch_bytes<Buffers>(p, rows); }

  // rows of query, heads `q_head` and rows `q_row` apart; weights in compute precision
  static void load_rows(const IndexerParams& p, const IndexerRows& in, int64_t rows, void* space) {
    const Buffers b = buffers_in<Buffers>(space, p, rows);
    const V scale = V::set(Real(p.scale));
    for (int64_t r = 0; r < rows; r++)
      for (int64_t h = 0; h < p.heads; h++) {
        const T* const from = static_cast<const T*>(in.query) + h * in.q_head + r * in.q_row;
        Real* const to = b.query + (r * p.heads + h) * p.head_dim;
        int64_t d = 0;
        for (; d + V::width <= p.head_dim; d += V::width) store(to + d, load(from + d) * scale);
        for (; d < p.head_dim; d++) to[d] = load_one(from + d) * Real(p.scale);
        b.weights[r * p.heads + h] = static_cast<const Real*>(in.weights)[h * in.weights_head + r];
      }
  }

  // rows [first, rows) against n <= block keys
  static void scores(const IndexerParams& p, int64_t first, int64_t rows, const void* key, int64_t k_row, int64_t n,
                     void* space) {
    const Buffers b = buffers_in<Buffers>(space, p, rows);
    const int64_t panels = (n + panel - 1) / panel;
    if (n % panel) memset(b.packed + (panels - 1) * p.head_dim * panel, 0, size_t(p.head_dim * panel) * sizeof(Real));
    pack_transposed(static_cast<const T*>(key), k_row, n, p.head_dim, Unchanged{}, b.packed, panel, p.head_dim * panel,
                    panel);
    for (int64_t r = first; r < rows; r++)
      Tiles::row(b.query + r * p.heads * p.head_dim, b.weights + r * p.heads, p.heads, p.head_dim, b.packed, panels,
                 b.scores + r * block);
  }

  // Of the first n scores of a row those above the threshold (a NaN counts as the highest number), or all: their
  // numbers, and the scores. `to` and `chosen` have room for n.
  static int64_t filter(const IndexerParams& p, int64_t rows, int64_t row, int64_t n, const double* threshold,
                        int32_t* chosen, void* to_, void* space) {
    const Real* const scores = buffers_in<Buffers>(space, p, rows).scores + row * block;
    Real* const to = static_cast<Real*>(to_);
    int64_t count = 0;
    const Real limit = threshold ? Real(*threshold) : -infinity;
    const V limits = V::set(limit);
    for (int64_t i = 0; i < n; i += V::width) {
      const V x = load(scores + i);
      if (threshold && !any(ge(x, limits)) && finite_bits(x)) continue;
      for (int64_t j = i, end = min_of(n, i + V::width); j < end; j++) {
        const Real value = scores[j];
        if (threshold && !((value == value ? value : infinity) > limit)) continue;
        chosen[count] = int32_t(j);
        to[count++] = value;
      }
    }
    return count;
  }
};

}  // namespace
}  // namespace attnjourney

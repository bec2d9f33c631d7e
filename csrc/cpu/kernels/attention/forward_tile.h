// What the walk of the forward and its products share: the rows of a tile, their running state, and where their output
// goes.
#pragma once
#include "cpu/kernels/common/mask_tile.h"
#include "cpu/kernels/common/tile.h"

namespace attnjourney {
namespace {

// The least exponent of a weight where references only rise: products with values stay normal numbers.
template <class Real>
constexpr Real least_of_rising = sizeof(Real) == 4 ? Real(-100) : Real(-900);

struct QueryTile {
  int64_t index;         // in the call
  int64_t first, count;  // rows
  int64_t vectors_used;
};

// The online softmax of the rows of a tile. The reference, negated, is added to every score.
template <class Real>
struct RunningRows {
  Real* reference;
  Real* top;      // the largest score
  Real* total;    // sum of the weights against the reference
  Real* rounded;  // of the rounded ones, where products take those
  RunningRows of_tile(int64_t offset) const {
    return {reference + offset, top + offset, total + offset, rounded + offset};
  }
};

// between rows of sums, and of the values that are added up there: whole cache lines
template <class Real>
int64_t sums_ld(const AttentionParams& params) {
  return round_up(params.v_head_dim, 64 / int64_t(sizeof(Real)));
}

// Where sums over keys with lanes over v_head_dim go: [tile][ld] in compute precision, or normalised to the output.
template <class Real, class Out>
struct OutputTile {
  Real* sums;
  int64_t ld, columns;  // columns a multiple of width
  bool fresh;           // sums hold nothing yet
  Out* out;             // null: not yet, or not so
  int64_t out_ld;
  const Real* inverse;  // [tile]: 1 / sum of the row's weights

  // rows r .., columns d ..
  template <int M, int N>
  ATTN_INLINE void put(Tile<Real, M, N>& t, int64_t r, int64_t d) const {
    constexpr int width = Vec<Real>::width;
    if (!fresh) t.add(sums + r * ld + d, ld);
    if (!out) return t.store_to(sums + r * ld + d, ld);
    ATTN_UNROLL for (int i = 0; i < M; i++) {
      const Vec<Real> scale = Vec<Real>::broadcast(inverse + r + i);
      ATTN_UNROLL for (int j = 0; j < N; j++) store(out + (r + i) * out_ld + d + width * j, scale * t.acc[i][j]);
    }
  }
};

// The rows of a call that another kernel is to compute.
struct OtherRows {
  uint8_t* marks;  // [row of the call]
  bool& any;
  ATTN_INLINE void add(int64_t row) const { marks[row] = any = true; }
};
struct CallRows {
  int64_t first, count;
};

// Products that keep the sums of a tile as they are.
struct SumsByRows {
  template <class Real>
  static ATTN_INLINE void scale_row(Real* sums, int64_t ld, int64_t row, Real factor) {
    for (int64_t d = 0; d < ld; d++) sums[row * ld + d] *= factor;
  }
  template <class Real>
  static ATTN_INLINE const Real* rows_of(const QueryTile&, const Real* sums) {
    return sums;
  }
};

// calls f(row of the tile, Rows<m>, keys) for up to Most rows at a time; keys of `seen` that any of them sees
template <int Most = Tuning::rows, class F>
ATTN_INLINE void each_row_group(const KeyRanges& ranges, const QueryTile& tile, int64_t k0, int64_t block,
                                const TileKeys& seen, const F& f) {
  split_rows<Most>(tile.count, [&](int64_t r, auto m) {
    const int64_t row = tile.first + r;
    const TileKeys mine = seen.empty() ? seen : tile_keys(ranges, row, row + m.count - 1, k0, block);
    f(r, m, KeyRange{max_of(mine.begin, seen.begin), min_of(mine.end, seen.end)});
  });
}

}  // namespace
}  // namespace attnjourney

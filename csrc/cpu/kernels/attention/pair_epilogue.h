// The softmax epilogue of the forward by pairs of bfloat16 numbers: the weights of two keys rounded side by side,
// against a reference that moves only when a row leaves its range. The sum counts the rounded weights, too: they are
// what the output is divided by.
#pragma once
#include "forward_softmax.h"
#include "pair_stream.h"

namespace attnjourney {
namespace {

struct ForwardEpilogue {
  using Queries = RunningQueries;
  static constexpr int width = Vf::width, most = 1, count = 1;
  static constexpr int64_t tile = PairTiles::tile;
  static constexpr bool modifies = true;
  static constexpr Hidden kind(Hidden hidden) { return hidden; }

  PairTask task;
  PairTerm terms[1];
  Queries* queries;   // [tile / width]
  const float* bias;  // [key][tile]
  uint32_t* weights;  // [key / 2][tile]
  Vf factor;          // query_factor
  TileScores scores;

  ATTN_INLINE void clear(int64_t at) const { store_pairs(weights + at, Pairs{}); }
  struct Cursor {
    Queries* queries;
    uint32_t* weights;
    const float* bias;
    int64_t lane;
    ATTN_INLINE void next_vector() {
      queries++;
      weights += width;
      bias += width;
      lane += width;
    }
    ATTN_INLINE void next_keys(int vectors) {
      queries -= vectors;
      weights += tile - vectors * width;
      bias += 2 * tile - vectors * width;
      lane -= vectors * width;
    }
  };
  ATTN_INLINE Cursor cursor(int64_t lane, int64_t key, Queries* at) const {
    return {at, weights + key / 2 * tile + lane, bias + key * tile + lane, lane};
  }
  template <Hidden H>
  ATTN_INLINE void softmax(const PendingScores& pending, const Vf (&products)[2], const Cursor& at) const {
    Queries& mine = *at.queries;
    Vf weight[2] = {Vf::zero(), Vf::zero()};
    ATTN_UNROLL for (int r = 0; r < 2; r++) {
      const int64_t key = pending.key + r;
      // a last single key is paired with weight 0
      if ((H == Hidden::by_range || H == Hidden::by_bias) && key >= pending.end) break;
      weight[r] = weight_of<H, true>(scores, products[r], at.lane, key, at.bias + r * tile, mine);
    }
    const Pairs pair = round_pairs(weight[0], weight[1]);
    mine.total = mine.total + (weight[0] + weight[1]);
    mine.rounded = add_pairs(mine.rounded, pair);
    store_pairs(at.weights, pair);
  }
  // scores -> modified ones, in their unit
  ATTN_INLINE void modify(float* x, const float*, int n) const { modify_short(x, n, factor, task.modifier.cap); }
};

}  // namespace
}  // namespace attnjourney

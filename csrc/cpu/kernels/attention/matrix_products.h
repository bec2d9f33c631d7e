// The forward's products on a matrix unit (attention/matrix_tiles.h): those of attention/pair_products.h but for scores
// and values, which come from it by way of memory.
#pragma once
#include "matrix_tiles.h"
#include "pair_products.h"

namespace attnjourney {
namespace {

template <class Unit>
class MatrixProducts : public PairProducts {
  using Matrix = MatrixTiles<Unit>;
  using Epilogue = ForwardEpilogue<true>;
  static constexpr int64_t side = Matrix::side, group = Matrix::keys;  // groups of keys go through it
  static constexpr int64_t step = 2 * side;                            // head_dim is padded to it
  static_assert(width == side && vectors == Matrix::columns && tile == panel && key_block % group == 0);

 public:
  struct Buffers : PairProducts::Buffers {
    float* scores;     // [group][tile]
    uint32_t* packed;  // weights for products with values
    float* sums;       // [tile][2 * width], those products
    Buffers(const AttentionParams& params, int64_t tiles, Scratch& scratch)
        : PairProducts::Buffers(params, tiles, scratch, step, side),
          scores(scratch.take<float>(group * tile)),
          packed(scratch.take<uint32_t>(tile * key_block / 2)),
          sums(scratch.take<float>(tile * 2 * side)) {}
  };

  MatrixProducts(const AttentionParams& params, const HeadPointers& head, const Buffers& buffers)
      : PairProducts(params, head, buffers, step), matrix_buffers_(buffers) {}

  ATTN_INLINE bool reaches_past(const TileKeys& seen) const { return seen.end < block_; }

  ATTN_INLINE void load_block(int64_t k0, int64_t block, const PlacedRows<bf16>& keys, const PlacedRows<bf16>& values) {
    PairProducts::load_block(k0, block, keys, values, block % group == 0);
    memset(buffers_.values + (block + 1) / 2 * buffers_.value_ld, 0, size_t(side * buffers_.value_ld) * 4);
  }

  ATTN_INLINE void weights(const QueryTile& rows, const RunningRows<float>& running, const TileKeys& seen,
                           MaskBlock masked, RowPrefetch& prefetch) {
    using Stream = PairStream<Epilogue>;
    load_running(rows, running);
    Epilogue e = epilogue<Epilogue>(rows, masked, prefetch, matrix_buffers_.scores);
    const auto border = [&](int64_t begin, int64_t end) {
      Stream::border(e, begin, end, rows.count, has_block(masked));
    };
    by_groups(e, seen.begin, seen.all_begin, border);
    with_hidden(inside(masked), [&](auto hidden) {
      by_groups(e, seen.all_begin, seen.all_end,
                [&](int64_t begin, int64_t end) { Stream::template inner<hidden.value>(e, begin, end); });
    });
    by_groups(e, seen.all_end, seen.end, border);
  }

  ATTN_INLINE void add_values(const QueryTile& rows, const TileKeys& seen, const Output& output, RowPrefetch&) const {
    const WeightedValues term = weighted_values(seen);
    multiply_values(term.weights, term.values, term.n, output, rows.count);
  }

 private:
  // calls f over the keys [begin, end) of the block by groups whose scores the matrix unit computes
  template <class F>
  static ATTN_INLINE void by_groups(Epilogue& e, int64_t begin, int64_t end, const F& f) {
    const PairTerm& term = e.terms[0];
    float* const scores = const_cast<float*>(e.scores);
    for (int64_t k = begin; k < end; k = e.first_key + group) {
      const int64_t key = k / group * group;
      if (e.first_key != key)
        with_rows<vectors>(e.task.vectors_used, [&](auto n) {
          Matrix::template scores<n.count>(term.X + key * term.ld, term.ld, term.Y, e.task.pairs, scores, tile);
        });
      e.first_key = key;
      f(k, min_of(end, key + group));
    }
  }

  // n rows of the tile times all pairs
  ATTN_NOINLINE void multiply_values(const uint32_t* weights, const uint32_t* values, int64_t pairs,
                                     const Output& output, int64_t n) const {
    const int64_t groups = (n + side - 1) / side;
    uint32_t* const packed = matrix_buffers_.packed;
    const float* const sums = matrix_buffers_.sums;
    Matrix::transpose_weights(weights, tile, pairs, groups, packed);
    with_rows<Matrix::columns>(groups, [&](auto g) {
      for (int64_t d = 0; d < output.columns; d += 2 * width)
        with_rows<2>((output.columns - d) / width, [&](auto m) {
          Matrix::template values<g.count, m.count>(packed, values + d, output.ld, pairs, matrix_buffers_.sums);
          for (int64_t i = 0; i < n; i++) {
            Tile<float, 1, m.count> row;
            ATTN_UNROLL for (int j = 0; j < m.count; j++) row.acc[0][j] = load(sums + (i * m.count + j) * width);
            output.put(row, i, d);
          }
        });
    });
  }

  const Buffers& matrix_buffers_;
  [[no_unique_address]] const Unit unit_{};  // from here on the unit's registers have their shape
};

}  // namespace
}  // namespace attnjourney

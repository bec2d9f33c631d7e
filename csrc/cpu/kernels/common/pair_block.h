// MatrixBlock on a CPU that multiplies bfloat16 pairs in vectors and has no matrix unit: the same tiles, of which 8
// rows by up to 3 columns of sums stay in registers.
#pragma once
#include "matrix_block.h"

namespace attnjourney {
namespace {

struct PairUnit {
  using Number = bf16;
};

template <>
struct MatrixBlock<PairUnit, 1> : MatrixTile {
  static_assert(Vf::width == side);
  static constexpr int rows_at_once = 8, columns_at_once = 3;

  template <bool Add>
  static ATTN_NOINLINE void multiply(const MatrixLeft& left, int64_t rows, const MatrixRight& right, int64_t columns,
                                     int64_t steps, const MatrixSums& sums_of) {
    for (int64_t j = 0; j < columns; j += columns_at_once)
      with_rows<columns_at_once>(columns - j, [&](auto n) {
        for (int64_t i = 0; i < rows; i++)
          for (int64_t r = 0; r < side; r += rows_at_once)
            block<Add, n.count>(left.at + i * left.row + r * depth, right.at + j * right.column, right.column, steps,
                                sums_of.at + i * sums_of.row + j * sums_of.column + r * side, sums_of.column);
      });
  }

 private:
  template <bool Add, int N>
  static ATTN_INLINE void block(const bf16* a, const uint32_t* b, int64_t b_column, int64_t steps, float* c,
                                int64_t c_column) {
    constexpr int M = rows_at_once;
    Vf acc[M][N];
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) acc[r][j] =
        Add ? load(c + j * c_column + r * side) : Vf::zero();
    for (; steps > 0; steps--, a += numbers, b += pairs) _Pragma("GCC unroll 4") for (int64_t p = 0; p < side; p++) {
        Pairs column[N];
        ATTN_UNROLL for (int j = 0; j < N; j++) column[j] = load_pairs(b + j * b_column + p * side);
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          const PairForAll row = broadcast_pair(a + r * depth + 2 * p);
          ATTN_UNROLL for (int j = 0; j < N; j++) acc[r][j] = dot_pairs(acc[r][j], row, column[j]);
        }
      }
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
        store(c + j * c_column + r * side, acc[r][j]);
  }
};

}  // namespace
}  // namespace attnjourney

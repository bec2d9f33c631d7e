// Products on a matrix unit (registers of 16 x 16 float32 or 16 x 32 bfloat16) of numbers that lie in parts: a bfloat16
// number is one part, the sum of two has the digits of a float16, that of three those of a float32 (common/parts.h).
// Of two parts all four products are taken, which are exact; of three, what the smallest contribute is left out, 2^-26
// of a product.
//
// All matrices lie in tiles of 1 KB, one for each register: with rows of a wider matrix in its place, a load from the
// second-level cache takes 50 cycles rather than 21, a product 16.
#pragma once
#include "tile.h"

namespace attnjourney {
namespace {

// f(Rows<0>) .. f(Rows<N - 1>)
template <int N, class F>
ATTN_INLINE void unrolled(F&& f) {
  if constexpr (N > 1) unrolled<N - 1>(f);
  f(Rows<N - 1>{});
}

struct MatrixTile {
  static constexpr int64_t side = 16, depth = 2 * side;  // numbers of a step along the sum
  static constexpr int64_t numbers = side * depth, pairs = numbers / 2, sums = side * side;
};

// [row tile][step] of [16 rows][32 numbers]; `row` between row tiles, `part` between parts
struct MatrixLeft {
  const bf16* at;
  int64_t row, part;
};
// [column tile][step] of [16 pairs of numbers][16 columns]; `column` between column tiles
struct MatrixRight {
  const uint32_t* at;
  int64_t column, part;
};
// [row tile][column tile] of [16][16]; `row` between row tiles, `column` between column tiles
struct MatrixSums {
  float* at;
  int64_t row, column = MatrixTile::sums;
};

struct Nothing {
  ATTN_INLINE void operator()() const {}
};

// Registers: 2 x 2 accumulators, two tiles of the left side, two of the right one.
template <class Unit, int Parts>
struct MatrixBlock : MatrixTile {
  // sums = left right, or added to what is there; steps of 32 numbers. between(): after every block of registers
  template <bool Add, class Between = Nothing>
  static ATTN_NOINLINE void multiply(const MatrixLeft& left, int64_t rows, const MatrixRight& right, int64_t columns,
                                     int64_t steps, const MatrixSums& sums_of, const Between& between = {}) {
    const bf16* a = left.at;
    float* C = sums_of.at;
    for (int64_t i = 0; i < rows; i += 2, a += 2 * left.row, C += 2 * sums_of.row) {
      const uint32_t* b = right.at;
      float* c = C;
      const int64_t c_column = sums_of.column;
      int64_t j = 0;
      if (i + 1 < rows) {
        for (; j + 1 < columns; j += 2, b += 2 * right.column, c += 2 * c_column)
          block<Add, 2, 2>(a, left.row, left.part, b, right.column, right.part, steps, c, sums_of.row, c_column),
              between();
        if (j < columns)
          block<Add, 2, 1>(a, left.row, left.part, b, right.column, right.part, steps, c, sums_of.row, c_column),
              between();
      } else {
        for (; j < columns; j++, b += right.column, c += c_column)
          block<Add, 1, 1>(a, left.row, left.part, b, right.column, right.part, steps, c, sums_of.row, c_column),
              between();
      }
    }
  }

 private:
  template <bool Add, int I, int J>
  static ATTN_INLINE void block(const bf16* a, int64_t a_row, int64_t a_part, const uint32_t* b, int64_t b_column,
                                int64_t b_part, int64_t steps, float* C, int64_t c_row, int64_t c_column) {
    constexpr int64_t line = 64;
    const auto each = [&](auto&& f) __attribute__((always_inline)) {
      unrolled<I>([&](auto i) __attribute__((always_inline)) {
        unrolled<J>([&](auto j) __attribute__((always_inline)) { f(i, j, C + i.count * c_row + j.count * c_column); });
      });
    };
    each([&](auto i, auto j, float* c) __attribute__((always_inline)) {
      if constexpr (Add)
        Unit::template load<i.count * 2 + j.count>(c, line);
      else
        Unit::template zero<i.count * 2 + j.count>();
    });
    const auto of_left = [&](int part) __attribute__((always_inline)) {
      unrolled<I>([&](auto i) __attribute__((always_inline)) {
        Unit::template load<4 + i.count>(a + part * a_part + i.count * a_row, line);
      });
    };
    const auto of_right = [&](int part) __attribute__((always_inline)) {
      unrolled<J>([&](auto j) __attribute__((always_inline)) {
        Unit::template load<6 + j.count>(b + part * b_part + j.count * b_column, line);
      });
    };
    const auto dots = [&]() __attribute__((always_inline)) {
      unrolled<I>([&](auto i) __attribute__((always_inline)) {
        unrolled<J>([&](auto j) __attribute__((always_inline)) {
          Unit::template dot<i.count * 2 + j.count, 4 + i.count, 6 + j.count>();
        });
      });
    };
    for (; steps > 0; steps--, a += numbers, b += pairs) {
      // the smallest products first; what is loaded serves as long as it can
      if constexpr (Parts == 3) {
        of_left(0), of_right(2), dots();
        of_right(1), dots();
        of_left(1), dots();
        of_right(0), dots();
        of_left(2), dots();
        of_left(0), dots();
      } else if constexpr (Parts == 2) {
        of_left(1), of_right(1), dots();
        of_left(0), dots();
        of_right(0), dots();
        of_left(1), dots();
      } else {
        of_left(0), of_right(0), dots();
      }
    }
    each([&](auto i, auto j, float* c)
             __attribute__((always_inline)) { Unit::template store<i.count * 2 + j.count>(c, line); });
  }
};

}  // namespace
}  // namespace attnjourney

// Numbers as sums of parts, which a matrix unit multiplies. Of bfloat16 parts one is a bfloat16 number, two have the 16
// digits that a float16 needs, three the 24 of a float32; where the unit multiplies float16 numbers, one is such a
// number. For a Vec with Pairs. Tiles hold 16 bits a number, named bf16 for both.
#pragma once
#include "matrix_block.h"
#include "pack.h"

namespace attnjourney {
namespace {

// Number: what the unit multiplies
template <class T, class Number>
constexpr int part_count = 3;
template <>
constexpr int part_count<f16, bf16> = 2;
template <>
constexpr int part_count<bf16, bf16> = 1;
template <>
constexpr int part_count<f16, f16> = 1;

// The parts of 16 numbers, the largest first, for `join`: float32 numbers of which the upper 16 bits are a bfloat16
// and, in all but the last, the others are 0; of the last only the upper ones count.
template <class Number, int Parts>
struct NumberParts {
  Vf part[Parts];
  explicit ATTN_INLINE NumberParts(Vf x) {
    ATTN_UNROLL for (int p = 0; p < Parts; p++) {
      const bool last = p == Parts - 1;
      // three parts are exact: the rest that is left fits the last one
      part[p] = last ? (Parts == 3 ? x : raised_half(x)) : upper_bits(raised_half(x));
      if (!last) x = x - part[p];
    }
  }
  static ATTN_INLINE Pairs join(Vf low, Vf high) { return join_upper(low, high); }
};
template <>
struct NumberParts<f16, 1> {
  Vf part[1];
  explicit ATTN_INLINE NumberParts(Vf x) : part{x} {}
  static ATTN_INLINE Pairs join(Vf low, Vf high) { return join_halves(low, high); }
};

// X[rows][dim] -> parts of it as a left side, [part][row tile][step], zeros beyond rows and dim
template <class Number = bf16, class T>
ATTN_NOINLINE void left_in_parts(const T* X, int64_t row, int64_t rows, int64_t dim, bf16* to, int64_t row_tiles,
                                 int64_t part) {
  constexpr int parts = part_count<T, Number>, width = Vf::width;
  using M = MatrixTile;
  const int64_t steps = (dim + M::depth - 1) / M::depth;
  for (int64_t first = 0; first < row_tiles * M::side; first += M::side)
    for (int64_t d = 0; d < steps * M::depth; d += M::depth, to += M::numbers)  // a tile
      for (int64_t i = 0; i < M::side; i++) {
        bf16* const line = to + i * M::depth;
        const T* const x = X + (first + i) * row + d;
        const int64_t left = first + i < rows ? dim - d : 0;
        if constexpr (parts == 1) {
          const bf16* const numbers = reinterpret_cast<const bf16*>(x);
          store_pairs(reinterpret_cast<uint32_t*>(line), left > 0 ? load_pairs(numbers, left) : Pairs{});
        } else {
          ATTN_UNROLL for (int half = 0; half < 2; half++) {
            Vf numbers = Vf::zero();
            if (left >= (half + 1) * width) {
              numbers = load(x + half * width);
            } else if (left > half * width) {
              T rest[width] = {};
              memcpy(static_cast<void*>(rest), x + half * width, size_t(left - half * width) * sizeof(T));
              numbers = load(rest);
            }
            const NumberParts<Number, parts> split(numbers);
            ATTN_UNROLL for (int p = 0; p < parts; p++) store_upper(line + p * part + half * width, split.part[p]);
          }
        }
      }
}

// a row of a left side -> 0
ATTN_INLINE void zero_left_row(bf16* to, int64_t row, int64_t steps, int64_t parts, int64_t part) {
  using M = MatrixTile;
  for (int64_t p = 0; p < parts; p++)
    for (int64_t s = 0; s < steps; s++)
      memset(static_cast<void*>(to + p * part + (row / M::side * steps + s) * M::numbers + row % M::side * M::depth), 0,
             size_t(M::depth) * 2);
}

// Tiles of a left side as those of a right one, or back: their pairs of numbers transposed, tile by tile
ATTN_NOINLINE void transpose_tiles(const void* X, int64_t tiles, void* to) {
  constexpr int side = Vf::width;
  const float* x = static_cast<const float*>(X);
  float* y = static_cast<float*>(to);
  for (int64_t i = 0; i < tiles; i++, x += side * side, y += side * side) {
    Vf t[side];
    ATTN_UNROLL for (int r = 0; r < side; r++) t[r] = load(x + r * side);
    transpose(t);
    ATTN_UNROLL for (int r = 0; r < side; r++) store(y + r * side, t[r]);
  }
}

// X [key][ld], keys of [begin, end) that lie in one group of 32 from key 32 g on, zeros for the group's others, in
// parts: as tiles of a right side of sums over keys, of which i and i + 16 lie side by side, and, where `rows` is not
// null, of a left one of sums over queries, i and i + 16 of every 32 side by side. Of both the tiles of vector 0; the
// next two tiles of right and the next of left are `column` and one tile on, the lower half of the keys `row` on.
template <class Number, int parts>
ATTN_NOINLINE void weights_in_parts(const float* X, int64_t ld, int64_t g, int64_t begin, int64_t end, int64_t vectors,
                                    bf16* rows, int64_t row, uint32_t* pairs, int64_t column, int64_t part) {
  using M = MatrixTile;
  using Split = NumberParts<Number, parts>;
  constexpr int width = Vf::width;
  for (int64_t v = 0; v < vectors; v += 2)
    for (int64_t i = 0; i < M::side; i++) {
      const auto numbers = [&](int64_t key, int64_t vector) __attribute__((always_inline)) {
        const bool there = key >= begin && key < end && vector < vectors;
        return Split(there ? load(X + key * ld + vector * width) : Vf::zero());
      };
      const auto put = [](void* to, Vf a, Vf b) __attribute__((always_inline)) {
        store_pairs(static_cast<uint32_t*>(to), Split::join(a, b));
      };
      const int64_t k = g * M::depth + i;
      const Split low[2] = {numbers(k, v), numbers(k, v + 1)};
      const Split high[2] = {numbers(k + M::side, v), numbers(k + M::side, v + 1)};
      ATTN_UNROLL for (int p = 0; p < parts; p++) {
        if (rows) {
          bf16* const to = rows + p * part + v / 2 * M::numbers + i * M::depth;
          put(to, low[0].part[p], low[1].part[p]);
          put(to + row, high[0].part[p], high[1].part[p]);
        }
        if (pairs) {
          uint32_t* const to = pairs + p * part / 2 + v * column + i * M::side;
          put(to, low[0].part[p], high[0].part[p]);
          put(to + column, low[1].part[p], high[1].part[p]);
        }
      }
    }
}

// The bits of the largest |x| of rows, as a float32, those of inf or more where one is not finite; and, for float32, of
// the smallest that is not 0.
struct Sizes {
  uint32_t largest, smallest;
};
template <class T>
ATTN_NOINLINE Sizes sizes_of(const T* x, int64_t row, int64_t rows, int64_t dim) {
  constexpr int width = Vf::width;
  if constexpr (sizeof(T) == 2) {
    Pairs seen{};
    for (int64_t i = 0; i < rows; i++, x += row)
      for (int64_t d = 0; d < dim; d += 32)
        seen = largest_halves(seen, load_pairs(reinterpret_cast<const bf16*>(x) + d, dim - d));
    const T largest{uint16_t(largest_of_halves(seen))};
    return {float_bits(load_one(&largest)), 0x7f800000};
  } else {
    SizesSeen seen;
    for (int64_t i = 0; i < rows; i++, x += row) {
      int64_t d = 0;
      for (; d + width <= dim; d += width) seen.see(load(x + d));
      for (; d < dim; d++) seen.see(Vf::set(load_one(x + d)));
    }
    return {seen.largest(), seen.smallest()};
  }
}
// Numbers that are not finite or too large for parts; and so small, for float32, that their last parts vanish.
constexpr float part_limit = 0x1p126f;
template <class T>
ATTN_INLINE uint32_t least_size(const T*) {
  return sizeof(T) == 4 ? float_bits(0x1p-100f) : 0;
}

// The rows that cannot be taken in parts, one after another to f(row): with a number too large, or none large enough.
template <class T, class F>
ATTN_INLINE void each_row_out_of_range(const T* X, int64_t row, int64_t rows, int64_t dim, const F& f) {
  const uint32_t most = float_bits(part_limit), least = least_size(X);
  const Sizes all = sizes_of(X, row, rows, dim);
  if (all.largest < most && all.smallest >= least) return;
  for (int64_t i = 0; i < rows; i++) {
    const uint32_t largest = sizes_of(X + i * row, 0, 1, dim).largest;
    if (largest >= most || (largest > 0 && largest < least)) f(i);
  }
}

// A left side X[rows][dim] as the right side of sums over its rows, of which i and i + 16 of every 32 lie side by side:
// [column tile of dim][32 rows] of [16 pairs of rows][16]; `column` between column tiles. The first `used` of its
// steps.
ATTN_NOINLINE void zip_tiles(const bf16* X, int64_t row_tiles, int64_t steps, int64_t used, uint32_t* to,
                             int64_t column) {
  using M = MatrixTile;
  for (int64_t r = 0; r < row_tiles; r += 2)
    for (int64_t s = 0; s < used; s++) {
      const bf16 *const low = X + (r * steps + s) * M::numbers, *const high = low + steps * M::numbers;
      uint32_t* const tile = to + 2 * s * column + r / 2 * M::pairs;
      for (int64_t i = 0; i < M::side; i++) {
        store_pairs(tile + i * M::side, zip(low + i * M::depth, high + i * M::depth));
        store_pairs(tile + column + i * M::side, zip(low + i * M::depth + M::side, high + i * M::depth + M::side));
      }
    }
}

}  // namespace
}  // namespace attnjourney

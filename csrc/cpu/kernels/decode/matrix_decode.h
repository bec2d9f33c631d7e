// Decoding of many query rows that share their keys, as latents and large groups have them, on a matrix unit: what
// kernels/decode/decode.h does, for queries in bfloat16 and keys that bfloat16 holds exactly (Stored: bf16, i8, e4m3).
//
// S^T = K Q^T: [key][16 rows] of each group of rows; O = P V, P rounded to bfloat16. Keys and values are packed once
// for all rows; values that are part of their keys are packed with them. Of 32 numbers of a row of bytes, i and i + 16
// lie side by side: halves of vectors need not change lanes.
#pragma once
#include "cpu/kernels/common/parts.h"
#include "decode.h"

namespace attnjourney {
namespace {

template <class Stored, class Unit>
struct MatrixDecode {
  using Plain = Decode<bf16, NoPairs, Stored>;
  using Matrix = MatrixBlock<Unit, 1>;
  using Softmax = DecodeSoftmax<float, NoPairs>;
  static constexpr int64_t side = Matrix::side, depth = Matrix::depth;  // rows of a group; keys of a step
  static constexpr int64_t keys = 128, key_tiles = keys / side, key_steps = keys / depth;  // of a block
  static constexpr int64_t most_groups = decode_row_block / side;
  static constexpr bool scaled = sizeof(Stored) == 1;
  static_assert(Vf::width == side);

  static bool takes(int64_t rows) { return rows > Plain::max_rows; }
  static int64_t steps_of(int64_t dim) { return (dim + depth - 1) / depth; }

  struct Buffers {
    bf16 *rows, *query;    // [row][dim padded]; a left side
    uint32_t* query_t;     // the right side of sums over head_dim
    bf16 *key, *value;     // left sides
    uint32_t* value_z;     // the right side of sums over keys
    bf16* weights;         // of each group, the left side of sums over keys
    float *scores, *bias;  // [group][key][16]; [key][16]
    float* sums;           // [group][tile of v_head_dim]
    float *largest, *sum;  // [group][16]
    Buffers(const DecodeParams& params, int64_t groups, Scratch& scratch) {
      const int64_t D = steps_of(params.head_dim), Dv = steps_of(params.v_head_dim);
      rows = scratch.take<bf16>(groups * side * D * depth);
      query = scratch.take<bf16>(groups * D * Matrix::numbers);
      query_t = scratch.take<uint32_t>(groups * D * Matrix::pairs);
      key = scratch.take<bf16>(key_tiles * D * Matrix::numbers);
      value = scratch.take<bf16>(key_tiles * Dv * Matrix::numbers);
      value_z = scratch.take<uint32_t>(2 * Dv * key_steps * Matrix::pairs);
      weights = scratch.take<bf16>(groups * key_steps * Matrix::numbers);
      scores = scratch.take<float>(groups * keys * side);
      bias = scratch.take<float>(Plain::biased(params) ? keys * side : 0);
      sums = scratch.take<float>(groups * 2 * Dv * Matrix::sums);
      largest = scratch.take<float>(groups * side);
      sum = scratch.take<float>(groups * side);
    }
  };
  static int64_t space(const DecodeParams& params, int64_t rows) {
    return scratch_bytes<Buffers>(params, (rows + side - 1) / side);
  }

  // As Decode::chunk; false where a number is out of range, and nothing is written.
  static bool chunk(const DecodeParams& params, const DecodeRows& rows, const DecodeRun* runs, int64_t n_runs,
                    void* partial, void* space) {
    if (n_runs == 0) return false;
    const int64_t groups = (rows.count + side - 1) / side;
    return Pass{params, rows, runs, groups, buffers_in<Buffers>(space, params, groups)}.run(n_runs, partial);
  }

 private:
  struct Pass {
    const DecodeParams& params;
    const DecodeRows& rows;
    const DecodeRun* runs;
    const int64_t groups;
    const Buffers b;
    const int64_t D = steps_of(params.head_dim), Dv = steps_of(params.v_head_dim);
    bool started = false, taken = true;
    int64_t dropped[2 * keys] = {}, dropped_count = 0;  // of the block

    bool run(int64_t n_runs, void* partial) {
      [[maybe_unused]] const Unit unit{};
      pack_queries();
      for (int64_t i = 0; i < groups * side; i++) b.largest[i] = Softmax::lowest, b.sum[i] = 0;
      const VisibleKeys all = params.keys.all(0, params.q_len - 1);
      const bool inside = runs->key == runs->value && params.v_row == params.k_row;
      BlockWalk walk(runs, n_runs, keys);
      LinePrefetch prefetch(
          runs, walk, params.head_dim * int64_t(sizeof(Stored)), params.k_row * int64_t(sizeof(Stored)),
          inside ? 0 : params.v_head_dim * int64_t(sizeof(Stored)), params.v_row * int64_t(sizeof(Stored)));
      const int64_t bytes = keys * (params.head_dim + (inside ? 0 : params.v_head_dim)) * int64_t(sizeof(Stored));
      prefetch.start(bytes, units(), bytes);  // a block ahead
      for (DecodeBlock block{0, 0, 0, 0}; taken && walk.next(block);) {
        load(block, inside, prefetch);
        step(block, !all.one_holds(block.first, block.first + block.count), prefetch);
        if constexpr (scaled) prefetch_scales(runs, walk);
      }
      if (taken) put(partial);
      return taken;
    }

    // Of the work of a block, so that memory is asked at an even pace; about 60 cycles each: for a packed row, a block
    // of products with keys, the softmax of a group, a block of products with values.
    int64_t of_scores() const { return D; }
    static constexpr int64_t of_row = 1, of_softmax = 25;
    int64_t of_values() const { return groups > 1 ? 6 : 3; }
    int64_t units() const {
      const int64_t pairs = (groups + 1) / 2, columns = groups > 1 ? Dv : 2 * Dv;
      return keys * of_row + key_steps * pairs * of_scores() + groups * of_softmax + pairs * columns * of_values();
    }

    // Rows out of range from row `done` of the block on are taken as zeros, and nothing is taken where a row sees one.
    void see(const Stored* x, int64_t row, int64_t n, int64_t dim, int64_t done, int64_t steps, bf16* packed) {
      const auto drop = [&](int64_t i) {
        zero_left_row(packed, done + i, steps, 1, 0);
        dropped[dropped_count++] = done + i;
      };
      if constexpr (sizeof(Stored) == 2) {
        each_row_out_of_range(x, row, n, dim, drop);
      } else if constexpr (WithoutNan<Stored>::differs) {
        if (!any_nan(x, row, n, dim)) return;
        for (int64_t i = 0; i < n; i++)
          if (any_nan(x + i * row, row, 1, dim)) drop(i);
      }
    }

    ATTN_NOINLINE void pack_queries() {
      const int64_t ld = D * depth;
      for (int64_t i = 0; i < rows.count; i++) {
        const int64_t at = rows.first + i;
        const bf16* const row =
            static_cast<const bf16*>(rows.query) + at / params.q_len * params.q_head + at % params.q_len * params.q_row;
        for (int64_t d = 0; d < ld; d += depth) {
          const Pairs numbers = load_pairs(row + d, params.head_dim - d);
          store_pairs(reinterpret_cast<uint32_t*>(b.rows + i * ld + d),
                      scaled ? halves_side_by_side(numbers) : numbers);
        }
        each_row_out_of_range(row, 0, 1, params.head_dim, [&](int64_t) { taken = false; });
      }
      left_in_parts(b.rows, ld, rows.count, ld, b.query, groups, 0);
      transpose_tiles(b.query, groups * D, b.query_t);
    }

    // n rows of a block from row `done` on, as rows of a left side
    static ATTN_NOINLINE void pack(const Stored* x, int64_t row, int64_t n, int64_t dim, int64_t done, int64_t steps,
                                   bf16* to, LinePrefetch* prefetch) {
      for (int64_t i = 0; i < n; i++, x += row) {
        if (prefetch) prefetch->step(of_row);
        bf16* line = to + (done + i) / side * steps * Matrix::numbers + (done + i) % side * depth;
        for (int64_t d = 0; d < dim; d += depth, line += Matrix::numbers) {
          if constexpr (sizeof(Stored) == 2) {
            store_pairs(reinterpret_cast<uint32_t*>(line), load_pairs(x + d, dim - d));
          } else {
            const auto numbers = [&](int64_t at) __attribute__((always_inline)) { return of_bytes(x + at, dim - at); };
            store_pairs(reinterpret_cast<uint32_t*>(line), join_upper(numbers(d), numbers(d + side)));
          }
        }
      }
    }
    // the first n of 16, then zeros; a NaN as some number, since its row is dropped
    static ATTN_INLINE Vf of_bytes(const Stored* x, int64_t n) {
      using Finite = typename WithoutNan<Stored>::type;
      if (n >= side) return attnjourney::load(reinterpret_cast<const Finite*>(x));
      Finite rest[side] = {};
      if (n > 0) memcpy(static_cast<void*>(rest), x, size_t(n));
      return attnjourney::load(rest);
    }
    // rows of packed values -> the right side of sums over keys: of every 32 columns a tile of those that lie first in
    // their pairs, and one of the others
    static ATTN_NOINLINE void zip_values(const bf16* X, int64_t row_tiles, int64_t steps, int64_t used, uint32_t* to) {
      constexpr int64_t column = key_steps * Matrix::pairs;
      for (int64_t r = 0; r < row_tiles; r += 2)
        for (int64_t s = 0; s < used; s++) {
          const bf16 *const low = X + (r * steps + s) * Matrix::numbers, *const high = low + steps * Matrix::numbers;
          uint32_t* const tile = to + 2 * s * column + r / 2 * Matrix::pairs;
          for (int64_t i = 0; i < side; i++) {
            const Pairs a = load_pairs(low + i * depth), z = load_pairs(high + i * depth);
            store_pairs(tile + i * side, join_lower(a, z));
            store_pairs(tile + column + i * side, join_upper(as_numbers(a), as_numbers(z)));
          }
        }
    }
    ATTN_NOINLINE void load(const DecodeBlock& block, bool inside, LinePrefetch& prefetch) {
      dropped_count = 0;
      BlockWalk::pieces(runs, block, [&](const DecodeRun& run, int64_t k, int64_t count, int64_t done) {
        const Stored* const key = static_cast<const Stored*>(run.key) + k * params.k_row;
        const Stored* const value = static_cast<const Stored*>(run.value) + k * params.v_row;
        pack(key, params.k_row, count, params.head_dim, done, D, b.key, &prefetch);
        see(key, params.k_row, count, params.head_dim, done, D, b.key);
        if (inside) return;
        pack(value, params.v_row, count, params.v_head_dim, done, Dv, b.value, nullptr);
        see(value, params.v_row, count, params.v_head_dim, done, Dv, b.value);
      });
      const int64_t used = steps_of(block.count) * 2;
      for (int64_t k = block.count; k < used * side; k++) {
        zero_left_row(b.key, k, D, 1, 0);
        if (!inside) zero_left_row(b.value, k, Dv, 1, 0);
      }
      zip_values(inside ? b.key : b.value, used, inside ? D : Dv, Dv, b.value_z);
    }

    ATTN_NOINLINE void step(const DecodeBlock& block, bool border, LinePrefetch& prefetch) {
      const int64_t n = block.count, steps = steps_of(n), tiles = 2 * Dv;
      Matrix::template multiply<false>({b.key, D * Matrix::numbers, 0}, 2 * steps, {b.query_t, D * Matrix::pairs, 0},
                                       groups, D, {b.scores, Matrix::sums, keys * side},
                                       [&] { prefetch.step(of_scores()); });
      const Vf factor = Vf::set(query_factor<float>(params));
      for (int64_t g = 0; g < groups; g++) {
        float* const scores = b.scores + g * keys * side;
        for (int64_t k = 0; k < n; k++) store(scores + k * side, attnjourney::load(scores + k * side) * factor);
        each_piece(block, [&](const DecodeRun& run, int64_t k, int64_t count, int64_t done) {
          if constexpr (scaled) scale_scores<side>(scores + done * side, run.key_scale + k, count);
        });
        const int64_t row = rows.first + g * side, count = min_of(side, rows.count - g * side);
        MaskBlock mask = MaskBlock::all_visible;
        if (Plain::biased(params))
          mask = DecodeBias<float, side>::template block<bf16>(params, rows, row, count, block.first, n, b.bias);
        if (mask == MaskBlock::all_hidden) {
          for (int64_t k = 0; k < n; k++) store(scores + k * side, Vf::zero());
        } else {
          alignas(64) float before[side];
          memcpy(before, b.largest + g * side, sizeof before);
          const typename Softmax::RowGroup group{.first = row,
                                                 .count = count,
                                                 .scores = scores,
                                                 .bias = has_block(mask) ? b.bias : nullptr,
                                                 .output = nullptr,
                                                 .largest = b.largest + g * side,
                                                 .sum = b.sum + g * side,
                                                 .rounded = nullptr};
          Softmax::template run<side>(params, group, 0, block.first, n, border);
          if (started) rescale(g, before);
          for (int64_t i = 0; i < dropped_count; i++)
            for (int64_t r = 0; r < count; r++) taken = taken && scores[dropped[i] * side + r] == 0.f;
          each_piece(block, [&](const DecodeRun& run, int64_t k, int64_t count_, int64_t done) {
            if constexpr (scaled) scale_weights<side>(scores + done * side, run.value_scale + k, count_);
          });
        }
        for (int64_t k = n; k < steps * depth; k++) store(scores + k * side, Vf::zero());
        pack_weights(scores, steps, b.weights + g * key_steps * Matrix::numbers);
        prefetch.step(of_softmax);
      }
      const MatrixLeft left{b.weights, key_steps * Matrix::numbers, 0};
      const MatrixRight right{b.value_z, key_steps * Matrix::pairs, 0};
      const MatrixSums sums{b.sums, tiles * Matrix::sums};
      const auto between = [&] { prefetch.step(of_values()); };
      if (started)
        Matrix::template multiply<true>(left, groups, right, tiles, steps, sums, between);
      else
        Matrix::template multiply<false>(left, groups, right, tiles, steps, sums, between);
      started = true;
    }
    template <class F>
    void each_piece(const DecodeBlock& block, const F& f) const {
      if constexpr (scaled) BlockWalk::pieces(runs, block, f);
    }
    // the sums of rows whose largest score is another now
    void rescale(int64_t g, const float* before) const {
      const float exponents = float(score_unit(params).exponents);
      for (int64_t r = 0; r < side; r++) {
        const float now = b.largest[g * side + r];
        if (now == before[r]) continue;
        const Vf factor = Vf::set(Softmax::exp2_of((before[r] - now) * exponents));
        for (int64_t d = 0; d < 2 * Dv; d++) {
          float* const x = b.sums + (g * 2 * Dv + d) * Matrix::sums + r * side;
          store(x, attnjourney::load(x) * factor);
        }
      }
    }
    // [key][16 rows] -> rows, with keys i and i + 16 of every 32 side by side
    static ATTN_NOINLINE void pack_weights(const float* P, int64_t steps, bf16* to) {
      for (int64_t s = 0; s < steps; s++, P += depth * side, to += Matrix::numbers) {
        Vf t[side];
        ATTN_UNROLL for (int i = 0; i < side; i++) {
          const Pairs pair = join_upper(raised_half(attnjourney::load(P + i * side)),
                                        raised_half(attnjourney::load(P + (i + side) * side)));
          t[i] = as_numbers(pair);
        }
        transpose(t);
        ATTN_UNROLL for (int i = 0; i < side; i++) store(reinterpret_cast<float*>(to + i * depth), t[i]);
      }
    }

    ATTN_NOINLINE void put(void* to) const {
      const typename Plain::Shape shape(params, rows.count);
      const typename Plain::Partial partial = buffers_in<typename Plain::Partial>(to, shape);
      for (int64_t r = 0; r < shape.groups * shape.rows; r++) {
        const bool there = r < rows.count;
        partial.largest[r] = there ? b.largest[r] : Softmax::lowest;
        partial.sum[r] = there ? b.sum[r] : 0;
        for (int64_t d = 0; d < shape.vd; d += depth)
          put_columns(partial.output + r * shape.vd + d, there, r, d, shape.vd);
      }
    }
    // 32 columns of a row from d on, as far as there are
    ATTN_INLINE void put_columns(float* to, bool there, int64_t r, int64_t d, int64_t columns) const {
      Vf first = Vf::zero(), second = Vf::zero();
      if (there) {
        const float* const sums = b.sums + (r / side * 2 * Dv + d / side) * Matrix::sums + r % side * side;
        first = attnjourney::load(sums), second = attnjourney::load(sums + Matrix::sums);
        if constexpr (!scaled) interleave(first, second);
      }
      store(to, first);
      if (d + side < columns) store(to + side, second);
    }
  };
};

}  // namespace
}  // namespace attnjourney

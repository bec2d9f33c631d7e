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
    Stored* nothing;       // a row of zeros
    bf16* key;             // a left side
    uint32_t* value;       // the right side of sums over keys
    bf16* weights;         // of each group, the left side of sums over keys
    float *scores, *bias;  // [group][key][16]; [key][16]
    float* sums;           // [group][tile of v_head_dim]
    float *largest, *sum;  // [group][16]
    Buffers(const DecodeParams& params, int64_t groups, Scratch& scratch) {
      const int64_t D = steps_of(params.head_dim), Dv = steps_of(params.v_head_dim);
      rows = scratch.take<bf16>(groups * side * D * depth);
      query = scratch.take<bf16>(groups * D * Matrix::numbers);
      query_t = scratch.take<uint32_t>(groups * D * Matrix::pairs);
      nothing = scratch.take<Stored>(max_of(params.head_dim, params.v_head_dim));
      key = scratch.take<bf16>(key_tiles * D * Matrix::numbers);
      value = scratch.take<uint32_t>(2 * Dv * key_steps * Matrix::pairs);
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
    // of the block
    const Stored *key_at[keys] = {}, *value_at[keys] = {};  // rows
    int64_t dropped[2 * keys] = {}, dropped_count = 0;

    bool run(int64_t n_runs, void* partial) {
      [[maybe_unused]] const Unit unit{};
      memset(static_cast<void*>(b.nothing), 0, sizeof(Stored) * size_t(max_of(params.head_dim, params.v_head_dim)));
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

    // 32 numbers of a row from x on, zeros beyond n; a NaN of bytes as some number, since its row is dropped
    static ATTN_INLINE Pairs numbers(const Stored* x, int64_t n) {
      if constexpr (sizeof(Stored) == 2)
        return n >= depth ? load_pairs(x) : load_pairs(x, n);
      else
        return join_upper(of_bytes(x, n), of_bytes(x + side, n - side));
    }
    static ATTN_INLINE Vf of_bytes(const Stored* x, int64_t n) {
      using Finite = typename WithoutNan<Stored>::type;
      if (n >= side) return attnjourney::load(reinterpret_cast<const Finite*>(x));
      Finite rest[side] = {};
      if (n > 0) memcpy(static_cast<void*>(rest), x, size_t(n));
      return attnjourney::load(rest);
    }
    // what is looked at for numbers out of range; bytes have none but NaNs, which `find` sees
    static ATTN_INLINE Pairs largest_of(Pairs seen, Pairs x) {
      if constexpr (sizeof(Stored) == 2)
        return largest_halves(seen, x);
      else
        return seen;
    }
    // the largest number of n rows, which become rows of a left side
    static ATTN_NOINLINE uint32_t pack_keys(const Stored* const* rows, int64_t n, int64_t dim, bf16* to,
                                            LinePrefetch& prefetch) {
      const int64_t steps = steps_of(dim);
      Pairs seen{};
      for (int64_t k = 0; k < n; k++) {
        prefetch.step(of_row);
        bf16* line = to + k / side * steps * Matrix::numbers + k % side * depth;
        const auto put = [&](int64_t d, int64_t count) __attribute__((always_inline)) {
          const Pairs x = numbers(rows[k] + d, count);
          seen = largest_of(seen, x);
          store_pairs(reinterpret_cast<uint32_t*>(line), x);
          line += Matrix::numbers;
        };
        int64_t d = 0;
        for (; d + depth <= dim; d += depth) put(d, depth);
        if (d < dim) put(d, dim - d);
      }
      return largest_of_halves(seen);
    }
    // row(k, s): numbers 32 s .. of row k of n; of every 32 columns a tile of those that lie first in their pairs, and
    // one of the others
    template <class Row>
    static ATTN_INLINE uint32_t pack_values(int64_t n, int64_t steps, uint32_t* to, const Row& row) {
      constexpr int64_t column = key_steps * Matrix::pairs;
      Pairs seen{};
      for (int64_t k = 0; k < n; k += depth, to += Matrix::pairs)
        for (int64_t s = 0; s < steps; s++) {
          uint32_t* const tile = to + 2 * s * column;
          for (int64_t i = 0; i < side; i++) {
            const Pairs a = row(k + i, s), z = row(k + i + side, s);
            seen = largest_of(largest_of(seen, a), z);
            store_pairs(tile + i * side, join_lower(a, z));
            store_pairs(tile + column + i * side, join_upper(as_numbers(a), as_numbers(z)));
          }
        }
      return largest_of_halves(seen);
    }
    ATTN_NOINLINE uint32_t pack_values(int64_t n) {
      return pack_values(n, Dv, b.value, [&](int64_t k, int64_t s) __attribute__((always_inline)) {
        return numbers(value_at[k] + s * depth, params.v_head_dim - s * depth);
      });
    }
    ATTN_NOINLINE void pack_values_of_keys(int64_t n) {
      pack_values(n, Dv, b.value, [&](int64_t k, int64_t s) __attribute__((always_inline)) {
        return load_pairs(b.key + (k / side * D + s) * Matrix::numbers + k % side * depth);
      });
    }
    // The rows of a block. Those with a NaN among bytes, or a number out of range, are taken as zeros, and nothing is
    // taken where a row of queries sees one.
    ATTN_NOINLINE void find(const DecodeBlock& block, bool inside) {
      BlockWalk::pieces(runs, block, [&](const DecodeRun& run, int64_t k, int64_t count, int64_t done) {
        const auto locate = [&](const void* all, int64_t row, int64_t dim, const Stored** to) {
          const Stored* const x = static_cast<const Stored*>(all) + k * row;
          for (int64_t i = 0; i < count; i++) to[done + i] = x + i * row;
          if constexpr (WithoutNan<Stored>::differs)
            if (any_nan(x, row, count, dim))
              for (int64_t i = done; i < done + count; i++)
                if (any_nan(to[i], 0, 1, dim)) drop(to, i);
        };
        locate(run.key, params.k_row, params.head_dim, key_at);
        if (!inside) locate(run.value, params.v_row, params.v_head_dim, value_at);
      });
      const int64_t used = steps_of(block.count) * depth;
      for (int64_t k = block.count; k < used; k++) key_at[k] = value_at[k] = b.nothing;
    }
    ATTN_INLINE void drop(const Stored** rows, int64_t k) {
      rows[k] = b.nothing;
      dropped[dropped_count++] = k;
    }
    // f(): as many rows packed, and their largest number
    template <class F>
    ATTN_INLINE void pack(const Stored** rows, int64_t n, int64_t dim, const F& f) {
      if (f() < float_bits(part_limit) >> 16) return;
      if constexpr (sizeof(Stored) == 2)
        for (int64_t k = 0; k < n; k++) each_row_out_of_range(rows[k], 0, 1, dim, [&](int64_t) { drop(rows, k); });
      f();
    }
    ATTN_NOINLINE void load(const DecodeBlock& block, bool inside, LinePrefetch& prefetch) {
      dropped_count = 0;
      find(block, inside);
      const int64_t n = steps_of(block.count) * depth;
      pack(key_at, n, params.head_dim, [&] { return pack_keys(key_at, n, params.head_dim, b.key, prefetch); });
      if (inside)
        pack_values_of_keys(n);
      else
        pack(value_at, n, params.v_head_dim, [&] { return pack_values(n); });
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
      const MatrixRight right{b.value, key_steps * Matrix::pairs, 0};
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

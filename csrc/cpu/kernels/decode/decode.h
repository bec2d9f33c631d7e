// Attention of a few query rows over many keys, as decoding with a cache needs it: bound by memory, so every key and
// every value is read once, in its stored dtype, for all rows that share its head.
// Bytes (Stored: i8 or e4m3) have a scale for each key and each value, by which scores and weights are multiplied: both
// products only widen bytes.
//
// A chunk of keys gives an unnormalised output, the largest score and the sum of exponentials per row; `merge` joins
// the chunks. Within a chunk, blocks of keys: scores as dot products with lanes over the head dimension (as many sums
// as registers allow are reduced together), then P V with lanes over the value dimension. Lines are prefetched for both
// products at an even pace (decode/line_prefetch.h).
#pragma once
#include "cpu/kernels/common/common.h"
#include "cpu/kernels/common/log_sum.h"
#include "cpu/kernels/common/scratch.h"
#include "decode/params.h"
#include "decode_bias.h"
#include "row_products.h"
#include "scales.h"
#include "softmax.h"

namespace attnjourney {
namespace {

// T: of queries and results. Stored: of keys and values.
template <class T, class ByPairs = NoPairs, class Stored = T>
struct Decode {
  using Products = RowProducts<Stored>;
  using Real = Compute<T>;
  using Softmax = DecodeSoftmax<Real, ByPairs>;
  using V = Vec<Real>;
  static constexpr int width = V::width;
  static constexpr int max_rows = Products::max_rows;
  // The tiled forward works on vectors of rows, and converts 16-bit keys once a head: below these it wastes more than
  // is lost here by reading queries and outputs again for every few keys (python -m benchmarks.run --case few, AVX2).
  static constexpr int lanes_of_rows = sizeof(T) == 4 ? width / 2 : width;
  static constexpr int64_t few_rows = lanes_of_rows < max_rows ? lanes_of_rows : max_rows;
  static constexpr Real lowest = Softmax::lowest;
  static constexpr bool scaled = sizeof(Stored) == 1;

  // rows of one pass, passes, and keys of one block
  struct Shape {
    int64_t rows, groups, keys, qd, vd;
    ATTN_INLINE Shape(const DecodeParams& params, int64_t count) {
      rows = rows_of_pass(count);
      groups = (count + rows - 1) / rows;
      // 16 KB of keys; where many passes read queries and outputs again for every block, what the second-level cache
      // holds
      const int64_t row = params.head_dim * int64_t(sizeof(Stored));
      keys = groups > 1 ? 64 : max_of(16, min_of(1024, 16384 / row / 16 * 16));
      const int64_t lanes = ByPairs::on ? ByPairs::lanes : width;
      qd = round_up(params.head_dim, lanes);
      vd = round_up(params.v_head_dim, lanes);
    }
    int64_t score_size() const { return keys * rows + Products::sums_at_once * 2; }
  };
  static ATTN_INLINE bool biased(const DecodeParams& params) { return params.mask != MaskKind::none || params.alibi; }

  struct Buffers {
    Real* query;   // [group][rows][qd], times the factor; with pairs as it lies in memory
    Real* scores;  // [group][score_size]: [key][rows], then the weights
    Real* before;  // [rows][vd]: the output of one group before a block
    Real* pairs;   // weights of one group as pairs, or none
    Real* bias;    // [key][rows], or null
    Buffers(const DecodeParams& params, const Shape& shape, Scratch& scratch)
        : query(scratch.take<Real>(shape.groups * shape.rows * shape.qd)),
          scores(scratch.take<Real>(shape.groups * shape.score_size())),
          before(scratch.take<Real>(shape.rows * shape.vd)),
          pairs(scratch.take<Real>(ByPairs::on ? shape.score_size() / 2 : 0)),
          bias(biased(params) ? scratch.take<Real>(shape.score_size()) : nullptr) {}
  };
  static int64_t space(const DecodeParams& params, int64_t count) {
    return scratch_bytes<Buffers>(params, Shape(params, count));
  }

  // One chunk's result.
  struct Partial {
    Real* output;   // [group][rows][vd]
    Real* largest;  // [group][rows]: scores
    Real* sum;      // ... of the exponentials
    Real* rounded;  // ... of the rounded weights; with pairs only
    Partial(const Shape& shape, Scratch& scratch) {
      const int64_t rows = shape.groups * shape.rows;
      output = scratch.take<Real>(rows * shape.vd);
      largest = scratch.take<Real>(rows);
      sum = scratch.take<Real>(rows);
      rounded = scratch.take<Real>(ByPairs::on ? rows : 0);
    }
  };
  static int64_t partial_size(const DecodeParams& params, int64_t count) {
    return scratch_bytes<Partial>(Shape(params, count));
  }

  // n a multiple of width
  static ATTN_INLINE bool finite(const Real* x, int64_t n) {
    V bad = V::zero();  // 0 x is 0 for a finite x, else NaN
    for (int64_t i = 0; i < n; i += width) bad = fma(load(x + i), V::zero(), bad);
    return finite_bits(bad);
  }

  static constexpr bool by_pairs(int64_t rows) { return ByPairs::on && rows == ByPairs::rows; }

  static ATTN_NOINLINE void copy_queries(const DecodeParams& params, const DecodeRows& rows, const Shape& shape,
                                         Real factor, Real* query) {
    T* const pairs = reinterpret_cast<T*>(query);
    const bool as_pairs = by_pairs(shape.rows);
    for (int64_t i = 0; i < shape.groups * shape.rows; i++) {
      int64_t d = 0;
      if (i < rows.count) {
        const int64_t at = rows.first + i;
        const T* const row =
            static_cast<const T*>(rows.query) + at / params.q_len * params.q_head + at % params.q_len * params.q_row;
        for (; d < params.head_dim; d++)
          if (as_pairs)
            pairs[i * shape.qd + d] = row[d];
          else
            query[i * shape.qd + d] = load_one(row + d) * factor;
      }
      for (; d < shape.qd; d++)
        if (as_pairs)
          pairs[i * shape.qd + d] = T{};
        else
          query[i * shape.qd + d] = Real(0);
    }
  }

  static LinePrefetch line_prefetch(const DecodeParams& params, const Shape& s, const DecodeRun* runs,
                                    const BlockWalk& walk) {
    constexpr int64_t size = sizeof(Stored);
    const Stored* const key = static_cast<const Stored*>(runs->key);
    const Stored* const value = static_cast<const Stored*>(runs->value);
    const bool inside =
        value >= key && value + params.v_head_dim <= key + params.head_dim && params.v_row == params.k_row;
    const int64_t key_bytes = params.head_dim * size, value_bytes = inside ? 0 : params.v_head_dim * size;
    const int64_t bytes = key_bytes + value_bytes, v_passes = s.rows > Products::pv_rows ? 2 : 1;
    const int64_t units =
        s.groups * max_of(1, params.head_dim / width + params.v_head_dim / width * v_passes);  // for one key
    LinePrefetch prefetch(runs, walk, key_bytes, params.k_row * size, value_bytes, params.v_row * size);
    // several passes: the next block while this one is worked on. One: few rows run ahead by themselves
    prefetch.start(bytes, units, s.groups > 1 ? s.keys * bytes : s.rows > 2 ? 16384 : 8192);
    return prefetch;
  }

  // rows against the keys of the runs; all of them lie within what any row may see
  static void chunk(const DecodeParams& params, const DecodeRows& rows, const DecodeRun* runs, int64_t n_runs,
                    void* partial_, void* space) {
    const Shape shape(params, rows.count);
    const int64_t R = shape.rows;
    const Buffers buffers = buffers_in<Buffers>(space, params, shape);
    const Partial partial = buffers_in<Partial>(partial_, shape);
    const int64_t all_rows = shape.groups * R, query_size = R * shape.qd, output_size = R * shape.vd;
    const Real factor = query_factor<Real>(params);
    copy_queries(params, rows, shape, factor, buffers.query);
    for (int64_t i = 0; i < all_rows; i++) {
      partial.largest[i] = lowest;
      partial.sum[i] = 0;
      if (ByPairs::on) partial.rounded[i] = 0;
    }
    memset(partial.output, 0, sizeof(Real) * size_t(all_rows * shape.vd));
    if (n_runs == 0) return;
    const VisibleKeys all = params.keys.all(0, params.q_len - 1);
    bool unseen[decode_row_block / max_rows];  // groups of which the mask hides every key of the block
    BlockWalk walk(runs, n_runs, shape.keys);
    LinePrefetch prefetch = line_prefetch(params, shape, runs, walk);
    const auto of_keys = [&](const DecodeRun& run, int64_t k) {
      return static_cast<const Stored*>(run.key) + k * params.k_row;
    };
    const auto of_values = [&](const DecodeRun& run, int64_t k) {
      return static_cast<const Stored*>(run.value) + k * params.v_row;
    };
    for (DecodeBlock block{0, 0, 0, 0}; walk.next(block);) {
      const int64_t n = block.count;
      const bool border = !all.one_holds(block.first, block.first + n);
      bool hides = border;
      if constexpr (scaled) prefetch_scales(runs, walk);
      for (int64_t g = 0; g < shape.groups; g++) {
        Real *const scores = buffers.scores + g * shape.score_size(), *const query = buffers.query + g * query_size;
        const int64_t row = rows.first + g * R, count = rows.count - g * R;
        MaskBlock mask = MaskBlock::all_visible;
        if (biased(params))
          with_pass(R, [&](auto r) {
            mask = DecodeBias<Real, r.count>::template block<T>(params, rows, row, count, block.first, n, buffers.bias);
          });
        unseen[g] = mask == MaskBlock::all_hidden;
        if (unseen[g]) continue;
        hides |= mask == MaskBlock::some_hidden;
        BlockWalk::pieces(runs, block, [&](const DecodeRun& run, int64_t k, int64_t count, int64_t done) {
          with_pass(R, [&](auto r) {
            if constexpr (by_pairs(r.count))
              ByPairs::scores(reinterpret_cast<const T*>(buffers.query) + g * query_size, shape.qd, of_keys(run, k),
                              params.k_row, params.head_dim, count, factor, scores + done * R, prefetch);
            else
              Products::template scores<r.count>(query, shape.qd, of_keys(run, k), params.k_row, params.head_dim, count,
                                                 scores + done * R, prefetch);
            if constexpr (scaled) scale_scores<r.count>(scores + done * R, run.key_scale + k, count);
          });
        });
        const typename Softmax::RowGroup group{.first = row,
                                               .count = count,
                                               .scores = scores,
                                               .bias = has_block(mask) ? buffers.bias : nullptr,
                                               .output = partial.output + g * output_size,
                                               .largest = partial.largest + g * R,
                                               .sum = partial.sum + g * R,
                                               .rounded = partial.rounded + g * R};
        with_pass(R, [&](auto r) { Softmax::template run<r.count>(params, group, shape.vd, block.first, n, border); });
      }
      for (int64_t g = 0; g < shape.groups; g++) {
        if (unseen[g]) continue;
        Real* const weights = buffers.scores + g * shape.score_size();
        Real* const output = partial.output + g * output_size;
        if constexpr (scaled)
          BlockWalk::pieces(runs, block, [&](const DecodeRun& run, int64_t k, int64_t count, int64_t done) {
            with_pass(R, [&](auto r) { scale_weights<r.count>(weights + done * R, run.value_scale + k, count); });
          });
        if (hides) memcpy(buffers.before, output, sizeof(Real) * size_t(output_size));
        BlockWalk::pieces(runs, block, [&](const DecodeRun& run, int64_t k, int64_t count, int64_t done) {
          with_pass(R, [&](auto r) {
            if constexpr (by_pairs(r.count))
              ByPairs::weighted_values(weights + done * R, count, of_values(run, k), params.v_row, params.v_head_dim,
                                       output, shape.vd, buffers.pairs, prefetch);
            else
              Products::template weighted_values<r.count>(weights + done * R, count, of_values(run, k), params.v_row,
                                                          params.v_head_dim, output, shape.vd, prefetch);
          });
        });
        if (hides && !finite(output, output_size)) {
          memcpy(output, buffers.before, sizeof(Real) * size_t(output_size));
          BlockWalk::pieces(runs, block, [&](const DecodeRun& run, int64_t k, int64_t count, int64_t done) {
            Products::weighted_values_guarded(weights + done * R, R, count, of_values(run, k), params.v_row,
                                              params.v_head_dim, output, shape.vd);
          });
        }
      }
    }
  }

  // partials of `chunks` chunks, partial_size apart, in the order of the keys -> out, lse, stats; the first one is
  // overwritten. False where the tiled forward does better: scores so large that derivatives, which add in another
  // order, do not find them again, and sums of values that are not finite, though their mean may be.
  static bool merge(const DecodeParams& params, const DecodeRows& rows, void* partials, int64_t chunks) {
    const Shape shape(params, rows.count);
    const bool rounds = by_pairs(shape.rows);
    const ScoreUnit unit = score_unit(params);
    const int64_t stride = partial_size(params, rows.count) / int64_t(sizeof(Real));
    const Partial first = buffers_in<Partial>(partials, shape);
    bool repeat = true;
    for (int64_t i = 0; i < rows.count; i++) {
      const Real *const largest = first.largest + i, *const sums = first.sum + i;
      const Real* const rounded = rounds ? first.rounded + i : sums;
      Real* const output = first.output + i * shape.vd;
      Real top = lowest, sum = 0, divisor = 0;
      for (int64_t c = 0; c < chunks; c++) top = largest[c * stride] > top ? largest[c * stride] : top;
      for (int64_t c = 0; c < chunks; c++) {
        const Real factor = Softmax::exp2_of((largest[c * stride] - top) * Real(unit.exponents));
        sum += factor * sums[c * stride];
        divisor += factor * rounded[c * stride];
        for (int64_t d = 0; d < shape.vd; d += width) {
          const V part = load(output + c * stride + d) * V::set(factor);
          store(output + d, c ? load(output + d) + part : part);
        }
      }
      const double sink = rows.sinks ? rows.sinks[(rows.first + i) / params.q_len] : -__builtin_inf();
      const auto sum_of = [&](Real x) {
        return sink == -__builtin_inf() ? row_sum(top, x, unit) : row_sum(sink, top, x, unit);
      };
      const Real inverse = sum_of(divisor).inverse;
      const RowSum<Real> all = sum_of(sum);
      const int64_t head = (rows.first + i) / params.q_len, row = (rows.first + i) % params.q_len;
      T* const out = static_cast<T*>(rows.out) + head * params.out_head + row * params.out_row;
      for (int64_t d = 0; d < params.v_head_dim; d++) store_one(out + d, output[d] * inverse);
      const int64_t at = head * params.lse_head + row;
      static_cast<Real*>(rows.lse)[at] = all.lse;
      if (rows.stats) static_cast<RowStats<Real>*>(rows.stats)[at] = all.stats;
      if (sum > Real(0)) repeat = repeat && scores_repeat(top, unit) && finite(output, shape.vd);
    }
    return repeat;
  }
};

}  // namespace
}  // namespace attnjourney

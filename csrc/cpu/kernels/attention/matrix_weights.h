// The weights of chosen rows on a matrix unit: by the scores that the forward had there.
#pragma once
#include "matrix_backward.h"

namespace attnjourney {
namespace {

template <class T, class Unit>
struct MatrixWeights {
  using B = MatrixBackward<T, Unit>;
  using S = TileStages<float>;
  using Matrix = typename B::Matrix;
  static constexpr int64_t tile = B::tile, key_block = B::key_block, group = B::group;
  static constexpr int width = B::width;

  struct Buffers {
    typename B::QueryTile queries{};
    float *P, *scores;  // [key_block][tile]; sums of a group of keys
    bf16 *key, *rows;   // left sides
    float* out;         // [width][key_block]: P, transposed
    Buffers(const AttentionParams& params, Scratch& scratch) {
      const int64_t numbers = B::parts * Matrix::numbers * B::key_dim(params);
      queries.query_t = scratch.take<uint32_t>(B::query_tiles * numbers / 2);
      S::take_rows(scratch, queries);
      P = scratch.take<float>(key_block * tile);
      scores = scratch.take<float>(group * tile);
      key = scratch.take<bf16>(B::key_tiles * numbers);
      rows = scratch.take<bf16>(B::query_tiles * numbers);
      out = scratch.take<float>(width * key_block);
    }
  };
  static int64_t space(const AttentionParams& params) { return scratch_bytes<Buffers>(params); }

  // As Weights::run; `plain` computes rows that the forward did not take.
  static void run(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t count, void* space,
                  decltype(AttentionKernels::weights) plain) {
    uint8_t others[tile] = {};
    bool any = false;
    const OtherRows add{others, any};
    on_unit(params, head, first, count, space, add);
    for (int64_t r = 0; any && r < count; r++) {
      if (!others[r]) continue;
      HeadPointers one = head;
      one.out = static_cast<T*>(head.out) + r * params.out_row;
      plain(params, one, first + r, 1, space);
    }
  }

 private:
  static void on_unit(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t count,
                      void* space, const OtherRows& others) {
    [[maybe_unused]] const Unit unit{};
    Buffers b = buffers_in<Buffers>(space, params);
    typename B::QueryTile& t = b.queries;
    T* const out = static_cast<T*>(head.out);
    const ScoreUnit score = score_unit(params);
    S::begin(params, head, first, count, t);
    const int64_t steps = B::key_dim(params), used = B::tiles_of(count),
                  part = B::query_tiles * steps * Matrix::numbers;
    const T* const q = static_cast<const T*>(head.query) + first * params.q_row;
    left_in_parts<typename B::Number>(q, params.q_row, count, params.head_dim, b.rows, used, part);
    each_row_out_of_range(q, params.q_row, count, params.head_dim, [&](int64_t r) { others.add(r); });
    for (int64_t r = 0; r < count; r++) {
      const RowStats<float> stats = row_stats<float>(head, first + r, score);
      if (!scores_repeat(stats.reference, score) || !(stats.inverse >= 0)) others.add(r);
      memset(out + r * params.out_row, 0, size_t(params.kv_len) * sizeof(T));
    }
    for (int p = 0; p < B::parts; p++) transpose_tiles(b.rows + p * part, used * steps, t.query_t + p * part / 2);

    KeyWalk walk(params, head, first, count, key_block);
    do {
      const int64_t k0 = walk.k0, block = walk.block;
      const T* const keys = static_cast<const T*>(head.key) + k0 * params.k_row;
      left_in_parts<typename B::Number>(keys, params.k_row, block, params.head_dim, b.key,
                                        (block + group - 1) / group * 2, B::key_part(params));
      each_row_out_of_range(keys, params.k_row, block, params.head_dim, [&](int64_t k) {
        zero_left_row(b.key, k, steps, B::parts, B::key_part(params));
        for (int64_t r = 0; r < count; r++)
          if (sees<T>(params, head, first + r, k0 + k)) others.add(r);
      });
      const auto product = [&](const auto& step, bool bias, const TileKeys& seen) {
        for (int64_t g = seen.begin / group * group; g < seen.end; g += group)
          B::group_product(params, t, b.key, t.query_t, steps, query_factor<float>(params), step, step, bias, k0,
                           within(seen, g, g + group), b.scores);
      };
      const TileKeys seen = S::template recompute_weights_by<T>(params, t, k0, block, b.P, nullptr, product).seen;
      if (seen.empty()) continue;
      const int64_t n = seen.end - seen.begin, ld = round_up(n, width);
      for (int64_t r = 0; r < count; r += width) {  // width rows at a time: [width][ld]
        const int64_t m = min_of(width, count - r);
        pack_transposed(b.P + seen.begin * tile + r, tile, n, m, Times<float>{1}, b.out, width, width, ld);
        unpack_rows<T>(b.out, ld, m, n, 1.f, out + r * params.out_row + k0 + seen.begin, params.out_row);
      }
    } while (walk.next());
  }
};

}  // namespace
}  // namespace attnjourney

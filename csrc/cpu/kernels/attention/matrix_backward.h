// Attention backward on a matrix unit: the tiles, steps and walk of attention/backward.h, with all five products of
// parts (common/parts.h). One part for bfloat16, whose weights are rounded as PyTorch rounds them; two for float16;
// three for float32, exact to 2^-26 of a product. Where the unit multiplies float16 numbers one for those, see
// `narrow`.
//
// S^T = K Q^T and dP^T = V dO^T: [key][query], a group of 32 keys at a time by way of memory. dV = P^T dO and
// dK = dS^T Q sum over queries, of which i and i + 16 of every 32 lie side by side; dQ^T = K^T dS sums over keys.
#pragma once
#include "cpu/dispatch.h"
#include "cpu/kernels/common/matrix_block.h"
#include "cpu/kernels/common/parts.h"
#include "gradient_step.h"
#include "visible.h"
#include "walk.h"

namespace attnjourney {
namespace {

template <class T, class Unit>
struct MatrixBackward : TileStages<float> {
  using S = TileStages<float>;
  using Number = typename Unit::Number;
  static constexpr int parts = part_count<T, Number>;
  // P and dS as float16 numbers: multiplied by powers of two that put the largest that may come at the end of their
  // range, which the sums undo. That of dS is a head's own, whatever its group.
  static constexpr bool narrow = __is_same(Number, f16);
  static constexpr float weight_factor = narrow ? 0x1p15f : 1.f;
  using Matrix = MatrixBlock<Unit, parts>;
  static constexpr int64_t side = Matrix::side, group = Matrix::depth;  // keys, and queries, of a step
  static constexpr int64_t key_block = Tuning::matrix_backward_keys;
  // tiles and steps of a query tile and of a key block
  static constexpr int64_t query_tiles = tile / side, query_steps = tile / group;
  static constexpr int64_t key_tiles = key_block / side, key_steps = key_block / group;
  static_assert(width == side && tile % group == 0 && key_block % group == 0);

  // head_dim in steps along the sum, and in tiles
  static int64_t key_dim(const AttentionParams& params) { return (params.head_dim + group - 1) / group; }
  static int64_t value_dim(const AttentionParams& params) { return (params.v_head_dim + group - 1) / group; }
  static int64_t tiles_of(int64_t dim) { return (dim + side - 1) / side; }

  struct QueryTile : QueryRows {
    uint32_t *query_t, *grad_t;  // right sides of sums over head_dim
    uint32_t *query_z, *grad_z;  // ... over queries
    float* grad_query;           // [tile of dim][tile of queries], sum of K^T dS
    float* minus_delta;          // [tile]
    float grad_factor = 1;       // of dS
  };
  static void take_tile(const AttentionParams& params, Scratch& scratch, QueryTile& queries) {
    const int64_t part = query_tiles * Matrix::pairs;
    queries.query_t = scratch.take<uint32_t>(parts * part * key_dim(params));
    queries.grad_t = scratch.take<uint32_t>(parts * part * value_dim(params));
    queries.query_z = scratch.take<uint32_t>(parts * part * key_dim(params));
    queries.grad_z = scratch.take<uint32_t>(parts * part * value_dim(params));
    queries.grad_query = scratch.take<float>(tiles_of(params.head_dim) * query_tiles * Matrix::sums);
    S::take_rows(scratch, queries);
    queries.minus_delta = scratch.take<float>(tile);
  }

  struct Buffers {
    int64_t chunk;  // tiles
    QueryTile tiles[Tuning::backward_max_tiles];
    float *P, *dS, *states;  // [group][tile], P [key_block][tile] beside masks; the last of the score modifier, or null
    float* scores;           // sums of a group of keys
    bf16 *weights, *grads;   // P and dS, left sides of sums over queries
    uint32_t* grad_pairs;    // dS, the right side of sums over keys
    bf16 *key, *value, *key_t;       // left sides of sums over head_dim, and over keys
    bf16* rows;                      // a left side, of queries, gradients and results
    uint32_t* pairs;                 // a right side of sums over keys
    float* query_sum;                // [tile][key_ld]
    float* row_sum;                  // [key_block][dim, padded to a line]
    float *grad_key, *grad_value;    // sums of each key block
    uint8_t *hurt_query, *hurt_key;  // [group][q_len], [kv_len]: see `Poison`
    float *of_head, *of_block;       // factors of dS: of each head, and in the sums of each key block; where `narrow`
    Buffers(const AttentionParams& params, Scratch& scratch)
        : chunk(S::template chunk_tiles<QueryTile>(params, take_tile)) {
      for (int64_t i = 0; i < chunk; i++) take_tile(params, scratch, tiles[i]);
      P = scratch.take<float>((whole_block(params) ? key_block : group) * tile);
      dS = scratch.take<float>(group * tile);
      states = params.modifier.on() ? scratch.take<float>(group * tile) : nullptr;
      scores = scratch.take<float>(group * tile);
      weights = scratch.take<bf16>(parts * key_block * tile);
      grads = scratch.take<bf16>(parts * key_block * tile);
      grad_pairs = scratch.take<uint32_t>(parts * key_block / 2 * tile);
      key = scratch.take<bf16>(parts * key_tiles * Matrix::numbers * key_dim(params));
      value = scratch.take<bf16>(parts * key_tiles * Matrix::numbers * value_dim(params));
      key_t = scratch.take<bf16>(parts * key_tiles * Matrix::numbers * key_dim(params));
      rows = scratch.take<bf16>(parts * query_tiles * Matrix::numbers * max_of(key_dim(params), value_dim(params)));
      pairs = scratch.take<uint32_t>(key_tiles * Matrix::pairs * key_dim(params));
      query_sum = scratch.take<float>(tile * key_ld(params));
      row_sum = scratch.take<float>(key_block * side * max_of(tiles_of(params.head_dim), tiles_of(params.v_head_dim)));
      const int64_t sum_tiles = tiles_of_keys(params);
      grad_key = scratch.take<float>(sum_tiles * tiles_of(params.head_dim) * Matrix::sums);
      grad_value = scratch.take<float>(sum_tiles * tiles_of(params.v_head_dim) * Matrix::sums);
      hurt_query = scratch.take<uint8_t>(params.group * params.q_len);
      hurt_key = scratch.take<uint8_t>(params.kv_len);
      of_head = scratch.take<float>(narrow ? params.group : 0);
      of_block = scratch.take<float>(narrow ? sum_tiles : 0);
    }
  };
  static int64_t space(const AttentionParams& params) { return scratch_bytes<Buffers>(params); }
  // Tiles of all key blocks, which are whole ones of 16 keys, and what the last group reaches past them, to which it
  // adds zeros.
  static int64_t tiles_of_keys(const AttentionParams& params) { return tiles_of(params.kv_len) + key_tiles + 2; }

  // P holds what is added to scores, of all keys of a block, before the weights of a group
  static bool whole_block(const AttentionParams& params) { return params.mask != MaskKind::none || params.alibi; }

  // ---- what a tile and a key block are packed into

  // rows of a left side marked by `dropped` as poison themselves, if it is not null -> 0
  static void drop_rows(const uint8_t* dropped, int64_t count, bf16* rows, int64_t steps, int64_t part) {
    for (int64_t i = 0; dropped && i < count; i++)
      if (dropped[i] == poison_itself) zero_left_row(rows, i, steps, parts, part);
  }
  // Rows of X as a left side in `rows`, and from there as both right sides
  static void pack_queries(const T* X, int64_t row, int64_t count, int64_t dim, const uint8_t* dropped, bf16* rows,
                           uint32_t* t, uint32_t* z) {
    const int64_t steps = (dim + group - 1) / group, used = (count + group - 1) / group * 2,
                  part = query_tiles * steps * Matrix::numbers;
    left_in_parts<Number>(X, row, count, dim, rows, used, part);
    drop_rows(dropped, count, rows, steps, part);
    for (int p = 0; p < parts; p++) {
      transpose_tiles(rows + p * part, used * steps, t + p * part / 2);
      zip_tiles(rows + p * part, used, steps, steps, z + p * part / 2, query_steps * Matrix::pairs);
    }
  }

  static ATTN_NOINLINE void prepare(const AttentionParams& params, const HeadPointers& head, int64_t first,
                                    int64_t count, QueryTile& queries, const Buffers& buffers, double* grad_sink,
                                    const uint8_t* dropped) {
    S::begin(params, head, first, count, queries);
    for (int64_t r = 0; dropped && r < count; r++)
      if (dropped[r]) queries.shift[r] = queries.inverse[r] = 0, queries.least[r] = least_exponent(0.f);
    pack_queries(static_cast<const T*>(head.query) + first * params.q_row, params.q_row, count, params.head_dim,
                 dropped, buffers.rows, queries.query_t, queries.query_z);
    pack_queries(static_cast<const T*>(head.grad_out) + first * params.grad_out_row, params.grad_out_row, count,
                 params.v_head_dim, dropped, buffers.rows, queries.grad_t, queries.grad_z);
    // delta by the products that dP is made of: a row whose weight is 1 for one key has a delta that is its dP to the
    // last bit
    const int64_t steps = value_dim(params), part = query_tiles * steps * Matrix::numbers;
    const T* const out = static_cast<const T*>(head.out) + first * params.out_row;
    left_in_parts<Number>(out, params.out_row, count, params.v_head_dim, buffers.rows, tiles_of(count), part);
    drop_rows(dropped, count, buffers.rows, steps, part);
    for (int64_t r0 = 0; r0 < tile; r0 += side) {
      alignas(64) float products[Matrix::sums];
      const int64_t at = r0 / side * steps;
      if (r0 < count)
        Matrix::template multiply<false>({buffers.rows + at * Matrix::numbers, 0, part}, 1,
                                         {queries.grad_t + at * Matrix::pairs, 0, part / 2}, 1, steps, {products, 0});
      for (int64_t r = r0; r < r0 + side; r++) {
        float delta = 0;
        if (r < count && queries.inverse[r] != 0) {  // else it sees no key
          delta = products[(r - r0) * (side + 1)];
          if (head.grad_lse) delta -= static_cast<const float*>(head.grad_lse)[first + r];
          if (grad_sink && head.sink != -__builtin_inf())
            *grad_sink -= S::sink_weight_of(params, queries, r) * double(delta);
        }
        queries.minus_delta[r] = -delta * (queries.grad_factor / weight_factor);
        queries.inverse[r] *= weight_factor;
      }
    }
    memset(queries.grad_query, 0, size_t(tiles_of(params.head_dim) * query_tiles * Matrix::sums) * sizeof(float));
  }

  static ATTN_NOINLINE void load_keys(const AttentionParams& params, const HeadPointers& head, int64_t k0,
                                      int64_t block, const Buffers& b, const uint8_t* dropped) {
    const int64_t used = (block + group - 1) / group * 2, steps = key_dim(params);
    left_in_parts<Number>(static_cast<const T*>(head.key) + k0 * params.k_row, params.k_row, block, params.head_dim,
                          b.key, used, key_part(params));
    left_in_parts<Number>(static_cast<const T*>(head.value) + k0 * params.v_row, params.v_row, block, params.v_head_dim,
                          b.value, used, value_part(params));
    drop_rows(dropped, block, b.key, steps, key_part(params));
    drop_rows(dropped, block, b.value, value_dim(params), value_part(params));
    for (int p = 0; p < parts; p++) {  // K^T: what is summed up lies side by side in the right side, too
      zip_tiles(b.key + p * key_part(params), used, steps, steps, b.pairs, key_steps * Matrix::pairs);
      transpose_tiles(b.pairs, 2 * steps * key_steps, b.key_t + p * key_part(params));
    }
  }
  // numbers of one part of a key block
  static int64_t key_part(const AttentionParams& params) { return key_tiles * Matrix::numbers * key_dim(params); }
  static int64_t value_part(const AttentionParams& params) { return key_tiles * Matrix::numbers * value_dim(params); }

  // ---- products with lanes over queries, a group of keys at a time

  struct GroupScores {
    const float* scores;  // [2][query_tiles] tiles
    int64_t first;        // the group's first key in the block
    Vf factor;
    template <Hidden H, int M, int N, class Step>
    ATTN_INLINE void finish_tile(const Step& step, int64_t lane, int64_t key, int64_t k) const {
      Tile<float, M, N> t;
      ATTN_UNROLL for (int r = 0; r < M; r++) {
        const int64_t row = k - first + r;
        const float* const x = scores + (row / side * query_tiles + lane / side) * Matrix::sums + row % side * side;
        ATTN_UNROLL for (int j = 0; j < N; j++) t.acc[r][j] = load(x + j * Matrix::sums) * factor;
      }
      step.template finish<H>(t, lane, key, k);
    }
    // m keys from k on against n vectors from `lane` on
    template <Hidden H, class Step>
    ATTN_INLINE void finish(const Step& step, int64_t lane, int64_t n, int64_t m, int64_t key, int64_t k) const {
      if (m == S::rows && n == vectors) return whole<H>(step, lane, key, k);
      some<H>(step, lane, n, m, key, k);
    }
    template <Hidden H, class Step>
    ATTN_NOINLINE void whole(const Step& step, int64_t lane, int64_t key, int64_t k) const {
      finish_tile<H, S::rows, vectors>(step, lane, key, k);
    }
    template <Hidden H, class Step>
    ATTN_NOINLINE void some(const Step& step, int64_t lane, int64_t n, int64_t m, int64_t key, int64_t k) const {
      for (int64_t r = 0; r < m; r++)
        with_rows<vectors>(n, [&](auto n_) { finish_tile<H, 1, n_.count>(step, lane, key + r, k + r); });
    }
  };

  // X Y for the keys `seen` of one group, X a left side of the block, Y a right one of the tile; see TileStages
  template <class Careful, class Step>
  static ATTN_INLINE void group_product(const AttentionParams& params, const QueryTile& queries, const bf16* X,
                                        const uint32_t* Y, int64_t steps, float factor, const Careful& careful,
                                        const Step& step, bool bias, int64_t k0, const TileKeys& seen, float* scores) {
    const int64_t g = seen.begin / group * group;
    const bool whole = seen.all_begin == seen.begin && seen.all_end == seen.end;
    SeenLanes lanes{0, queries.vectors_used, whole};
    if (!whole)
      lanes = seen_lanes<width>(params.keys, queries.first, queries.count, k0 + seen.begin, seen.end - seen.begin);
    const int64_t row = steps * Matrix::numbers, column = steps * Matrix::pairs;
    if (lanes.begin < lanes.end)
      Matrix::template multiply<false>(
          {X + g / side * row, row, key_tiles * row}, 2, {Y + lanes.begin * column, column, query_tiles * column},
          lanes.end - lanes.begin, steps, {scores + lanes.begin * Matrix::sums, query_tiles * Matrix::sums});
    const GroupScores sums{scores, g, Vf::set(factor)};
    const auto border = [&](int64_t from, int64_t to) {
      S::border(
          params, queries, k0, from, to, [&](int64_t at) { careful.clear(at); },
          [&](int64_t k, int64_t m, int64_t q, int64_t v, int64_t n) {
            const int64_t lane = q * panel + v * width;
            if constexpr (!Careful::hides)
              sums.template finish<Hidden::no>(careful, lane, n, m, k0 + k, k);
            else if (bias)
              sums.template finish<Hidden::by_bias>(careful, lane, n, m, k0 + k, k);
            else
              sums.template finish<Hidden::by_range>(careful, lane, n, m, k0 + k, k);
          });
    };
    const auto inner = [&](const auto& of_inner, auto hidden) {
      for (int64_t k = seen.all_begin; k < seen.all_end; k += S::rows) {
        for (int64_t v = 0; v < queries.vectors_used; v += vectors)
          sums.template finish<hidden.value>(of_inner, v * width, min_of(vectors, queries.vectors_used - v),
                                             min_of(S::rows, seen.all_end - k), k0 + k, k);
        if (queries.prefetch) queries.prefetch->step();
      }
    };
    border(seen.begin, seen.all_begin);
    if constexpr (Step::hides) {
      if (bias)
        inner(careful, HiddenIs<Hidden::by_bias>{});
      else
        inner(step, HiddenIs<Hidden::no>{});
    } else {
      inner(step, HiddenIs<Hidden::no>{});
    }
    border(seen.all_end, seen.end);
  }

  // ---- sums over queries and over keys

  // P or dS of the keys `seen` of one group as left and, if `pairs` is not null, right side of sums
  static ATTN_INLINE void in_parts(const float* X, const QueryTile& queries, const TileKeys& seen, bf16* rows,
                                   uint32_t* pairs) {
    const int64_t g = seen.begin / group;
    weights_in_parts<Number, parts>(X, tile, g, seen.begin, seen.end, queries.vectors_used,
                                    rows + 2 * g * query_steps * Matrix::numbers, query_steps * Matrix::numbers,
                                    pairs ? pairs + g * Matrix::pairs : nullptr, key_steps * Matrix::pairs,
                                    key_block * tile);
  }

  // out[key] += sum over the tile's queries of X[key][q] right[q]
  static ATTN_INLINE void sum_over_queries(const AttentionParams& params, const QueryTile& queries, const bf16* X,
                                           const uint32_t* right, int64_t dim, int64_t k0, const TileKeys& seen,
                                           float* out) {
    constexpr int64_t row = query_steps * Matrix::numbers, column = query_steps * Matrix::pairs;
    const int64_t columns = tiles_of(dim), dim_steps = (dim + group - 1) / group;
    for (int64_t g = seen.begin / group * group; g < seen.end; g += group) {
      const int64_t begin = max_of(g, seen.begin), end = min_of(g + group, seen.end);
      const KeyRange r = params.keys.rows(k0 + begin, k0 + end - 1, params.q_len);
      const int64_t from = max_of(0, r.begin - queries.first) / group;
      const int64_t to = (min_of(queries.count, r.end - queries.first) + group - 1) / group;
      if (queries.prefetch) queries.prefetch->step();
      if (from < to)
        Matrix::template multiply<true>({X + g / side * row + from * Matrix::numbers, row, key_tiles * row}, 2,
                                        {right + from * Matrix::pairs, column, 2 * dim_steps * column}, columns,
                                        to - from, {out + g / side * columns * Matrix::sums, columns * Matrix::sums});
    }
  }
  // dQ^T[d][query] += sum over the keys seen of K[key][d] dS[key][query]
  static ATTN_INLINE void sum_over_keys(const AttentionParams& params, const QueryTile& queries, const Buffers& b,
                                        int64_t k0, const TileKeys& seen, int64_t block) {
    constexpr int64_t row = key_steps * Matrix::numbers, column = key_steps * Matrix::pairs;
    for (int64_t v = 0; v < queries.vectors_used; v += 2) {
      const int64_t last = min_of(queries.count, (v + 2) * width) - 1;
      const TileKeys mine = tile_keys(params.keys, queries.first + v * width, queries.first + last, k0, block);
      const int64_t from = max_of(mine.begin, seen.begin) / group;
      const int64_t to = (min_of(mine.end, seen.end) + group - 1) / group;
      if (from < to)
        Matrix::template multiply<true>(
            {b.key_t + from * Matrix::numbers, row, key_part(params)}, tiles_of(params.head_dim),
            {b.grad_pairs + v * column + from * Matrix::pairs, column, query_tiles * column},
            min_of(2, queries.vectors_used - v), to - from,
            {queries.grad_query + v * Matrix::sums, query_tiles * Matrix::sums});
    }
  }

  static ATTN_NOINLINE void multiply_group(const QueryTile& queries, const TileKeys& seen, float factor, float* X) {
    for (int64_t k = seen.begin; k < seen.end; k++)
      for (int64_t i = 0; i < queries.vectors_used * width; i += width)
        store(X + k * tile + i, load(X + k * tile + i) * Vf::set(factor));
  }

  // One query tile against one key block: a group of keys from scores to the sums' left and right sides, then the sums.
  template <bool DropoutOn>
  static void tile_step(const AttentionParams& params, const QueryTile& queries, const Wanted& wanted, const Buffers& b,
                        int64_t k0, int64_t block, float* grad_key, float* grad_value) {
    const bool through_scores = wanted.key || wanted.query;
    const auto of_group = [&](typename S::ScoreStep score, bool bias, int64_t g, const TileKeys& mine) {
      float *const P = whole_block(params) ? b.P : b.P - g * tile, *const dS = b.dS - g * tile;
      float* const states = wanted.scores() && b.states ? b.states - g * tile : nullptr;
      score.P = P;
      score.states = states;
      group_product(params, queries, b.key, queries.query_t, key_dim(params), query_factor<float>(params), score, score,
                    bias, k0, mine, b.scores);
      if (DropoutOn) S::drop(params, queries, k0, mine, wanted.scores(), P);
      if (wanted.scores()) {
        const GradientStep<float, tile, DropoutOn, true> careful{queries.minus_delta, P, dS};
        const GradientStep<float, tile, DropoutOn, false> step{queries.minus_delta, P, dS};
        const auto product = [&](const auto& of_inner) {
          group_product(params, queries, b.value, queries.grad_t, value_dim(params),
                        float(params.dropout.keep_scale) * (queries.grad_factor / weight_factor), careful, of_inner,
                        false, k0, mine, b.scores);
        };
        bias ? product(careful) : product(step);
      }
      if (wanted.value) in_parts(P, queries, mine, b.weights, nullptr);
      const bool as_it_is = narrow && (wanted.slope || wanted.mask);
      if (as_it_is) multiply_group(queries, mine, 1 / queries.grad_factor, dS);
      if (wanted.slope) *wanted.slope += S::slope_gradient(params, queries, dS, k0, mine);
      if (wanted.mask) S::template mask_gradient<T>(queries, wanted, dS, k0, mine, b.scores);
      if (as_it_is) multiply_group(queries, mine, queries.grad_factor, dS);
      if (states && through_scores)
        through_modifier<tile>(Modifier<float>(params), queries.vectors_used, states, mine, dS);
      if (through_scores) in_parts(dS, queries, mine, b.grads, wanted.query ? b.grad_pairs : nullptr);
    };
    const typename S::TileWeights all =
        S::template recompute_weights_by<T>(params, queries, k0, block, b.P, nullptr,
                                            [&](const typename S::ScoreStep& score, bool bias, const TileKeys& seen) {
                                              for (int64_t g = seen.begin / group * group; g < seen.end; g += group)
                                                of_group(score, bias, g, within(seen, g, g + group));
                                            });
    const TileKeys& seen = all.seen;
    if (seen.empty()) return;
    if (wanted.value)
      sum_over_queries(params, queries, b.weights, queries.grad_z, params.v_head_dim, k0, seen, grad_value);
    if (wanted.key) sum_over_queries(params, queries, b.grads, queries.query_z, params.head_dim, k0, seen, grad_key);
    if (wanted.query) sum_over_keys(params, queries, b, k0, seen, block);
  }

  struct Kernel {  // see attention/walk.h
    const Walk& walk;
    Buffers buffers;
    int64_t chunk = buffers.chunk, used = 0;  // tiles
    int64_t block_tiles = 0;                  // tiles of keys of a block
    [[no_unique_address]] const Unit unit{};  // from here on the unit's registers have their shape

    bool poisoned = false, hurt = false;  // see `Poison`

    Kernel(const Walk& walk_, void* space) : walk(walk_), buffers(buffers_in<Buffers>(space, walk_.params)) {}
    const uint8_t* kept_queries(int64_t head, int64_t row) const { return hurt ? query_marks(head, row) : nullptr; }
    const uint8_t* kept_keys(int64_t key) const { return hurt ? buffers.hurt_key + key : nullptr; }
    const uint8_t* query_marks(int64_t head, int64_t row) const {
      return buffers.hurt_query + head * walk.params.q_len + row;
    }
    static int64_t key_step(const AttentionParams& params) {
      return params.block_size ? block_step(params.block_size, key_block) : key_block;
    }
    void clear(int64_t step) {
      block_tiles = tiles_of(step);
      const int64_t tiles = (walk.params.kv_len + step - 1) / step * block_tiles + 1;
      memset(buffers.grad_key, 0, size_t(tiles * tiles_of(walk.params.head_dim) * Matrix::sums) * sizeof(float));
      memset(buffers.grad_value, 0, size_t(tiles * tiles_of(walk.params.v_head_dim) * Matrix::sums) * sizeof(float));
      if constexpr (narrow) find_factors();
    }
    void prepare(int64_t i, int64_t head, int64_t first, int64_t count) {
      used = i + 1;
      if constexpr (narrow) buffers.tiles[i].grad_factor = buffers.of_head[head];
      MatrixBackward::prepare(walk.params, walk.heads[head], first, count, buffers.tiles[i], buffers,
                              walk.part == 0 && !hurt ? walk.gradients[head].sink : nullptr,
                              poisoned ? query_marks(head, first) : nullptr);
    }
    void load(int64_t k0, int64_t block) {
      load_keys(walk.params, walk.heads[0], k0, block, buffers, poisoned ? buffers.hurt_key + k0 : nullptr);
    }
    void step(int64_t i, Wanted wanted, int64_t index, int64_t k0, int64_t block) {
      if (hurt) wanted.mask = nullptr, wanted.slope = nullptr;  // they are there
      RowPrefetch prefetch;
      if constexpr (narrow) take_factor(index, buffers.tiles[i].grad_factor);
      prefetch_masks<T>(walk.params, buffers.tiles, i, used, wanted, k0, block, key_block, prefetch);
      const auto go = walk.params.dropout.on() ? tile_step<true> : tile_step<false>;
      go(walk.params, buffers.tiles[i], wanted, buffers, k0, block,
         sums_of_block(buffers.grad_key, index, walk.params.head_dim),
         sums_of_block(buffers.grad_value, index, walk.params.v_head_dim));
      buffers.tiles[i].prefetch = nullptr;
    }
    float* sums_of_block(float* sums, int64_t index, int64_t dim) const {
      return sums + index * block_tiles * tiles_of(dim) * Matrix::sums;
    }
    // |dS| <= |dP| + |delta|, which the lengths of rows of dO and V bound, as delta is a mean of dP. In steps of 2^8,
    // so that it is the same beside most other numbers.
    ATTN_NOINLINE void find_factors() const {
      const AttentionParams& params = walk.params;
      const auto largest_square = [](const void* X, int64_t row, int64_t n, int64_t dim) {  // of rows that are finite
        float largest = 0;
        for (int64_t i = 0; i < n; i++) {
          const T* const x = static_cast<const T*>(X) + i * row;
          const float square = S::dot(x, x, dim);
          if (square - square == 0 && square > largest) largest = square;
        }
        return double(largest);
      };
      const double value = largest_square(walk.heads[0].value, params.v_row, params.keys.key_length, params.v_head_dim);
      for (int64_t h = 0; h < params.group; h++) {
        const HeadPointers& head = walk.heads[h];
        const float* const of_lse = static_cast<const float*>(head.grad_lse);
        float grad_lse = 0;
        for (int64_t r = 0; of_lse && r < params.q_len; r++) {
          const float size = of_lse[r] < 0 ? -of_lse[r] : of_lse[r];
          if (size - size == 0 && size > grad_lse) grad_lse = size;
        }
        const double grad_out = largest_square(head.grad_out, params.grad_out_row, params.q_len, params.v_head_dim);
        const double most = 2.01 * params.dropout.keep_scale * __builtin_sqrt(grad_out * value) + grad_lse;
        float& factor = buffers.of_head[h];
        for (factor = 0x1p31f; double(factor) * most > 0x1p15 && factor > 0x1p-97f;) factor *= 0x1p-8f;
      }
      for (int64_t i = 0; i < tiles_of_keys(params); i++) buffers.of_block[i] = 1;
    }
    // the sums dK of a key block, with the factor of the head that is to be added to them
    void take_factor(int64_t index, float factor) const {
      float& now = buffers.of_block[index];
      if (now == factor) return;
      float* const sums = sums_of_block(buffers.grad_key, index, walk.params.head_dim);
      const Vf change = Vf::set(factor / now);
      for (int64_t i = 0; i < block_tiles * tiles_of(walk.params.head_dim) * Matrix::sums; i += width)
        store(sums + i, attnjourney::load(sums + i) * change);
      now = factor;
    }
    const float* query_sum(int64_t i) const {
      const QueryTile& queries = buffers.tiles[i];
      const int64_t ld = key_ld(walk.params);
      const Vf factor = Vf::set(1 / buffers.tiles[i].grad_factor);
      for (int64_t d = 0; d < tiles_of(walk.params.head_dim); d++)
        for (int64_t q = 0; q < queries.vectors_used; q++) {
          Vf t[side];
          const float* const from = queries.grad_query + (d * query_tiles + q) * Matrix::sums;
          ATTN_UNROLL for (int r = 0; r < side; r++) t[r] = attnjourney::load(from + r * side) * factor;
          transpose(t);
          ATTN_UNROLL for (int r = 0; r < side; r++) store(buffers.query_sum + (q * side + r) * ld + d * side, t[r]);
        }
      return buffers.query_sum;
    }
    const float* key_sum(int64_t index, int64_t, int64_t n) const {
      return rows_of(sums_of_block(buffers.grad_key, index, walk.params.head_dim), tiles_of(walk.params.head_dim), n,
                     narrow ? 1 / buffers.of_block[index] : 1.f);
    }
    const float* value_sum(int64_t index, int64_t, int64_t n) const {
      return rows_of(sums_of_block(buffers.grad_value, index, walk.params.v_head_dim), tiles_of(walk.params.v_head_dim),
                     n, 1 / weight_factor);
    }
    const float* rows_of(const float* sums, int64_t columns, int64_t n, float factor) const {
      for (int64_t k = 0; k < n; k++)
        for (int64_t d = 0; d < columns; d++)
          store(buffers.row_sum + (k * columns + d) * side,
                attnjourney::load(sums + (k / side * columns + d) * Matrix::sums + k % side * side) * Vf::set(factor));
      return buffers.row_sum;
    }
  };

  // ---- rows that it does not take: numbers out of range, and scores so large that their last bits matter

  // none: all is taken. hidden: such rows reach nothing. seen: they reach gradients, which are another kernel's.
  enum class Poison { none, hidden, seen };
  static constexpr uint8_t poison_itself = 1, reached = 2;  // marks

  // Marks hurt_query and hurt_key, unless there is none: rows to be taken as zeros, and rows of gradients that stay. A
  // row is hurt that sees a key and is not taken itself or by its results, and with it every key that it sees; a key
  // that is not taken hurts every row that sees it.
  static ATTN_NOINLINE Poison look(const Walk& walk, const Buffers& b) {
    const AttentionParams& params = walk.params;
    const HeadPointers& first = walk.heads[0];
    const int64_t keys = params.keys.key_length, rows = params.q_len;
    const ScoreUnit unit = score_unit(params);
    memset(b.hurt_query, 0, size_t(params.group * rows));
    memset(b.hurt_key, 0, size_t(params.kv_len));
    bool poisoned = false;
    const auto mark = [&](uint8_t* marks, const void* X, int64_t row, int64_t n, int64_t dim) {
      each_row_out_of_range(static_cast<const T*>(X), row, n, dim,
                            [&](int64_t i) { marks[i] = poison_itself, poisoned = true; });
    };
    mark(b.hurt_key, first.key, params.k_row, keys, params.head_dim);
    mark(b.hurt_key, first.value, params.v_row, keys, params.v_head_dim);
    for (int64_t h = 0; h < params.group; h++) {
      const HeadPointers& head = walk.heads[h];
      uint8_t* const marks = b.hurt_query + h * rows;
      mark(marks, head.query, params.q_row, rows, params.head_dim);
      mark(marks, head.grad_out, params.grad_out_row, rows, params.v_head_dim);
      mark(marks, head.out, params.out_row, rows, params.v_head_dim);
      for (int64_t r = 0; r < rows; r++) {
        const RowStats<float> stats = row_stats<float>(head, r, unit);
        const float* const grad_lse = static_cast<const float*>(head.grad_lse);
        const float more = grad_lse ? grad_lse[r] : 0, reference = stats.reference;
        if (!(stats.inverse >= 0) || reference - reference != 0 || more - more != 0 || !scores_repeat(reference, unit))
          marks[r] = poison_itself, poisoned = true;
      }
    }
    if (!poisoned) return Poison::none;
    return spread(walk, b) ? Poison::seen : Poison::hidden;
  }
  // whom poison reaches; true if anyone
  static ATTN_NOINLINE bool spread(const Walk& walk, const Buffers& b) {
    const AttentionParams& params = walk.params;
    const int64_t rows = params.q_len;
    const ScoreUnit unit = score_unit(params);
    bool any = false;
    for (int64_t h = 0; h < params.group; h++) {
      const HeadPointers& head = walk.heads[h];
      const auto empty = [&](int64_t r) { return row_stats<float>(head, r, unit).inverse == 0; };
      for (int64_t k = 0; k < params.keys.key_length; k++)
        for (int64_t r = 0; b.hurt_key[k] == poison_itself && r < rows; r++)
          if (!b.hurt_query[h * rows + r] && !empty(r) && sees<T>(params, head, r, k))
            b.hurt_query[h * rows + r] = poison_itself;
    }
    for (int64_t h = 0; h < params.group; h++) {
      const HeadPointers& head = walk.heads[h];
      for (int64_t r = 0; r < rows; r++) {
        if (!b.hurt_query[h * rows + r] || row_stats<float>(head, r, unit).inverse == 0) continue;
        any = true;
        for (int64_t k = 0; k < params.keys.key_length; k++)
          if (!b.hurt_key[k] && sees<T>(params, head, r, k)) b.hurt_key[k] = reached;
      }
    }
    return any;
  }

  // `plain` computes what poison reaches: all gradients, of which those that it does not reach are then written anew.
  static void run(const AttentionParams& params, const HeadPointers* heads, const HeadGradients* gradients,
                  int64_t part, int64_t parts_of_head, void* partial, void* space,
                  decltype(AttentionKernels::backward) plain) {
    const Walk walk{params, heads, gradients, part, parts_of_head, partial};
    const Buffers buffers = buffers_in<Buffers>(space, params);
    const Poison poison = look(walk, buffers);
    if (poison == Poison::seen) {
      plain(params, heads, gradients, part, parts_of_head, partial, space);
      look(walk, buffers);  // the marks lay in the same memory
    }
    Kernel kernel(walk, space);
    kernel.poisoned = poison != Poison::none;
    kernel.hurt = poison == Poison::seen;
    walk_keys<T>(walk, kernel);
  }
};

}  // namespace
}  // namespace attnjourney

// Attention's jvp in bfloat16 with products of pairs: the formulas of attention/jvp.h on the tiles of
// attention/pair_tiles.h.
//
// P and P A are rounded to bfloat16 for their products with dV and V. d(lse) comes from the numbers before that: exp2
// is the exact one, and sums over keys keep what rounding takes, a group of keys at a time. What d(out) subtracts is
// the sum of the rounded P A, so that the share of V that all keys have in common cancels.
#pragma once
#include "pair_stream.h"
#include "tangent_stages.h"

namespace attnjourney {
namespace {

// The weights from lse, the tangents of the scores, their products, and sums of both over the keys.
struct JvpWork : DotWork {
  static constexpr int W = Vf::width, most = 3;
  static constexpr int64_t tile = DotTiles::tile;
  static constexpr bool matrix = false, softens = true;
  struct Sums {  // of a query tile
    float minus_lse[tile], minus_lse_low[tile];
    float mu[tile], mu_low[tile], total[tile], total_low[tile];  // sums of P A and of P, and what rounding took
    float rounded[tile];                                         // sum of the rounded P A
  };
  DotProduct terms[most];  // of A, then that of S
  int count;
  bool moves;                 // there is an A
  uint32_t *P, *PA;           // [key / 2][tile]
  const float *bias, *added;  // [key][tile]: what is added to S; its tangent, or null
  Sums* sums;
  Vf scale, change, factor;  // of S in log2 units, with softcap 1; of A; query_factor

  ATTN_INLINE void clear(int64_t at) const {
    store_pairs(P + at, Pairs{});
    store_pairs(PA + at, Pairs{});
  }
  // One more term of a long sum (Knuth's sum of two).
  static ATTN_INLINE void add_term(Vf x, float* sum_at, float* low_at) {
    const Vf sum = load(sum_at), next = sum + x, part = next - sum;
    store(low_at, load(low_at) + ((sum - (next - part)) + (x - part)));
    store(sum_at, next);
  }
  struct Queries {};
  static constexpr Queries* queries = nullptr;
  struct Cursor {
    int64_t lane;
    ATTN_INLINE void next_vector() { lane += W; }
    ATTN_INLINE void next_keys(int n) { lane -= n * W; }
  };
  ATTN_INLINE Cursor cursor(int64_t lane, int64_t, Queries*) const { return {lane}; }
  template <Hidden H>
  ATTN_INLINE void weigh(const Pending& w, const Vf (&scores)[2], const Cursor& cursor) const {
    constexpr bool guard = H == Hidden::by_range || H == Hidden::by_bias;
    const int64_t lane = cursor.lane, at = w.key / 2 * tile + lane;
    const Vf lse = load(sums->minus_lse + lane), low = load(sums->minus_lse_low + lane), zero = Vf::zero();
    Vf p[2] = {zero, zero}, pa[2] = {zero, zero};
    ATTN_UNROLL for (int r = 0; r < 2; r++) {
      if (guard && w.key + r >= w.end) break;  // a last single key is paired with weight 0
      const Vf x = scores[r];
      if constexpr (H == Hidden::by_bias || H == Hidden::by_sum) {
        const Vf b = load(bias + (w.key + r) * tile + lane);
        p[r] = exp2((fma(x, scale, b) + lse) + low);
        if constexpr (H == Hidden::by_bias) p[r] = select(eq(b, Vf::set(-__builtin_inff())), zero, p[r]);
      } else if (H == Hidden::by_alibi || (H == Hidden::by_range && alibi.on)) {
        p[r] = exp2((alibi.add(x * scale, alibi.distance(Vf::iota(), lane, w.key + r)) + lse) + low);
      } else {
        p[r] = exp2(fma(x, scale, lse) + low);
      }
      if constexpr (H == Hidden::by_range) {
        const auto range = lane_range<float>(*keys, first_row + lane, k0 + w.key + r);
        p[r] = select(range.visible(Vf::iota()), p[r], zero);
      }
      if (!moves) continue;
      Vf a = load(w.a + r * W) * change;
      if (added) a = a + load(added + (w.key + r) * tile + lane);
      pa[r] = p[r] * a;
      if constexpr (guard) pa[r] = select(eq(p[r], zero), zero, pa[r]);  // a hidden NaN stays hidden
    }
    store_pairs(P + at, round_pairs(p[0], p[1]));
    if (!moves) return;
    const Pairs rounded = round_pairs(pa[0], pa[1]);
    store_pairs(PA + at, rounded);
    store(sums->rounded + lane, add_pairs(load(sums->rounded + lane), rounded));
    float* group = w.sums + 2 * W * w.vector;
    Vf mu = pa[0] + pa[1], total = p[0] + p[1];
    if (w.key > w.begin) mu = mu + load(group), total = total + load(group + W);
    if (w.key + 2 < w.end) {
      store(group, mu);
      store(group + W, total);
    } else {
      add_term(mu, sums->mu + lane, sums->mu_low + lane);
      add_term(total, sums->total + lane, sums->total_low + lane);
    }
  }
  // x, S before any softcap -> S, and a by the derivative
  ATTN_NOINLINE void soften(float* x, float* a, int n) const {
    alignas(64) float tanh[DotTiles::rows * DotTiles::vectors * W];
    for (int i = 0; i < n; i++) store(x + i * W, load(x + i * W) * factor);
    cap_scores(x, n, cap, tanh);
    for (int i = 0; i < n; i++) store(a + i * W, load(a + i * W) * cap_slope(load(tanh + i * W)));
  }
};

struct JvpDot : DotTiles {
  using Sums = JvpWork::Sums;
  static constexpr int64_t key_block = Tuning::dot_jvp_keys;

  // scratch, in bytes
  struct Space {
    int64_t ldk, ldv, pairs, tile_bytes, tiles, rows16, P, PA, bias, added, key, key_tangent, value, value_tangent,
        total;
    Space(const AttentionParams& p, int64_t rows_used) {
      const int64_t t = (rows_used + tile - 1) / tile;
      pairs = round_up(p.head_dim, 2) / 2;
      ldk = round_up(p.head_dim, 32);
      ldv = round_up(p.v_head_dim, W);
      tile_bytes = round_up(int64_t(sizeof(Sums)), 64) + tile * (2 * pairs + ldv) * 4;
      tiles = 0;
      rows16 = tiles + t * tile_bytes;
      P = rows16 + tile * ldk * 2;
      PA = P + key_block / 2 * tile * 4;
      bias = PA + key_block / 2 * tile * 4;
      added = bias + (p.mask == MaskKind::none && !p.alibi ? 0 : key_block * tile * 4);
      key = added + key_block * tile * 4;
      key_tangent = key + key_block * ldk * 2;
      value = key_tangent + key_block * ldk * 2;
      value_tangent = value + key_block / 2 * ldv * 4;
      total = value_tangent + key_block / 2 * ldv * 4;
    }
  };
  struct QueryTile {
    Sums* sums;
    uint32_t *query, *tangent;  // panels [pairs][panel]
    float* O;                   // [tile][ldv]
    bool started;
  };

  static void pack_query(const void* X, int64_t ld, int64_t first, int64_t n, int64_t dim, const Space& at,
                         bf16* rows16, uint32_t* Y) {
    const bf16* q = static_cast<const bf16*>(X) + first * ld;
    if (dim % 2 || ld % 2) copy_rows(q, ld, n, dim, rows16, at.ldk), q = rows16, ld = at.ldk;
    pack_transposed(reinterpret_cast<const float*>(q), ld / 2, n, at.pairs, Unchanged{}, reinterpret_cast<float*>(Y),
                    panel, panel * at.pairs, panel);
  }
  static ATTN_NOINLINE void finish_rows(const AttentionParams& p, const HeadPointers& h, const HeadTangents& d,
                                        const QueryTile& t, int64_t ldv, int64_t first, int64_t count) {
    for (int64_t r = 0; r < count; r++) {
      const Sums& s = *t.sums;
      RowMean<float> mean(h, d, first + r, s.total[r] + s.total_low[r]);
      static_cast<float*>(d.lse)[first + r] = mean.of(s.mu[r] + s.mu_low[r]);
      const float minus_mu = -mean.of(s.rounded[r]), factor = mean.inverse * float(p.dropout.keep_scale);
      const bf16* out = static_cast<const bf16*>(h.out) + (first + r) * p.out_row;
      bf16* y = static_cast<bf16*>(d.out) + (first + r) * d.out_row;
      const float* x = t.O + r * ldv;
      int64_t i = 0;
      for (; i + W <= p.v_head_dim; i += W)
        store(y + i, fma(Vf::set(minus_mu), load(out + i), Vf::set(factor) * load(x + i)));
      for (; i < p.v_head_dim; i++) store_one(y + i, fma(minus_mu, load_one(out + i), factor * x[i]));
    }
  }

  // Rows first .. first + count - 1 of one head, at most `tiles` tiles.
  static void run(const AttentionParams& p, const HeadPointers& h, const HeadTangents& d, int64_t first, int64_t count,
                  char* space) {
    const Space at(p, count);
    const int64_t n_tiles = (count + tile - 1) / tile, D = p.head_dim, Dv = p.v_head_dim;
    uint32_t *P = reinterpret_cast<uint32_t*>(space + at.P), *PA = reinterpret_cast<uint32_t*>(space + at.PA);
    uint32_t *V = reinterpret_cast<uint32_t*>(space + at.value),
             *dV = reinterpret_cast<uint32_t*>(space + at.value_tangent);
    float *bias = reinterpret_cast<float*>(space + at.bias), *added = reinterpret_cast<float*>(space + at.added);
    bf16* rows16 = reinterpret_cast<bf16*>(space + at.rows16);
    QueryTile query_tiles[tiles];
    for (int64_t i = 0; i < n_tiles; i++) {
      char* mine = space + at.tiles + i * at.tile_bytes;
      QueryTile& t = query_tiles[i];
      t.sums = reinterpret_cast<Sums*>(mine);
      t.query = reinterpret_cast<uint32_t*>(mine + round_up(int64_t(sizeof(Sums)), 64));
      t.tangent = t.query + tile * at.pairs;
      t.O = reinterpret_cast<float*>(t.tangent + tile * at.pairs);
      t.started = false;
      const int64_t row = first + i * tile, n = min_of(tile, count - i * tile);
      pack_query(h.query, p.q_row, row, n, D, at, rows16, t.query);
      if (d.query) pack_query(d.query, d.q_row, row, n, D, at, rows16, t.tangent);
      memset(t.sums, 0, sizeof(Sums));
      for (int64_t r = 0; r < n; r++)
        split_lse(static_cast<const float*>(h.lse)[row + r], t.sums->minus_lse[r], t.sums->minus_lse_low[r]);
    }

    const bool scores = d.scores(), tangent_added = d.mask || d.slope != 0;
    KeyWalk walk(p, h, first, count, key_block);
    if (scores || d.value) do {
        const int64_t k0 = walk.k0, block = walk.block;
        // rows of a dense matrix are read in place; others and odd ones from a copy
        const auto keys = [&](const void* X, int64_t ld, int64_t to) -> DotProduct {
          const bf16* x = static_cast<const bf16*>(X) + k0 * ld;
          if (D % 2 == 0 && ld * 2 < 1024) return {x, ld, nullptr};
          bf16* copy = reinterpret_cast<bf16*>(space + to);
          copy_rows(x, ld, block, D, copy, at.ldk);
          return {copy, at.ldk, nullptr};
        };
        const DotProduct key = keys(h.key, p.k_row, at.key);
        const DotProduct key_tangent = d.key ? keys(d.key, d.k_row, at.key_tangent) : DotProduct{};
        bool value_finite = true, tangent_finite = true;
        if (scores)
          value_finite = zip_values(static_cast<const bf16*>(h.value) + k0 * p.v_row, p.v_row, block, Dv, V, at.ldv);
        if (d.value)
          tangent_finite = zip_values(static_cast<const bf16*>(d.value) + k0 * d.v_row, d.v_row, block, Dv, dV, at.ldv);

        for (int64_t i = 0; i < n_tiles; i++) {
          QueryTile& t = query_tiles[i];
          const int64_t row = first + i * tile, n = min_of(tile, count - i * tile);
          const TileKeys seen = whole_pairs(seen_keys(p, h, row, row + n - 1, k0, block));
          if (seen.empty()) continue;
          MaskBlock masked = MaskBlock::all_visible;
          if (p.mask != MaskKind::none || p.alibi) masked = load_bias<bf16, true>(p, h, row, n, k0, seen, bias, tile);
          if (masked == MaskBlock::all_hidden) continue;
          if (tangent_added)
            load_tangent_bias<bf16>(p, d, row, n, k0 + seen.begin, seen.end - seen.begin, added + seen.begin * tile,
                                    tile);
          Ahead ahead;  // nothing
          JvpWork s{{at.pairs, (n + W - 1) / W, &p.keys, row, k0, float(p.softcap * log2_e),
                     alibi_of<float>(p, h, row, k0, masked), &ahead},
                    {},
                    0,
                    scores,
                    P,
                    PA,
                    bias,
                    tangent_added ? added : nullptr,
                    t.sums,
                    Vf::set(p.softcap > 0 ? 1 : float(p.scale * log2_e)),
                    Vf::set(float(p.scale)),
                    Vf::set(query_factor<float>(p))};
          if (d.query) s.terms[s.count++] = {key.X, key.ld, t.tangent};
          if (d.key) s.terms[s.count++] = {key_tangent.X, key_tangent.ld, t.query};
          s.terms[s.count++] = {key.X, key.ld, t.query};
          DotStream<JvpWork>::all(s, seen, n, masked);
          if (p.dropout.on()) drop(p.dropout, h.index, row, n, k0, seen.begin, seen.end, P, scores ? PA : nullptr);

          const bool beyond = seen.end % 2 && seen.end < block;  // products reach a key that no row sees
          const bool hides = has_block(masked) || beyond || seen.all_begin > seen.begin || seen.all_end < seen.end;
          const bool guard_value = hides && !value_finite, guard_tangent = hides && !tangent_finite;
          const int64_t pair0 = seen.begin / 2, pairs = (seen.end - seen.begin + 1) / 2;
          const Values v{at.ldv, at.ldv, t.O, !t.started, nullptr, 0, nullptr};
          split_rows<rows>(n, [&](int64_t r, auto m) {
            const TileKeys mine = tile_keys(p.keys, row + r, row + r + m.count - 1, k0, block);
            const int64_t begin = max_of(mine.begin, seen.begin) / 2, end = (min_of(mine.end, seen.end) + 1) / 2;
            const int64_t x = max_of(0, end - begin);
            value_rows<m.count>(v, r,
                                Weighted{PA + begin * tile + r, V + begin * at.ldv, scores && !guard_value ? x : 0},
                                Weighted{P + begin * tile + r, dV + begin * at.ldv, d.value && !guard_tangent ? x : 0});
          });
          if (scores && guard_value) value_guarded(PA + pair0 * tile, V + pair0 * at.ldv, pairs, n, v);
          if (d.value && guard_tangent) value_guarded(P + pair0 * tile, dV + pair0 * at.ldv, pairs, n, v);
          t.started = true;
        }
      } while (walk.next());
    for (int64_t i = 0; i < n_tiles; i++) {
      const QueryTile& t = query_tiles[i];
      if (!t.started) memset(t.O, 0, size_t(tile * at.ldv) * 4);
      finish_rows(p, h, d, t, at.ldv, first + i * tile, min_of(tile, count - i * tile));
    }
  }
};

}  // namespace
}  // namespace attnjourney

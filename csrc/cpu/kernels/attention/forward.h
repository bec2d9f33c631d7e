// Attention forward: online softmax over key blocks (Dao et al. 2022, arXiv 2205.14135; Rabe and Staats 2021,
// arXiv 2112.05682), O(len) memory.
//
// S^T = K Q^T with lanes over queries: K is broadcast in place, Q^T lies packed in panels with scale * log2(e) folded
// in, so maximum, exponential and sum are vertical. exp2 is applied on the accumulators against a reference that starts
// at 0 and moves, with that block redone, only when a row's maximum leaves (-40, 60): no pass for the maximum, no
// rescaling per block. O = P V with lanes over v_head_dim; the last block normalises and stores.
#pragma once
#include "attention/params.h"
#include "cpu/kernels/common/dropout_tile.h"
#include "cpu/kernels/common/exp2.h"
#include "cpu/kernels/common/log_sum.h"
#include "cpu/kernels/common/mask_tile.h"
#include "cpu/kernels/common/pack.h"
#include "cpu/kernels/common/softcap.h"
#include "cpu/kernels/common/tile.h"
#include "key_walk.h"

namespace attnjourney {
namespace {

// The least exponent of a weight where references only rise: products with values stay normal numbers.
template <class C>
constexpr C least_of_rising = sizeof(C) == 4 ? C(-100) : C(-900);

template <class C>
struct Forward {
  static constexpr int W = Vec<C>::width;
  static constexpr int rows = Tuning::rows, vectors = Tuning::vectors;  // of a register tile
  static constexpr int64_t panel = vectors * W;                         // queries
  static constexpr int64_t tile = Tuning::forward_panels * panel;       // queries
  static constexpr int64_t key_block = Tuning::forward_keys;
  static constexpr int64_t tiles = Tuning::forward_tiles;  // tiles that share a key block
  static constexpr int64_t superblock = tiles * tile;

  // A query tile against one key block.
  struct Scores {
    const C* query;      // panels [head_dim][panel]
    const C* reference;  // [tile], log2 units, negated
    C* P;                // [key][tile]
    Vec<C>*top, *total;  // [tile / W]: running maximum relative to the reference, running sum
    int64_t head_dim, vectors_used;
    const KeyRanges* keys;
    int64_t first_row;
    C cap;  // softcap in log2 units, 0 for none
    Alibi<C> alibi;
    Ahead* ahead;  // of the mask
  };

  // M keys against N vectors of panel p, from vector v on
  template <Hidden H, int M, int N>
  static ATTN_INLINE void score_tile(const C* K, int64_t ldk, const Scores& s, int64_t p, int64_t v, int64_t key,
                                     int64_t k) {
    Tile<C, M, N> t;
    t.clear();
    t.add_rows(K, ldk, s.query + p * panel * s.head_dim + v * W, panel, s.head_dim);
    if (s.cap != C(0)) [[unlikely]]
      t.through([&](C* x) { cap_scores(x, M * N, s.cap); });
    const int64_t lane0 = p * panel + v * W;
    C* P = s.P + k * tile + lane0;
    LaneRange<C> range[M];
    if constexpr (H == Hidden::by_range)
      for (int r = 0; r < M; r++) range[r] = lane_range<C>(*s.keys, s.first_row + lane0, key + r);
    const Vec<C> hidden = Vec<C>::set(-C(__builtin_inff()));
    ATTN_UNROLL for (int j = 0; j < N; j++) {
      Vec<C> top = s.top[lane0 / W + j], total = s.total[lane0 / W + j];
      const Vec<C> reference = load(s.reference + lane0 + W * j);
      const Vec<C> lane = Vec<C>::iota() + Vec<C>::set(C(W * j));
      Vec<C> distance = s.alibi.distance(lane, lane0, k);
      ATTN_UNROLL for (int r = 0; r < M; r++, distance = distance - Vec<C>::set(C(1))) {
        Vec<C> x = t.a[r][j] + reference;  // after the product: starting from it would round every sum at its size
        Vec<C> w;
        if constexpr (H == Hidden::by_bias) {
          const Vec<C> bias = load(P + r * tile + W * j);
          const auto gone = eq(bias, hidden);
          x = select(gone, hidden, x + bias);
          w = select(gone, Vec<C>::zero(), exp2(x));
        } else if constexpr (H == Hidden::by_range) {
          const auto visible = range[r].visible(lane);
          if (s.alibi.on) x = s.alibi.add(x, distance);
          x = select(visible, x, hidden);
          w = select(visible, exp2(x, least_of_rising<C>), Vec<C>::zero());
        } else {
          if constexpr (H == Hidden::by_sum) x = x + load(P + r * tile + W * j);
          if constexpr (H == Hidden::by_alibi) x = s.alibi.add(x, distance);
          w = H == Hidden::by_alibi ? exp2(x, least_of_rising<C>) : exp2(x);
        }
        top = max(top, x);
        total = total + w;
        store(P + r * tile + W * j, w);
      }
      s.top[lane0 / W + j] = top;
      s.total[lane0 / W + j] = total;
    }
  }

  // M keys against all panels
  template <Hidden H, int M>
  static ATTN_NOINLINE void score_rows(const C* K, int64_t ldk, const Scores& s, int64_t key, int64_t k) {
    int64_t p = 0;
    for (; (p + 1) * vectors <= s.vectors_used; p++) score_tile<H, M, vectors>(K, ldk, s, p, 0, key, k);
    const int64_t rest = s.vectors_used - p * vectors;
    if constexpr (vectors > 1)
      if (rest > 0) with_rows<vectors - 1>(rest, [&](auto n) { score_tile<H, M, n.count>(K, ldk, s, p, 0, key, k); });
  }

  // M keys against n vectors of one panel, from vector v on
  template <Hidden H, int M>
  static ATTN_NOINLINE void score_panel(const C* K, int64_t ldk, const Scores& s, int64_t p, int64_t v, int64_t n,
                                        int64_t key, int64_t k) {
    with_rows<vectors>(n, [&](auto n_) { score_tile<H, M, n_.count>(K, ldk, s, p, v, key, k); });
  }

  // keys [begin, end) of the block, all of them seen by every row of the tile (or hidden by the bias block)
  template <Hidden H>
  static ATTN_INLINE void score_inner(const C* K, int64_t ldk, const Scores& s, int64_t k0, int64_t begin,
                                      int64_t end) {
    split_rows<rows>(end - begin, [&](int64_t k, auto m) {
      score_rows<H, m.count>(K + (begin + k) * ldk, ldk, s, k0 + begin + k, begin + k);
      if constexpr (H == Hidden::by_bias || H == Hidden::by_sum) s.ahead->step();
    });
  }

  // keys [begin, end) of the block, seen by some rows only: vectors of rows that see none of a group are skipped
  static ATTN_NOINLINE void score_border(const C* K, int64_t ldk, const Scores& s, int64_t k0, int64_t begin,
                                         int64_t end, int64_t rows_used, bool bias) {
    for (int64_t k = begin; k < end; k += rows) {
      const int64_t m = min_of(rows, end - k);
      const C* key = K + k * ldk;
      for (int64_t p = 0; p * vectors < s.vectors_used; p++) {
        const int64_t first = s.first_row + p * panel, used = min_of(rows_used - p * panel, panel);
        const SeenLanes lanes = seen_lanes<W>(*s.keys, first, used, k0 + k, m);
        for (int64_t r = 0; r < m; r++) {
          C* P = s.P + (k + r) * tile + p * panel;
          for (int64_t j = 0; j < lanes.begin; j++) store(P + W * j, Vec<C>::zero());
          for (int64_t j = lanes.end; j < vectors; j++) store(P + W * j, Vec<C>::zero());
        }
        if (lanes.begin >= lanes.end) continue;
        const int64_t v = lanes.begin, n = lanes.end - v;
        with_rows<rows>(m, [&](auto m_) {
          if (bias)
            score_panel<Hidden::by_bias, m_.count>(key, ldk, s, p, v, n, k0 + k, k);
          else if (lanes.whole && s.alibi.on)
            score_panel<Hidden::by_alibi, m_.count>(key, ldk, s, p, v, n, k0 + k, k);
          else if (lanes.whole)
            score_panel<Hidden::no, m_.count>(key, ldk, s, p, v, n, k0 + k, k);
          else
            score_panel<Hidden::by_range, m_.count>(key, ldk, s, p, v, n, k0 + k, k);
        });
      }
    }
  }

  struct Values {
    const C* V;  // [key][ldv], of the block
    int64_t ldv, columns;
    C* O;  // [tile][ldo] accumulators
    int64_t ldo;
    bool first;  // O holds nothing yet
    C* out;      // where normalised rows go if this is the last block, else null
    int64_t ldout;
    const C* inverse;  // [tile] 1 / sum
  };

  // rows r .. of the tile; P points at the first key
  template <int M>
  static ATTN_NOINLINE void value_rows(const C* P, int64_t n, const Values& v, const C* V, int64_t r) {
    split_columns<C, vectors>(v.columns, [&](int64_t d, auto n_) {
      Tile<C, M, n_.count> t;
      t.clear();
      t.add_columns(P + r, tile, V + d, v.ldv, n);
      if (!v.first) t.add(v.O + r * v.ldo + d, v.ldo);
      if (v.out) {
        ATTN_UNROLL for (int i = 0; i < M; i++) {
          const Vec<C> inverse = Vec<C>::broadcast(v.inverse + r + i);
          ATTN_UNROLL for (int j = 0; j < n_.count; j++)
              store(v.out + (r + i) * v.ldout + d + W * j, inverse * t.a[i][j]);
        }
      } else {
        t.store_to(v.O + r * v.ldo + d, v.ldo);
      }
    });
  }

  // Under ALiBi the first keys of a row are its farthest: their maximum says nothing of what is to come. References
  // then do not move down (`rising`), and if a row ends below the range, all are computed again.
  static constexpr C lowest_top = C(-40);
  static ATTN_INLINE bool below_range(C top) { return top <= lowest_top && top >= MaskValue<C>::lowest * C(1.9); }

  // Lanes whose maximum left the range take it as their reference; what they hold is scaled. True if any moved.
  static ATTN_INLINE bool move_reference(int64_t vectors_used, const Vec<C>* top, Vec<C>* total, C* reference, C* O,
                                         int64_t ldo, bool has_output, bool rising) {
    Vec<C> high = Vec<C>::set(C(-1e30)), low = Vec<C>::set(C(1e30));
    const Vec<C> none = Vec<C>::set(MaskValue<C>::lowest * C(1.9));  // below: no visible key so far
    for (int64_t j = 0; j < vectors_used; j++) {
      high = max(high, top[j]);
      low = min(low, select(ge(top[j], none), top[j], Vec<C>::zero()));
    }
    if (!any(ge(high, Vec<C>::set(C(60)))) && (rising || !any(ge(Vec<C>::set(lowest_top), low)))) return false;
    alignas(64) C x[W], f[W];
    for (int64_t j = 0; j < vectors_used; j++) {
      store(x, top[j]);
      for (int i = 0; i < W; i++) {
        const bool out = x[i] >= C(60) || (!rising && below_range(x[i]));
        const C move = out ? x[i] : C(0);
        reference[j * W + i] -= move;
        // moved down: nothing of weight was kept so far, and 2^-move may be inf
        f[i] = move < 0 ? C(0) : C(__builtin_exp2(-double(move)));
        if (out && has_output)
          for (int64_t d = 0; d < ldo; d++) O[(j * W + i) * ldo + d] *= f[i];
      }
      total[j] = total[j] * load(f);
    }
    return true;
  }

  // scratch, in numbers
  struct Space {
    int64_t ldk, ldv, query, output, scores, key, value, state, total;
    explicit Space(const AttentionParams& p, int64_t rows_used) {
      const int64_t t = min_of(tiles, (rows_used + tile - 1) / tile), line = 64 / int64_t(sizeof(C));
      ldk = round_up(p.head_dim, line);
      ldv = round_up(p.v_head_dim, line);
      query = 0;
      output = query + t * tile * round_up(p.head_dim, line);
      scores = output + t * tile * ldv;
      key = scores + key_block * tile;
      value = key + key_block * ldk;
      state = value + key_block * ldv;
      total = state + (3 * t + 1) * tile;
    }
  };

  // Rows first .. first + count - 1 (count <= superblock) of one head.
  template <class T>
  static void run(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t count, C* space) {
    if (!p.alibi || !pass<T>(p, h, first, count, true, space)) pass<T>(p, h, first, count, false, space);
  }

 private:
  // False if a row ended below the range.
  template <class T>
  static bool pass(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t count, bool rising,
                   C* space) {
    const Space at(p, count);
    C *query = space + at.query, *output = space + at.output, *P = space + at.scores;
    C *key_copy = space + at.key, *value_copy = space + at.value, *state = space + at.state;
    const int64_t tiles_used = (count + tile - 1) / tile, D = p.head_dim, Dv = p.v_head_dim;
    const T* Q = static_cast<const T*>(h.query);
    const T* K = static_cast<const T*>(h.key);
    const T* V = static_cast<const T*>(h.value);
    T* out = static_cast<T*>(h.out);
    C* lse = static_cast<C*>(h.lse);
    constexpr bool same = sizeof(T) == sizeof(C);
    // dense rows are read in place; rows far apart collide in the cache, 16-bit ones are converted
    const bool key_direct = same && p.k_row * int64_t(sizeof(T)) < 1024;
    const bool value_direct = same && Dv % W == 0 && p.v_row * int64_t(sizeof(T)) < 1024;
    const bool out_direct = same && Dv % W == 0;
    C *reference = state, *top = state + tiles_used * tile, *total = top + tiles_used * tile,
      *inverse = total + tiles_used * tile;
    bool started[tiles], settled = true;

    for (int64_t t = 0; t < tiles_used; t++) {
      const int64_t n = min_of(tile, count - t * tile);
      pack_transposed(Q + (first + t * tile) * p.q_row, p.q_row, n, D, Times<C>{query_factor<C>(p)},
                      query + t * tile * D, panel, panel * D, panel);
      for (int64_t i = 0; i < tile; i++) {
        reference[t * tile + i] = total[t * tile + i] = C(0);
        top[t * tile + i] = -C(__builtin_inff());
      }
      started[t] = false;
    }

    KeyWalk walk(p, h, first, count, key_block);
    do {
      const int64_t k0 = walk.k0, block = walk.block;
      const C *Kb = key_copy, *Vb = value_copy;
      int64_t ldk = at.ldk, ldv = at.ldv;
      bool value_checked = false, value_finite = true;
      if (key_direct)
        Kb = reinterpret_cast<const C*>(K + k0 * p.k_row), ldk = p.k_row;
      else if (block)
        pack_rows(K + k0 * p.k_row, p.k_row, block, D, key_copy, ldk, D);
      if (value_direct)
        Vb = reinterpret_cast<const C*>(V + k0 * p.v_row), ldv = p.v_row;
      else if (block)
        value_finite = pack_rows(V + k0 * p.v_row, p.v_row, block, Dv, value_copy, ldv, round_up(Dv, W)),
        value_checked = true;

      for (int64_t t = 0; t < tiles_used; t++) {
        const int64_t row = first + t * tile, n = min_of(tile, count - t * tile), used = (n + W - 1) / W;
        const bool last = walk.last(row, row + n - 1);
        TileKeys seen = seen_keys(p, h, row, row + n - 1, k0, block);
        if (seen.empty() && !last) continue;

        C *ref = reference + t * tile, *O = output + t * tile * at.ldv;
        Vec<C> tops[tile / W], totals[tile / W];
        MaskBlock masked = MaskBlock::all_visible;
        const bool has_bias = p.mask != MaskKind::none || p.alibi;
        const auto bias_again = [&] {
          if (has_bias && !seen.empty()) masked = load_bias<T, true>(p, h, row, n, k0, seen, P, tile);
          if (masked == MaskBlock::all_hidden) seen = {0, 0, 0, 0};
        };
        bias_again();
        Ahead ahead;
        if (t + 1 < tiles_used)
          look_up_mask<T>(p, h.mask, row + tile, min_of(tile, count - (t + 1) * tile), k0, block, ahead);
        else
          look_up_mask<T>(p, h.mask, first, min_of(tile, count), k0 + block, min_of(key_block, p.kv_len - k0 - block),
                          ahead);
        const bool bias = has_block(masked);
        const Scores s{query + t * tile * D,
                       ref,
                       P,
                       tops,
                       totals,
                       D,
                       used,
                       &p.keys,
                       row,
                       C(p.softcap * log2_e),
                       alibi_of<C>(p, h, row, k0, masked),
                       &ahead};
        for (int tries = 0; !seen.empty(); tries++) {  // again if the reference moves; bounded, for a NaN never settles
          for (int64_t j = 0; j < used; j++) {
            tops[j] = load(top + t * tile + j * W) + load(ref + j * W);
            totals[j] = load(total + t * tile + j * W);
          }
          score_border(Kb, ldk, s, k0, seen.begin, seen.all_begin, n, bias);
          with_hidden(inside(masked),
                      [&](auto hidden) { score_inner<hidden.value>(Kb, ldk, s, k0, seen.all_begin, seen.all_end); });
          score_border(Kb, ldk, s, k0, seen.all_end, seen.end, n, bias);
          if (tries == 2 || !move_reference(used, tops, reinterpret_cast<Vec<C>*>(total + t * tile), ref, O, at.ldv,
                                            started[t], rising))
            break;
          if (bias) bias_again();
        }
        if (!seen.empty())
          for (int64_t j = 0; j < used; j++) {
            store(top + t * tile + j * W, tops[j] - load(ref + j * W));
            store(total + t * tile + j * W, totals[j]);
          }
        if (p.dropout.on() && !seen.empty())
          drop_tile(p.dropout, h.index, row, n, k0, seen.begin, seen.end, false, P, tile);

        if (last) {
          const C keep = C(p.dropout.keep_scale);
          for (int64_t i = 0; i < n; i++) {
            const C sum = total[t * tile + i];
            settled = settled && !(rising && below_range(top[t * tile + i] + ref[i]));
            inverse[i] = sum == C(0) ? C(0) : keep / sum;  // 0: the row sees no key
            lse[row + i] = natural_lse(-ref[i], sum);
            if (h.sink != -__builtin_inf()) {
              add_sink(h.sink, -ref[i], sum, inverse[i], lse[row + i]);
              if (sum != C(0)) inverse[i] *= keep;
            }
          }
        }
        const bool border = may_hide(masked) || seen.all_begin > seen.begin || seen.all_end < seen.end;
        if (border && !value_checked) {
          value_checked = true;
          value_finite = all_finite(Vb, ldv, block, Dv);
        }
        const bool guarded = border && !value_finite;
        Values v{Vb, ldv, round_up(Dv, W), O, at.ldv, !started[t], nullptr, p.out_row, inverse};
        if (last && out_direct && !guarded) v.out = reinterpret_cast<C*>(out + row * p.out_row);
        split_rows<rows>(n, [&](int64_t r, auto m) {
          const TileKeys mine = seen.empty() ? seen : tile_keys(p.keys, row + r, row + r + m.count - 1, k0, block);
          const int64_t begin = max_of(mine.begin, seen.begin),
                        keys = guarded ? 0 : max_of(0, min_of(mine.end, seen.end) - begin);
          value_rows<m.count>(P + begin * tile, keys, v, Vb + begin * ldv, r);
          ahead.step();
        });
        if (guarded)
          add_guarded(P + seen.begin * tile, tile, 1, n, Vb + seen.begin * ldv, ldv, seen.end - seen.begin, Dv, O,
                      at.ldv);
        started[t] = true;
        if (last && !v.out)
          for (int64_t i = 0; i < n; i++)
            unpack_rows<T>(O + i * at.ldv, at.ldv, 1, Dv, inverse[i], out + (row + i) * p.out_row, p.out_row);
      }
    } while (walk.next());
    return settled;
  }
};

}  // namespace
}  // namespace attnjourney

// Attention forward in bfloat16 with products of pairs (vdpbf16ps): attention/forward.h's algorithm, twice its rate.
//
// S^T = K Q^T: pairs of neighbours along head_dim, K broadcast in place, Q^T packed as it is; the scale comes after the
// product. O = P V: pairs of keys, P rounded to bfloat16 in the epilogue, V zipped once per key block. The sum counts
// the rounded weights: they are what O is divided by. Both products: attention/pair_tiles.h.
#pragma once
#include "pair_stream.h"

namespace attnjourney {
namespace {

// 2^t / exp2_unit to 4e-6, for a result that is rounded to bfloat16; as exp2 otherwise. A monic polynomial of degree 4
// takes two multiplications if its coefficients are adapted; additions have units of their own (Knuth, TAOCP 4.6.4).
constexpr float exp2_unit = 9.570102210e-03f;
ATTN_INLINE Vf exp2_short(Vf t, float least = -125.f) {
  t = max(Vf::set(least), t);
  const Vf n = round(t), f = t - n;
  const Vf y = fma(f, f + Vf::set(2.421487037e+00f), Vf::set(3.169906685e+01f));
  return scale_by_power(fma(y, f + Vf::set(-4.657926231e+01f) + y, Vf::set(5.761803277e+02f)), n);
}

// cap * tanh(y) of z = 2 log2(e) y, to 1e-7 cap: as exact as an lse beside 16 bits need be
ATTN_INLINE Vf cap_short(Vf z, float cap) {
  const Vf far = Vf::set(40.f), one = Vf::set(1.f);
  z = min(far, max(Vf::zero() - far, z));  // a NaN stays one
  const Vf n = round(z), power = scale_by_power(exp2_fraction(z - n), n);
  return fma(Vf::set(-2 * cap), reciprocal(power + one), Vf::set(cap));
}

// ... for |y| <= 0.4, to 2e-8 cap
ATTN_INLINE Vf cap_near_zero(Vf y, float cap) {
  const Vf t = y * y;
  Vf p = Vf::set(-4.682573798e-02f);
  p = fma(p, t, Vf::set(1.325056708e-01f));
  p = fma(p, t, Vf::set(-3.332972613e-01f));
  p = fma(p, t, Vf::set(9.999995734e-01f));
  return y * Vf::set(cap) * p;
}

// ... for |y| <= 1, to 1e-7 cap
ATTN_INLINE Vf cap_middle(Vf y, float cap) {
  const Vf t = y * y;
  Vf p = Vf::set(9.637684687e-04f);
  p = fma(p, t, Vf::set(-5.951268468e-03f));
  p = fma(p, t, Vf::set(1.997326780e-02f));
  p = fma(p, t, Vf::set(-5.326582646e-02f));
  p = fma(p, t, Vf::set(1.331958344e-01f));
  p = fma(p, t, Vf::set(-3.333212930e-01f));
  p = fma(p, t, Vf::set(9.999996931e-01f));
  return y * Vf::set(cap) * p;
}

// The weights against a reference that moves only when a row leaves its range.
struct ForwardWork : DotWork {
  static constexpr int W = Vf::width, most = 1, count = 1;
  static constexpr int64_t tile = DotTiles::tile;
  static constexpr bool matrix = DotTiles::matrix, softens = true;
  DotProduct terms[1];
  struct Queries {  // W of them
    Vf reference;   // log2 units, negated
    Vf top, total;  // running maximum relative to the reference, sum of the weights
    Vf rounded;     // and of the rounded ones
  };
  Queries* queries;   // [tile / W]
  const float* bias;  // [key][tile]
  uint32_t* P;        // [key / 2][tile]
  Vf scale, factor;   // scale * log2(e); with softcap 1 and query_factor
  float* S;           // of the matrix unit: [group][tile], scores of the keys from `S_key` on
  int64_t S_key;

  ATTN_INLINE void clear(int64_t at) const { store_pairs(P + at, Pairs{}); }
  template <int M, int N>
  ATTN_INLINE void load_scores(Vf (&t)[M][N], int64_t lane0, int64_t k) const {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) t[r][j] =
        load(S + (k - S_key + r) * tile + lane0 + W * j);
  }
  struct Cursor {
    Queries* queries;
    uint32_t* P;
    const float* bias;
    int64_t lane;
    ATTN_INLINE void next_vector() { queries++, P += W, bias += W, lane += W; }
    ATTN_INLINE void next_keys(int n) { queries -= n, P += tile - n * W, bias += 2 * tile - n * W, lane -= n * W; }
  };
  ATTN_INLINE Cursor cursor(int64_t lane, int64_t key, Queries* at) const {
    return {at, P + key / 2 * tile + lane, bias + key * tile + lane, lane};
  }
  template <Hidden H>
  ATTN_INLINE void weigh(const Pending& w, const Vf (&scores)[2], const Cursor& at) const {
    constexpr bool guard = H == Hidden::by_range || H == Hidden::by_bias;
    const int64_t lane = at.lane;
    Queries& mine = *at.queries;
    const Vf ref = mine.reference, zero = Vf::zero(), hidden = Vf::set(-__builtin_inff());
    Vf p[2] = {zero, zero};
    ATTN_UNROLL for (int r = 0; r < 2; r++) {
      if (guard && w.key + r >= w.end) break;  // a last single key is paired with weight 0
      // rounded twice, as the maximum that the reference came from: a fused sum would show the product's rounding
      Vf x = scores[r] * scale + ref;
      const float* b = at.bias + r * tile;
      if constexpr (H == Hidden::by_sum) x = x + load(b);
      if (H == Hidden::by_alibi || (H == Hidden::by_range && alibi.on))
        x = alibi.add(x, alibi.distance(Vf::iota(), lane, w.key + r));
      if constexpr (H == Hidden::by_bias) {
        const Vf added = load(b);
        const auto gone = eq(added, hidden);
        x = select(gone, hidden, x + added);
        p[r] = select(gone, zero, exp2_short(x));
      } else if constexpr (H == Hidden::by_range) {
        const auto visible = lane_range<float>(*keys, first_row + lane, k0 + w.key + r).visible(Vf::iota());
        x = select(visible, x, hidden);
        p[r] = select(visible, exp2_short(x, least_of_rising<float>), zero);
      } else {
        p[r] = H == Hidden::by_alibi ? exp2_short(x, least_of_rising<float>) : exp2_short(x);
      }
      mine.top = max(mine.top, x);
    }
    const Pairs pair = round_pairs(p[0], p[1]);
    mine.total = mine.total + (p[0] + p[1]);
    mine.rounded = add_pairs(mine.rounded, pair);
    store_pairs(at.P, pair);
  }
  // x -> softcap of it, in log2 units
  ATTN_NOINLINE void soften(float* x, const float*, int n) const {
    const Vf to_y = factor * Vf::set(float(1 / (2 * log2_e)));
    Vf high = Vf::zero();
    for (int i = 0; i < n; i++) {
      const Vf y = load(x + i * W) * to_y;
      high = max(max(y, Vf::zero() - y), high);
    }
    if (any(ge(high, Vf::set(1.f))))
      for (int i = 0; i < n; i++) store(x + i * W, cap_short(load(x + i * W) * factor, cap));
    else if (any(ge(high, Vf::set(0.4f))))
      for (int i = 0; i < n; i++) store(x + i * W, cap_middle(load(x + i * W) * to_y, cap));
    else
      for (int i = 0; i < n; i++) store(x + i * W, cap_near_zero(load(x + i * W) * to_y, cap));
  }
};

struct ForwardDot : DotTiles {
  using Stream = DotStream<ForwardWork>;

  // calls f over the keys [begin, end) of the block: all at once, or by groups whose scores the matrix unit computes
  template <class F>
  static ATTN_INLINE void by_groups(ForwardWork& s, int64_t begin, int64_t end, const F& f) {
    if constexpr (matrix) {
      const auto [K, ldk, query] = s.terms[0];
      for (int64_t k = begin; k < end; k = s.S_key + group) {
        const int64_t key = k / group * group;
        if (s.S_key != key)
          with_rows<vectors>(s.vectors_used, [&](auto n) {
            Matrix::template scores<n.count>(K + key * ldk, ldk, query, s.pairs, s.S, tile);
          });
        s.S_key = key;
        f(k, min_of(end, key + group));
      }
    } else {
      f(begin, end);
    }
  }

  // scratch, in bytes
  struct Space {
    int64_t ldk, ldv, query, rows16, output, P, bias, key, value, state, scores, products, total;
    Space(const AttentionParams& p, int64_t rows_used) {
      const int64_t t = min_of(tiles, (rows_used + tile - 1) / tile), pairs = round_up(p.head_dim, dim_step) / 2;
      ldk = round_up(p.head_dim, 32);
      ldv = round_up(p.v_head_dim, W);
      query = 0;
      rows16 = query + round_up(t * tile * pairs * 4, 64);
      output = rows16 + tile * ldk * 2;
      P = output + t * tile * ldv * 4;
      bias = P + key_block / 2 * tile * 4;
      key = bias + (p.mask == MaskKind::none && !p.alibi ? 0 : key_block * tile * 4);
      value = key + key_block * ldk * 2;
      state = value + (key_block / 2 + (matrix ? Matrix::side : 0)) * ldv * 4;
      scores = state + (4 * t + 1) * tile * 4;
      products = scores + (matrix ? group * tile * 4 : 0);
      total = products + matrix_space * 4;
    }
  };

  static void run(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t count, char* space) {
    if (!p.alibi || !pass(p, h, first, count, true, space)) pass(p, h, first, count, false, space);
  }

 private:
  // False if a row ended below the range.
  static bool pass(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t count, bool rising,
                   char* space) {
    const Space at(p, count);
    uint32_t *query = reinterpret_cast<uint32_t*>(space + at.query), *P = reinterpret_cast<uint32_t*>(space + at.P);
    uint32_t* Vb = reinterpret_cast<uint32_t*>(space + at.value);
    bf16 *rows16 = reinterpret_cast<bf16*>(space + at.rows16), *key_copy = reinterpret_cast<bf16*>(space + at.key);
    float *output = reinterpret_cast<float*>(space + at.output), *bias = reinterpret_cast<float*>(space + at.bias);
    float* state = reinterpret_cast<float*>(space + at.state);
    const int64_t tiles_used = (count + tile - 1) / tile, D = p.head_dim, Dv = p.v_head_dim;
    const int64_t pairs = round_up(D, dim_step) / 2;
    [[maybe_unused]] const MatrixUnit unit;
    const bf16 *Q = static_cast<const bf16*>(h.query), *K = static_cast<const bf16*>(h.key);
    const bf16* V = static_cast<const bf16*>(h.value);
    bf16* out = static_cast<bf16*>(h.out);
    float* lse = static_cast<float*>(h.lse);
    float *reference = state, *top = state + tiles_used * tile, *total = top + tiles_used * tile,
          *rounded = total + tiles_used * tile, *inverse = rounded + tiles_used * tile;
    const bool key_direct = D % dim_step == 0 && p.k_row * 2 < 1024;
    bool started[tiles], settled = true;
    for (int64_t t = 0; t < tiles_used; t++) {
      const int64_t n = min_of(tile, count - t * tile);
      const bf16* q = Q + (first + t * tile) * p.q_row;
      int64_t ldq = p.q_row;
      if (D % dim_step || ldq % 2) copy_rows(q, ldq, n, D, rows16, at.ldk), q = rows16, ldq = at.ldk;
      pack_transposed(reinterpret_cast<const float*>(q), ldq / 2, n, pairs, Unchanged{},
                      reinterpret_cast<float*>(query + t * tile * pairs), panel, panel * pairs, panel);
      for (int64_t i = 0; i < tile; i++) {
        reference[t * tile + i] = total[t * tile + i] = rounded[t * tile + i] = 0;
        top[t * tile + i] = -__builtin_inff();
      }
      started[t] = false;
    }

    KeyWalk walk(p, h, first, count, key_block);
    do {
      const int64_t k0 = walk.k0, block = walk.block;
      const bf16* Kb = K + k0 * p.k_row;
      int64_t ldk = p.k_row;
      if (!key_direct || (matrix && block % group != 0))
        copy_rows(Kb, ldk, block, D, key_copy, at.ldk), Kb = key_copy, ldk = at.ldk;
      const bool value_finite = zip_values(V + k0 * p.v_row, p.v_row, block, Dv, Vb, at.ldv);
      if constexpr (matrix) memset(Vb + (block + 1) / 2 * at.ldv, 0, size_t(Matrix::side * at.ldv) * 4);

      for (int64_t t = 0; t < tiles_used; t++) {
        const int64_t row = first + t * tile, n = min_of(tile, count - t * tile), used = (n + W - 1) / W;
        const bool last = walk.last(row, row + n - 1);
        TileKeys seen = whole_pairs(seen_keys(p, h, row, row + n - 1, k0, block));
        if (seen.empty() && !last) continue;

        float *ref = reference + t * tile, *O = output + t * tile * at.ldv;
        ForwardWork::Queries queries[tile / W];
        MaskBlock masked = MaskBlock::all_visible;
        if ((p.mask != MaskKind::none || p.alibi) && !seen.empty()) {
          masked = load_bias<bf16, true>(p, h, row, n, k0, seen, bias, tile);
          if (masked == MaskBlock::all_hidden) seen = {0, 0, 0, 0};
        }
        const bool biased = has_block(masked);
        Ahead ahead;
        if (t + 1 < tiles_used)
          look_up_mask<bf16>(p, h.mask, row + tile, min_of(tile, count - (t + 1) * tile), k0, block, ahead);
        else
          look_up_mask<bf16>(p, h.mask, first, min_of(tile, count), k0 + block,
                             min_of(key_block, p.kv_len - k0 - block), ahead);
        ForwardWork s{
            {pairs, used, &p.keys, row, k0, float(p.softcap * log2_e), alibi_of<float>(p, h, row, k0, masked), &ahead},
            {{Kb, ldk, query + t * tile * pairs}},
            queries,
            bias,
            P,
            Vf::set(p.softcap > 0 ? 1 : float(p.scale * log2_e)),
            Vf::set(query_factor<float>(p)),
            reinterpret_cast<float*>(space + at.scores),
            -1};
        for (int tries = 0; !seen.empty(); tries++) {
          for (int64_t j = 0; j < used; j++) {
            const Vf r = load(ref + j * W);
            queries[j] = {r, load(top + t * tile + j * W) + r, load(total + t * tile + j * W),
                          load(rounded + t * tile + j * W)};
          }
          const auto border = [&](int64_t begin, int64_t end) { Stream::border(s, begin, end, n, biased); };
          by_groups(s, seen.begin, seen.all_begin, border);
          with_hidden(inside(masked), [&](auto hidden) {
            by_groups(s, seen.all_begin, seen.all_end,
                      [&](int64_t begin, int64_t end) { Stream::inner<hidden.value>(s, begin, end); });
          });
          by_groups(s, seen.all_end, seen.end, border);
          if (tries == 2) break;
          Vf tops[tile / W], factor[tile / W];  // what a lane that moves is scaled by
          for (int64_t j = 0; j < used; j++) tops[j] = queries[j].top, factor[j] = Vf::set(1);
          if (!Forward<float>::move_reference(used, tops, factor, ref, O, at.ldv, started[t], rising)) break;
          for (int64_t j = 0; j < used; j++) {
            float *a = total + t * tile + j * W, *b = rounded + t * tile + j * W;
            store(a, load(a) * factor[j]);
            store(b, load(b) * factor[j]);
          }
        }
        if (!seen.empty())
          for (int64_t j = 0; j < used; j++) {
            store(top + t * tile + j * W, queries[j].top - load(ref + j * W));
            store(total + t * tile + j * W, queries[j].total);
            store(rounded + t * tile + j * W, queries[j].rounded);
          }
        if (p.dropout.on() && !seen.empty()) drop(p.dropout, h.index, row, n, k0, seen.begin, seen.end, P);
        if (last)
          for (int64_t i = 0; i < n; i++) {
            const float sum = rounded[t * tile + i] * exp2_unit, exact = total[t * tile + i] * exp2_unit;
            settled = settled && !(rising && Forward<float>::below_range(top[t * tile + i] + ref[i]));
            inverse[i] = sum == 0 ? 0 : float(p.dropout.keep_scale) / sum;
            lse[row + i] = natural_lse(-ref[i], exact);
            if (h.sink != -__builtin_inf()) {
              float unused = 0;
              add_sink(h.sink, -ref[i], sum, inverse[i], unused);
              add_sink(h.sink, -ref[i], exact, unused, lse[row + i]);
              if (sum != 0) inverse[i] *= float(p.dropout.keep_scale);
            }
            inverse[i] *= exp2_unit;
          }
        const bool beyond = (matrix || seen.end % 2) && seen.end < block;  // products reach keys that no row sees
        const bool border = may_hide(masked) || beyond || seen.all_begin > seen.begin || seen.all_end < seen.end;
        const bool guarded = border && !value_finite;
        Values v{at.ldv, at.ldv, O, !started[t], nullptr, p.out_row, inverse};
        if (last && Dv % W == 0 && !guarded) v.out = out + row * p.out_row;
        const int64_t pairs_seen = guarded ? 0 : (seen.end - seen.begin + 1) / 2;
        if constexpr (matrix)
          value_matrix<Matrix>(P + seen.begin / 2 * tile, Vb + seen.begin / 2 * at.ldv, pairs_seen, v, n,
                               reinterpret_cast<uint32_t*>(space + at.products));
        else
          split_rows<rows>(n, [&](int64_t r, auto m) {
            const TileKeys mine = seen.empty() ? seen : tile_keys(p.keys, row + r, row + r + m.count - 1, k0, block);
            const int64_t begin = max_of(mine.begin, seen.begin) / 2, end = (min_of(mine.end, seen.end) + 1) / 2;
            value_rows<m.count>(
                v, r, Weighted{P + begin * tile + r, Vb + begin * at.ldv, guarded ? 0 : max_of(0, end - begin)});
          });
        if (guarded)
          value_guarded(P + seen.begin / 2 * tile, Vb + seen.begin / 2 * at.ldv, (seen.end - seen.begin + 1) / 2, n, v);
        started[t] = true;
        if (last && !v.out)
          for (int64_t i = 0; i < n; i++)
            unpack_rows<bf16>(O + i * at.ldv, at.ldv, 1, Dv, inverse[i], out + (row + i) * p.out_row, p.out_row);
      }
    } while (walk.next());
    return settled;
  }
};

}  // namespace
}  // namespace attnjourney

// Attention forward in bfloat16 with products of pairs (vdpbf16ps): attention_forward.h's algorithm, twice its rate.
//
// S^T = K Q^T: pairs of neighbours along head_dim, K broadcast in place, Q^T packed as it is; the scale comes after the
// product. O = P V: pairs of keys, P rounded to bfloat16 in the epilogue, V zipped once per key block. The sum counts
// the rounded weights: they are what O is divided by. Both products: dot_tiles.h.
#pragma once
#include "dot_tiles.h"

namespace attnjourney {
namespace {

struct Unchanged {
  ATTN_INLINE Vf operator()(Vf x) const { return x; }
  ATTN_INLINE float operator()(float x) const { return x; }
};

struct ForwardDot : DotTiles {
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
    bool started[tiles];
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
        TileKeys seen = seen_keys(p, h, row, row + n - 1, k0, block);
        if (seen.empty() && !last) continue;
        // pairs: keys taken in at the ends are hidden by their range
        seen.begin &= ~int64_t(1);
        seen.all_begin = min_of(seen.end, (seen.all_begin + 1) & ~int64_t(1));
        seen.all_end = max_of(seen.all_begin, seen.all_end == seen.end ? seen.end : seen.all_end & ~int64_t(1));

        float *ref = reference + t * tile, *O = output + t * tile * at.ldv;
        Vf tops[tile / W], totals[tile / W], rounds[tile / W];
        MaskBlock masked = MaskBlock::all_visible;
        if ((p.mask != MaskKind::none || p.alibi) && !seen.empty()) {
          masked = load_bias<bf16, true>(p, h, row, n, k0, seen, bias, tile);
          if (masked == MaskBlock::all_hidden) seen = {0, 0, 0, 0};
        }
        const bool biased = has_block(masked);
        Scores s{query + t * tile * pairs,
                 ref,
                 bias,
                 P,
                 tops,
                 totals,
                 rounds,
                 Vf::set(p.softcap > 0 ? 1 : float(p.scale * log2_e)),
                 pairs,
                 used,
                 &p.keys,
                 row,
                 Vf::set(query_factor<float>(p)),
                 float(p.softcap * log2_e),
                 alibi_of<float>(p, h, row, k0, masked),
                 reinterpret_cast<float*>(space + at.scores),
                 -1};
        for (int tries = 0; !seen.empty(); tries++) {
          for (int64_t j = 0; j < used; j++) {
            tops[j] = load(top + t * tile + j * W) + load(ref + j * W);
            totals[j] = load(total + t * tile + j * W);
            rounds[j] = load(rounded + t * tile + j * W);
          }
          const auto border = [&](int64_t begin, int64_t end) { score_border(Kb, ldk, s, k0, begin, end, n, biased); };
          by_groups(Kb, ldk, s, seen.begin, seen.all_begin, border);
          with_hidden(inside(masked), [&](auto hidden) {
            by_groups(Kb, ldk, s, seen.all_begin, seen.all_end,
                      [&](int64_t begin, int64_t end) { score_inner<hidden.value>(Kb, ldk, s, k0, begin, end); });
          });
          by_groups(Kb, ldk, s, seen.all_end, seen.end, border);
          if (tries == 2) break;
          Vf factor[tile / W];  // what a lane that moves is scaled by
          for (int64_t j = 0; j < used; j++) factor[j] = Vf::set(1);
          if (!Forward<float>::move_reference(used, tops, factor, ref, O, at.ldv, started[t])) break;
          for (int64_t j = 0; j < used; j++) {
            float *a = total + t * tile + j * W, *b = rounded + t * tile + j * W;
            store(a, load(a) * factor[j]);
            store(b, load(b) * factor[j]);
          }
        }
        if (!seen.empty())
          for (int64_t j = 0; j < used; j++) {
            store(top + t * tile + j * W, tops[j] - load(ref + j * W));
            store(total + t * tile + j * W, totals[j]);
            store(rounded + t * tile + j * W, rounds[j]);
          }
        if (p.dropout.on() && !seen.empty()) drop(p.dropout, h.index, row, n, k0, seen.begin, seen.end, P);
        if (last)
          for (int64_t i = 0; i < n; i++) {
            const float sum = rounded[t * tile + i] * exp2_unit, exact = total[t * tile + i] * exp2_unit;
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
        const bool border = biased || beyond || seen.all_begin > seen.begin || seen.all_end < seen.end;
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
            value_rows<m.count>(P + begin * tile, Vb + begin * at.ldv, guarded ? 0 : max_of(0, end - begin), v, r);
          });
        if (guarded)
          value_guarded(P + seen.begin / 2 * tile, Vb + seen.begin / 2 * at.ldv, (seen.end - seen.begin + 1) / 2, n, v);
        started[t] = true;
        if (last && !v.out)
          for (int64_t i = 0; i < n; i++)
            unpack_rows<bf16>(O + i * at.ldv, at.ldv, 1, Dv, inverse[i], out + (row + i) * p.out_row, p.out_row);
      }
    } while (walk.next());
  }
};

}  // namespace
}  // namespace attnjourney

// The weights exp(score - lse) of some rows, a tile of P^T at a time; the products and masks are those of the backward.
#pragma once
#include "stages.h"

namespace attnjourney {
namespace {

template <class C>
struct Weights {
  using B = Stages<C>;
  static constexpr int64_t tile = B::tile, key_block = B::key_block;

  // scratch, in numbers
  struct Space {
    int64_t query, lse, P, key, rows, total;
    explicit Space(const AttentionParams& p) {
      query = 0;
      lse = query + tile * round_up(p.head_dim, B::line);
      P = lse + 3 * tile;
      key = P + key_block * tile;
      rows = key + key_block * B::key_ld(p);
      total = rows + B::W * round_up(key_block, B::line);
    }
  };

  // Rows first .. first + count - 1 (count <= tile) of one head into h.out [count][kv_len], row stride p.out_row.
  template <class T>
  static void run(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t count, C* space) {
    const Space at(p);
    C *P = space + at.P, *key = space + at.key, *rows = space + at.rows;
    T* out = static_cast<T*>(h.out);
    typename B::QueryRows t{};
    B::begin(h, first, count, t);
    t.query_t = space + at.query;
    t.minus_lse = space + at.lse;
    t.minus_lse_low = t.minus_lse + tile;
    B::template pack_panels<T>(h.query, p.q_row, t, p.head_dim, query_factor<C>(p), t.query_t);
    for (int64_t r = 0; r < tile; r++)
      split_lse(r < count ? static_cast<const C*>(h.lse)[first + r] : C(0), t.minus_lse[r], t.minus_lse_low[r]);
    for (int64_t r = 0; r < count; r++) memset(out + r * p.out_row, 0, size_t(p.kv_len) * sizeof(T));

    KeyWalk walk(p, h, first, count, key_block);
    do {
      const int64_t k0 = walk.k0, block = walk.block;
      pack_rows(static_cast<const T*>(h.key) + k0 * p.k_row, p.k_row, block, p.head_dim, key, B::key_ld(p),
                round_up(p.head_dim, B::W));
      const TileKeys seen = B::template weigh<T>(p, t, key, k0, block, P, nullptr).seen;
      if (seen.empty()) continue;
      const int64_t n = seen.end - seen.begin, ld = round_up(n, B::W);
      for (int64_t r = 0; r < count; r += B::W) {  // W rows at a time: [W][ld]
        const int64_t m = min_of(B::W, count - r);
        pack_transposed(P + seen.begin * tile + r, tile, n, m, Times<C>{C(1)}, rows, B::W, B::W, ld);
        unpack_rows<T>(rows, ld, m, n, C(1), out + r * p.out_row + k0 + seen.begin, p.out_row);
      }
    } while (walk.next());
  }
};

}  // namespace
}  // namespace attnjourney

// The weights of some rows, a tile of P^T at a time; the products and masks are those of the backward.
#pragma once
#include "stages.h"

namespace attnjourney {
namespace {

template <class Real>
struct Weights {
  using S = TileStages<Real>;
  static constexpr int64_t tile = S::tile, key_block = S::key_block;

  struct Buffers {
    typename S::QueryRows queries{};
    Real *P, *key;  // [key_block][tile], [key_block][key_ld]
    Real* rows;     // [width][key_block]: P, transposed
    Buffers(const AttentionParams& params, Scratch& scratch)
        : P(scratch.take<Real>(key_block * tile)),
          key(scratch.take<Real>(key_block * S::key_ld(params))),
          rows(scratch.take<Real>(S::width * round_up(key_block, S::line))) {
      queries.query_t = scratch.take<Real>(tile * params.head_dim);
      S::take_rows(scratch, queries);
    }
  };
  static int64_t space(const AttentionParams& params) { return scratch_bytes<Buffers>(params); }

  // Rows first .. first + count - 1 (count <= tile) of one head into head.out [count][kv_len], row stride
  // params.out_row.
  template <class T>
  static void run(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t count, void* space) {
    const Buffers buffers = buffers_in<Buffers>(space, params);
    Real *const P = buffers.P, *const key = buffers.key, *const rows = buffers.rows;
    T* out = static_cast<T*>(head.out);
    typename S::QueryRows t = buffers.queries;
    S::begin(params, head, first, count, t);
    S::template pack_panels<T>(head.query, params.q_row, t, params.head_dim, query_factor<Real>(params), t.query_t);
    for (int64_t r = 0; r < count; r++) memset(out + r * params.out_row, 0, size_t(params.kv_len) * sizeof(T));

    KeyWalk walk(params, head, first, count, key_block);
    do {
      const int64_t k0 = walk.k0, block = walk.block;
      pack_rows(static_cast<const T*>(head.key) + k0 * params.k_row, params.k_row, block, params.head_dim, key,
                S::key_ld(params), round_up(params.head_dim, S::width));
      const TileKeys seen = S::template recompute_weights<T>(params, t, key, k0, block, P, nullptr).seen;
      if (seen.empty()) continue;
      const int64_t n = seen.end - seen.begin, ld = round_up(n, S::width);
      for (int64_t r = 0; r < count; r += S::width) {  // width rows at a time: [width][ld]
        const int64_t m = min_of(S::width, count - r);
        pack_transposed(P + seen.begin * tile + r, tile, n, m, Times<Real>{Real(1)}, rows, S::width, S::width, ld);
        unpack_rows<T>(rows, ld, m, n, Real(1), out + r * params.out_row + k0 + seen.begin, params.out_row);
      }
    } while (walk.next());
  }
};

}  // namespace
}  // namespace attnjourney

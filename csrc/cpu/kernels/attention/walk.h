// The walk of attention's derivatives by query, key and value over one key/value head: queries in chunks whose packed
// data stays in the second-level cache, key blocks inside, query tiles innermost.
#pragma once
#include "stages.h"

namespace attnjourney {
namespace {

// The share of key blocks `part` of `parts` of one key/value head: dealt in a snake, so that causal shares are even.
ATTN_INLINE bool owns(int64_t block, int64_t part, int64_t parts) {
  const int64_t round = block / parts, seat = block % parts;
  return part == (round & 1 ? parts - 1 - seat : seat);
}

// Keys at a time: all parts of a head get as many blocks, of a size.
ATTN_INLINE int64_t even_step(const AttentionParams& p, int64_t step, int64_t parts) {
  if (parts == 1 || p.block_size || p.kv_len == 0) return step;
  const int64_t blocks = parts * ((p.kv_len + parts * step - 1) / (parts * step));
  return min_of(step, round_up((p.kv_len + blocks - 1) / blocks, 16));
}

// heads: the group's query heads. With parts > 1, dQ is left unscaled in partial_query [group][q_len][ld]
// (ld = round_up(head_dim, line)) for the ordered sum; else it goes to its gradient. The key blocks' dK and dV go to
// theirs in either case.
struct Walk {
  const AttentionParams& params;
  const HeadPointers* heads;
  const HeadGradients* gradients;  // of each head
  int64_t part, parts;
  void* partial_query;
};

// `kernel` supplies: chunk, the number of query tiles at a time; prepare(tile, head, first row, rows); load(first key,
// keys); step(tile, wanted, first key, keys, dK, dV), dK and dV of the block; query_sum(tile), [tile][key_ld].
// grad_key, grad_value: scratch of kv_len rows.
template <class T, class Kernel>
void walk_keys(const Walk& x, Kernel& kernel, Compute<T>* grad_key, Compute<T>* grad_value) {
  using C = Compute<T>;
  using S = Stages<C>;
  const AttentionParams& p = x.params;
  const int64_t D = p.head_dim, Dv = p.v_head_dim, ldgk = round_up(D, S::line), ldgv = round_up(Dv, S::line);
  const int64_t per_head = S::tiles_per_head(p), all_tiles = p.group * per_head;
  const int64_t query_step = S::query_step(p), key_step = even_step(p, S::key_step(p), x.parts);
  const HeadGradients& g0 = x.gradients[0];
  memset(grad_key, 0, size_t(p.kv_len * (ldgk + ldgv)) * sizeof(C));

  for (int64_t c0 = 0; c0 < all_tiles; c0 += kernel.chunk) {
    const int64_t n_tiles = min_of(kernel.chunk, all_tiles - c0);
    const auto head_of = [&](int64_t i) { return (c0 + i) / per_head; };
    const auto first_of = [&](int64_t i) { return (c0 + i) % per_head * query_step; };
    const auto count_of = [&](int64_t i) { return min_of(query_step, p.q_len - first_of(i)); };
    for (int64_t i = 0; i < n_tiles; i++) kernel.prepare(i, head_of(i), first_of(i), count_of(i));
    for (int64_t k0 = 0, block_index = 0; k0 < p.keys.key_length; k0 += key_step, block_index++) {
      if (!owns(block_index, x.part, x.parts)) continue;
      const int64_t block = min_of(key_step, p.keys.key_length - k0);
      bool used = false;
      for (int64_t i = 0; i < n_tiles && !used; i++)
        used = !seen_keys(p, x.heads[head_of(i)], first_of(i), first_of(i) + count_of(i) - 1, k0, block).empty();
      if (!used) continue;
      kernel.load(k0, block);
      for (int64_t i = 0; i < n_tiles; i++) {
        const HeadGradients& g = x.gradients[head_of(i)];
        const typename S::Wanted w{g.query != nullptr || x.partial_query != nullptr,
                                   g0.key != nullptr,
                                   g0.value != nullptr,
                                   g.mask,
                                   g.mask_row,
                                   g.mask_col,
                                   g.mask_first,
                                   g.mask_once,
                                   g.slope};
        kernel.step(i, w, k0, block, grad_key + k0 * ldgk, grad_value + k0 * ldgv);
      }
    }
    for (int64_t i = 0; i < n_tiles; i++) {
      const HeadGradients& g = x.gradients[head_of(i)];
      if (x.partial_query)
        unpack_rows<C>(kernel.query_sum(i), S::key_ld(p), count_of(i), D, C(1),
                       static_cast<C*>(x.partial_query) + (head_of(i) * p.q_len + first_of(i)) * ldgk, ldgk);
      else if (g.query)
        unpack_rows<T>(kernel.query_sum(i), S::key_ld(p), count_of(i), D, C(p.scale),
                       static_cast<T*>(g.query) + first_of(i) * g.query_row, g.query_row);
    }
  }
  for (int64_t k0 = 0, block_index = 0; k0 < p.kv_len; k0 += key_step, block_index++) {
    if (!owns(block_index, x.part, x.parts)) continue;
    const int64_t n = min_of(key_step, p.kv_len - k0);
    if (g0.key)
      unpack_rows<T>(grad_key + k0 * ldgk, ldgk, n, D, C(p.scale), static_cast<T*>(g0.key) + k0 * g0.key_row,
                     g0.key_row);
    if (g0.value)
      unpack_rows<T>(grad_value + k0 * ldgv, ldgv, n, Dv, C(p.dropout.keep_scale),
                     static_cast<T*>(g0.value) + k0 * g0.value_row, g0.value_row);
  }
}

// dQ of rows [first, first + count) of one head: the ordered sum of the parts, scaled
template <class T>
void sum_parts(const AttentionParams& p, const void* partial_, int64_t part_stride, int64_t parts, int64_t first,
               int64_t count, const HeadGradients& g) {
  using C = Compute<T>;
  constexpr int W = Vec<C>::width;
  const C* partial = static_cast<const C*>(partial_);
  const int64_t ld = round_up(p.head_dim, Stages<C>::line);
  for (int64_t r = first; r < first + count; r++) {
    T* y = static_cast<T*>(g.query) + r * g.query_row;
    const C* x = partial + r * ld;
    int64_t d = 0;
    for (; d + W <= p.head_dim; d += W) {
      Vec<C> s = load(x + d);
      for (int64_t i = 1; i < parts; i++) s = s + load(x + i * part_stride + d);
      store(y + d, s * Vec<C>::set(C(p.scale)));
    }
    for (; d < p.head_dim; d++) {
      C s = x[d];
      for (int64_t i = 1; i < parts; i++) s += x[i * part_stride + d];
      store_one(y + d, s * C(p.scale));
    }
  }
}

}  // namespace
}  // namespace attnjourney

// The walk of attention's derivatives by query, key and value over one key/value head: queries in chunks whose packed
// data stays in the second-level cache, key blocks inside, query tiles innermost.
#pragma once
#include "key_parts.h"
#include "stages.h"

namespace attnjourney {
namespace {

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

// `kernel` supplies: chunk, the number of query tiles at a time; key_step(params), the most keys of a block;
// clear(key step), before all else; prepare(tile, head, first row, rows); load(first key, keys); step(tile, wanted,
// index of the block, first key, keys); query_sum(tile), [tile][key_ld]; key_sum and value_sum(index of the block,
// first key, keys), [keys][dim, padded to a line]; kept_queries(head, row) and kept_keys(key), null or 1 for rows of
// gradients that are to stay as they are.
template <class T, class Kernel>
void walk_keys(const Walk& walk, Kernel& kernel) {
  using Real = Compute<T>;
  using S = TileStages<Real>;
  const AttentionParams& params = walk.params;
  const int64_t grad_key_ld = round_up(params.head_dim, S::line), grad_value_ld = round_up(params.v_head_dim, S::line);
  const int64_t per_head = S::tiles_per_head(params), all_tiles = params.group * per_head;
  const int64_t query_step = S::query_step(params);
  const int64_t key_step = even_step(params, Kernel::key_step(params), walk.parts);
  kernel.clear(key_step);
  const auto put = [](const Real* sums, int64_t ld, int64_t n, int64_t dim, Real factor, auto* to, int64_t to_ld,
                      const uint8_t* kept) {
    if (!kept) return unpack_rows(sums, ld, n, dim, factor, to, to_ld);
    for (int64_t i = 0; i < n; i++)
      if (!kept[i]) unpack_rows(sums + i * ld, ld, 1, dim, factor, to + i * to_ld, to_ld);
  };

  for (int64_t chunk = 0; chunk < all_tiles; chunk += kernel.chunk) {
    const int64_t n_tiles = min_of(kernel.chunk, all_tiles - chunk);
    const auto head_of = [&](int64_t i) { return (chunk + i) / per_head; };
    const auto first_of = [&](int64_t i) { return (chunk + i) % per_head * query_step; };
    const auto count_of = [&](int64_t i) { return min_of(query_step, params.q_len - first_of(i)); };
    for (int64_t i = 0; i < n_tiles; i++) kernel.prepare(i, head_of(i), first_of(i), count_of(i));
    for (int64_t k0 = 0, index = 0; k0 < params.keys.key_length; k0 += key_step, index++) {
      if (!owns(index, walk.part, walk.parts)) continue;
      const int64_t block = min_of(key_step, params.keys.key_length - k0);
      bool used = false;
      for (int64_t i = 0; i < n_tiles && !used; i++) {
        const int64_t first = first_of(i), last = first + count_of(i) - 1;
        used = !seen_keys(params, walk.heads[head_of(i)], first, last, k0, block).empty();
      }
      if (!used) continue;
      kernel.load(k0, block);
      for (int64_t i = 0; i < n_tiles; i++)
        kernel.step(i, S::wanted(walk.gradients[head_of(i)], walk.partial_query != nullptr), index, k0, block);
    }
    for (int64_t i = 0; i < n_tiles; i++) {
      const HeadGradients& gradients = walk.gradients[head_of(i)];
      const Real* const sum = kernel.query_sum(i);
      const int64_t ld = S::key_ld(params), dim = params.head_dim;
      const uint8_t* const kept = kernel.kept_queries(head_of(i), first_of(i));
      if (walk.partial_query)
        put(sum, ld, count_of(i), dim, Real(1),
            static_cast<Real*>(walk.partial_query) + (head_of(i) * params.q_len + first_of(i)) * grad_key_ld,
            grad_key_ld, kept);
      else if (gradients.query)
        put(sum, ld, count_of(i), dim, Real(params.scale),
            static_cast<T*>(gradients.query) + first_of(i) * gradients.query_row, gradients.query_row, kept);
    }
  }

  const HeadGradients& gradients = walk.gradients[0];  // those of key and value are the same for all heads
  for (int64_t k0 = 0, index = 0; k0 < params.kv_len; k0 += key_step, index++) {
    if (!owns(index, walk.part, walk.parts)) continue;
    const int64_t n = min_of(key_step, params.kv_len - k0);
    if (gradients.key)
      put(kernel.key_sum(index, k0, n), grad_key_ld, n, params.head_dim, Real(params.scale),
          static_cast<T*>(gradients.key) + k0 * gradients.key_row, gradients.key_row, kernel.kept_keys(k0));
    if (gradients.value)
      put(kernel.value_sum(index, k0, n), grad_value_ld, n, params.v_head_dim, Real(params.dropout.keep_scale),
          static_cast<T*>(gradients.value) + k0 * gradients.value_row, gradients.value_row, kernel.kept_keys(k0));
  }
}

// The sums of keys in their order, for a kernel of walk_keys.
template <class Real>
struct KeySums {
  static constexpr int64_t line = 64 / int64_t(sizeof(Real));
  Real *key, *value;  // [kv_len][dim, padded to a line]
  int64_t kv_len, key_ld, value_ld;
  KeySums(const AttentionParams& params, Scratch& scratch)
      : kv_len(params.kv_len), key_ld(round_up(params.head_dim, line)), value_ld(round_up(params.v_head_dim, line)) {
    key = scratch.take<Real>(kv_len * key_ld);
    value = scratch.take<Real>(kv_len * value_ld);
  }
  void clear() const {
    memset(key, 0, size_t(kv_len * key_ld) * sizeof(Real));
    memset(value, 0, size_t(kv_len * value_ld) * sizeof(Real));
  }
  Real* key_rows(int64_t k0) const { return key + k0 * key_ld; }
  Real* value_rows(int64_t k0) const { return value + k0 * value_ld; }
};

// What the masks of a tile's next step, and the gradient of its own, will touch: asked for while the tile works.
template <class T, class QueryTile, class Wanted>
ATTN_INLINE void prefetch_masks(const AttentionParams& params, QueryTile* tiles, int64_t i, int64_t used,
                                const Wanted& wanted, int64_t k0, int64_t block, int64_t key_block,
                                RowPrefetch& prefetch) {
  if (params.mask == MaskKind::none) return;
  const QueryTile& next = tiles[i + 1 < used ? i + 1 : 0];
  const int64_t k = i + 1 < used ? k0 : k0 + block;
  prefetch_mask<T>(params, next.head->mask, next.first, next.count, k, min_of(key_block, params.kv_len - k), prefetch);
  if (wanted.mask && wanted.mask_row != 0 && wanted.mask_col == 1) {
    const int64_t at = tiles[i].first * wanted.mask_row + k0;
    if (wanted.mask_once)
      prefetch.add(static_cast<const T*>(wanted.mask) + at, wanted.mask_row, block);
    else
      prefetch.add(static_cast<const Compute<T>*>(wanted.mask) + at, wanted.mask_row, block);
  }
  tiles[i].prefetch = &prefetch;
}

// dQ of rows [first, first + count) of one head: the ordered sum of the parts, scaled
template <class T>
void sum_parts(const AttentionParams& params, const void* partials, int64_t part_stride, int64_t parts, int64_t first,
               int64_t count, const HeadGradients& gradients) {
  using Real = Compute<T>;
  constexpr int width = Vec<Real>::width;
  const int64_t ld = round_up(params.head_dim, TileStages<Real>::line);
  for (int64_t r = first; r < first + count; r++) {
    T* const to = static_cast<T*>(gradients.query) + r * gradients.query_row;
    const Real* const first_part = static_cast<const Real*>(partials) + r * ld;
    int64_t d = 0;
    for (; d + width <= params.head_dim; d += width) {
      Vec<Real> sum = load(first_part + d);
      for (int64_t i = 1; i < parts; i++) sum = sum + load(first_part + i * part_stride + d);
      store(to + d, sum * Vec<Real>::set(Real(params.scale)));
    }
    for (; d < params.head_dim; d++) {
      Real sum = first_part[d];
      for (int64_t i = 1; i < parts; i++) sum += first_part[i * part_stride + d];
      store_one(to + d, sum * Real(params.scale));
    }
  }
}

}  // namespace
}  // namespace attnjourney

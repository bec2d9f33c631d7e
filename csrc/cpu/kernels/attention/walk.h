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

// `kernel` supplies: chunk, the number of query tiles at a time; prepare(tile, head, first row, rows); load(first key,
// keys); step(tile, wanted, first key, keys, dK, dV), dK and dV of the block; query_sum(tile), [tile][key_ld].
// grad_key, grad_value: scratch of kv_len rows.
template <class T, class Kernel>
void walk_keys(const Walk& walk, Kernel& kernel, Compute<T>* grad_key, Compute<T>* grad_value) {
  using Real = Compute<T>;
  using S = TileStages<Real>;
  const AttentionParams& params = walk.params;
  const int64_t grad_key_ld = round_up(params.head_dim, S::line), grad_value_ld = round_up(params.v_head_dim, S::line);
  const int64_t per_head = S::tiles_per_head(params), all_tiles = params.group * per_head;
  const int64_t query_step = S::query_step(params), key_step = even_step(params, S::key_step(params), walk.parts);
  memset(grad_key, 0, size_t(params.kv_len * grad_key_ld) * sizeof(Real));
  memset(grad_value, 0, size_t(params.kv_len * grad_value_ld) * sizeof(Real));

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
        kernel.step(i, S::wanted(walk.gradients[head_of(i)], walk.partial_query != nullptr), k0, block,
                    grad_key + k0 * grad_key_ld, grad_value + k0 * grad_value_ld);
    }
    for (int64_t i = 0; i < n_tiles; i++) {
      const HeadGradients& gradients = walk.gradients[head_of(i)];
      const Real* const sum = kernel.query_sum(i);
      const int64_t ld = S::key_ld(params), dim = params.head_dim;
      if (walk.partial_query)
        unpack_rows<Real>(
            sum, ld, count_of(i), dim, Real(1),
            static_cast<Real*>(walk.partial_query) + (head_of(i) * params.q_len + first_of(i)) * grad_key_ld,
            grad_key_ld);
      else if (gradients.query)
        unpack_rows<T>(sum, ld, count_of(i), dim, Real(params.scale),
                       static_cast<T*>(gradients.query) + first_of(i) * gradients.query_row, gradients.query_row);
    }
  }

  const HeadGradients& gradients = walk.gradients[0];  // those of key and value are the same for all heads
  const auto store_rows = [&](const Real* sums, int64_t ld, int64_t k0, int64_t n, int64_t dim, double factor, void* to,
                              int64_t to_ld) {
    if (to) unpack_rows<T>(sums + k0 * ld, ld, n, dim, Real(factor), static_cast<T*>(to) + k0 * to_ld, to_ld);
  };
  for (int64_t k0 = 0, index = 0; k0 < params.kv_len; k0 += key_step, index++) {
    if (!owns(index, walk.part, walk.parts)) continue;
    const int64_t n = min_of(key_step, params.kv_len - k0);
    store_rows(grad_key, grad_key_ld, k0, n, params.head_dim, params.scale, gradients.key, gradients.key_row);
    store_rows(grad_value, grad_value_ld, k0, n, params.v_head_dim, params.dropout.keep_scale, gradients.value,
               gradients.value_row);
  }
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

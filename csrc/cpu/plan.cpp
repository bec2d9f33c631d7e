#include "plan.h"

#include <algorithm>
#include <numeric>

#include "cpu/kernels/attention/block_step.h"
#include "threads.h"

namespace attnjourney {
namespace {

int64_t pieces(int64_t n, int64_t of) { return (n + of - 1) / of; }

// visible pairs of each batch item; one number where they are uniform
std::vector<double> pairs_of(const AttentionCall& c, const Sequences& s) {
  if (s.uniform()) return {visible_pairs(c.params)};
  std::vector<double> pairs;
  for (int64_t b = 0; b < c.batch; b++) pairs.push_back(visible_pairs(s.params(b)));
  return pairs;
}

// Rows of one row of blocks, which see the same blocks; or a tile of several.
int64_t rows_of_blocks(int64_t size, int64_t tile, int64_t most_tiles) {
  if (size < tile) return tile / size * size;
  return size <= tile * most_tiles ? size : block_step(size, tile * most_tiles);
}

}  // namespace

DType kernel_dtype(ScalarType t) {
  switch (t) {
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    default:
      return DType::f32;
  }
}

const AttentionKernels& kernels_for(const AttentionCall& c) {
  return kernels().attention[static_cast<int>(kernel_dtype(c.dtype))];
}

const DecodeKernels& decode_kernels(ScalarType t) { return kernels().decode[static_cast<int>(kernel_dtype(t))]; }
const QuantizedKernels& quantized_kernels(ScalarType rows, ScalarType bytes) {
  const ByteDType stored = bytes == ScalarType::Char ? ByteDType::int8 : ByteDType::e4m3;
  return kernels().quantized[static_cast<int>(kernel_dtype(rows)) - 1][static_cast<int>(stored)];
}
const DecodeKernels& decode_kernels(ScalarType query, ScalarType cache) {
  return query == cache ? decode_kernels(query) : quantized_kernels(query, cache).decode;
}

ForwardPlan plan_forward(const AttentionCall& c, const Sequences& s) {
  const AttentionParams& p = c.params;
  ForwardPlan plan;
  plan.kernel = &kernels_for(c);
  plan.heads = c.q_heads;
  const int64_t tile = plan.kernel->forward_tile;
  const std::vector<double> pairs = pairs_of(c, s);
  double all_pairs = pairs[0] * static_cast<double>(c.batch);
  int64_t tiles = pieces(p.q_len, tile), all_tiles = c.batch * tiles;
  if (!s.uniform()) {
    all_pairs = std::accumulate(pairs.begin(), pairs.end(), 0.0);
    all_tiles = tiles = 0;
    for (int64_t b = 0; b < c.batch; b++) {
      all_tiles += pieces(s.q_len(b), tile);
      tiles = std::max(tiles, pieces(s.q_len(b), tile));
    }
  }
  const double flops = 2.0 * static_cast<double>(c.q_heads * (p.head_dim + p.v_head_dim)) * all_pairs;
  plan.threads = thread_count(c.q_heads * all_tiles, flops);
  // tiles of one item share converted keys and values; fewer where the threads would not be filled evenly
  int64_t per = std::max<int64_t>(1, std::min(plan.kernel->forward_tiles, tiles));
  while (per > 1 && plan.threads > 1 && c.q_heads * pieces(all_tiles, per) < 6 * plan.threads) per = (per + 1) / 2;
  plan.rows = per * tile;
  if (p.block_size) plan.rows = rows_of_blocks(p.block_size, tile, plan.kernel->forward_tiles);
  plan.blocks = pieces(p.q_len, plan.rows);
  plan.items = c.batch * c.q_heads * plan.blocks;
  if (s.uniform()) return plan;
  plan.order.resize(static_cast<size_t>(c.batch));
  std::iota(plan.order.begin(), plan.order.end(), 0);
  std::stable_sort(plan.order.begin(), plan.order.end(), [&](int64_t a, int64_t b) { return pairs[a] > pairs[b]; });
  plan.items = 0;
  for (int64_t b : plan.order) {
    plan.first_item.push_back(plan.items);
    plan.items += c.q_heads * pieces(s.q_len(b), plan.rows);
  }
  return plan;
}

// head-major: a head's keys stay in cache. Last rows first: under a causal mask they cost most.
ForwardPlan::Item ForwardPlan::at(int64_t item, const Sequences& sequences) const {
  if (order.empty()) {
    const int64_t bh = item / blocks;
    return {bh / heads, bh % heads, blocks - 1 - item % blocks};
  }
  const int64_t place = std::upper_bound(first_item.begin(), first_item.end(), item) - first_item.begin() - 1;
  const int64_t b = order[static_cast<size_t>(place)], n = pieces(sequences.q_len(b), rows);
  item -= first_item[static_cast<size_t>(place)];
  return {b, item / n, n - 1 - item % n};
}

BackwardPlan plan_backward(const AttentionCall& c, const Sequences& s, std::vector<int64_t> items) {
  const AttentionParams& p = c.params;
  BackwardPlan plan;
  plan.kernel = &kernels_for(c);
  plan.items = std::move(items);
  const int64_t n = static_cast<int64_t>(plan.items.size());
  const std::vector<double> pairs = pairs_of(c, s);
  const auto pairs_at = [&](int64_t item) { return s.uniform() ? pairs[0] : pairs[item / c.kv_heads]; };
  double total = 0, most = 0;
  for (int64_t item : plan.items) total += pairs_at(item);
  const double flops = 2.0 * static_cast<double>(p.group * (3 * p.head_dim + 2 * p.v_head_dim)) * total;
  const int64_t key_blocks = pieces(s.largest().kv_len, plan.kernel->backward_key_block);
  plan.threads = thread_count(n * key_blocks, flops);
  plan.split = 0, plan.parts = 1;
  if (n == 0 || plan.threads <= 1) return plan;
  // Whole heads fill the threads evenly; those left over, and those above a thread's share, are split by key blocks,
  // each part with a dQ of its own. The largest come first.
  if (!s.uniform())
    std::stable_sort(plan.items.begin(), plan.items.end(),
                     [&](int64_t a, int64_t b) { return pairs_at(a) > pairs_at(b); });
  plan.split = n % plan.threads;
  most = total / static_cast<double>(plan.threads) * 1.01;
  while (plan.split < n && pairs_at(plan.items[plan.split]) > most) plan.split++;
  if (plan.split) plan.parts = std::min(pieces(plan.threads, plan.split), key_blocks);
  if (plan.parts <= 1) plan.split = 0, plan.parts = 1;
  return plan;
}

}  // namespace attnjourney

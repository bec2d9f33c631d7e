#include "plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "cpu/kernels/attention/block_step.h"
#include "cpu/kernels/attention/key_parts.h"
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

// the batch items that are not left out
std::vector<int64_t> others(int64_t batch, const std::vector<int64_t>& left_out) {
  std::vector<int64_t> all(static_cast<size_t>(batch)), rest;
  std::iota(all.begin(), all.end(), 0);
  std::set_difference(all.begin(), all.end(), left_out.begin(), left_out.end(), std::back_inserter(rest));
  return rest;
}

// Rows of one row of blocks, which see the same blocks; or a tile of several.
int64_t rows_of_blocks(int64_t size, int64_t tile, int64_t most_tiles) {
  if (size < tile) return tile / size * size;
  return size <= tile * most_tiles ? size : block_step(size, tile * most_tiles);
}

struct Tier {
  int64_t heads, parts;
};

// Heads of one size over threads that they do not fill evenly: how many of them are cut into how many parts, such that
// all threads end at about one time. A tier keeps every thread busy for the time of a part; shares[parts] is that of a
// head's. One part more of a head costs it a dQ to write and to add.
std::vector<Tier> tiers(int64_t heads, int64_t threads, const std::vector<double>& shares) {
  constexpr double dq = 0.003;                                   // of a head's time
  std::vector<double> least(static_cast<size_t>(heads) + 1, 0);  // time of so many heads
  std::vector<Tier> last(least.size());
  for (int64_t n = 1; n <= heads; n++) {
    least[n] = INFINITY;
    for (int64_t parts = 1; parts < static_cast<int64_t>(shares.size()); parts++) {
      const int64_t fit = std::min(n, threads / parts);
      const double sums = parts == 1 ? 0 : dq * static_cast<double>(fit * parts) / static_cast<double>(threads);
      const double time = least[n - fit] + shares[parts] + sums;
      if (time < least[n] - 1e-9) least[n] = time, last[n] = {fit, parts};
    }
  }
  std::vector<Tier> result;
  for (int64_t n = heads; n > 0; n -= result.back().heads) result.push_back(last[n]);
  std::sort(result.begin(), result.end(), [](const Tier& a, const Tier& b) { return a.parts < b.parts; });
  return result;
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
  if (c.args.fp8) return kernels().attention_fp8[static_cast<int>(kernel_dtype(c.dtype)) - 1];
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

ForwardPlan plan_forward(const AttentionCall& c, const Sequences& s, const std::vector<int64_t>& left_out) {
  const AttentionParams& p = c.params;
  ForwardPlan plan;
  plan.kernel = &kernels_for(c);
  plan.heads = c.q_heads;
  const int64_t tile = plan.kernel->forward_tile;
  const std::vector<double> pairs = pairs_of(c, s);
  double all_pairs = s.uniform() ? pairs[0] * static_cast<double>(c.batch) : 0;
  int64_t tiles = pieces(p.q_len, tile), all_tiles = c.batch * tiles;
  if (!s.uniform()) {
    plan.order = others(c.batch, left_out);
    all_tiles = tiles = 0;
    for (int64_t b : plan.order) {
      all_pairs += pairs[static_cast<size_t>(b)];
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
  if (!s.uniform()) {
    std::stable_sort(plan.order.begin(), plan.order.end(), [&](int64_t a, int64_t b) { return pairs[a] > pairs[b]; });
    plan.items = 0;
    for (int64_t b : plan.order) {
      plan.first_item.push_back(plan.items);
      plan.items += c.q_heads * pieces(s.q_len(b), plan.rows);
    }
  }
  // The last items of a queue leave threads idle for up to an item's time: with few a thread these are cut, into single
  // tiles or, where there are too few of those, into vectors. Each one converts keys and values of 16 bits for itself.
  // Not with a mask of blocks, where the keys that are taken together are those of all rows of an item.
  const bool converts = item_size(c.dtype) == 2 || c.args.fp8;
  const int64_t few_tiles = (converts ? 8 : 33) * plan.threads, last_items = (converts ? 1 : 2) * plan.threads;
  plan.uncut = plan.items;
  plan.cut_rows = std::min(plan.rows, c.q_heads * all_tiles < few_tiles ? int64_t{16} : tile);
  if (plan.threads > 1 && !p.block_size && plan.items < 64 * plan.threads && plan.cut_rows < plan.rows) {
    plan.uncut = std::max<int64_t>(0, plan.items - last_items);
    plan.items = plan.uncut + (plan.items - plan.uncut) * pieces(plan.rows, plan.cut_rows);
  }
  return plan;
}

// head-major: a head's keys stay in cache. Last rows first: under a causal mask they cost most.
ForwardPlan::Item ForwardPlan::uncut_at(int64_t item, const Sequences& sequences) const {
  const auto rows_at = [&](int64_t batch, int64_t head, int64_t block) {
    return Item{batch, head, block * rows, std::min(rows, sequences.q_len(batch) - block * rows)};
  };
  if (order.empty()) {
    const int64_t bh = item / blocks;
    return rows_at(bh / heads, bh % heads, blocks - 1 - item % blocks);
  }
  const int64_t place = std::upper_bound(first_item.begin(), first_item.end(), item) - first_item.begin() - 1;
  const int64_t b = order[static_cast<size_t>(place)], n = pieces(sequences.q_len(b), rows);
  item -= first_item[static_cast<size_t>(place)];
  return rows_at(b, item / n, n - 1 - item % n);
}

ForwardPlan::Item ForwardPlan::at(int64_t item, const Sequences& sequences) const {
  if (item < uncut) return uncut_at(item, sequences);
  const int64_t n = pieces(rows, cut_rows), skipped = (n - 1 - (item - uncut) % n) * cut_rows;
  Item whole = uncut_at(uncut + (item - uncut) / n, sequences);
  whole.first += skipped;
  whole.rows = std::max<int64_t>(0, std::min(cut_rows, whole.rows - skipped));
  return whole;
}

BackwardPlan plan_backward(const AttentionCall& c, const Sequences& s, std::vector<int64_t> items) {
  const AttentionParams& p = c.params;
  BackwardPlan plan;
  plan.kernel = &kernels_for(c);
  const int64_t n = static_cast<int64_t>(items.size());
  const std::vector<double> pairs = pairs_of(c, s);
  const auto pairs_at = [&](int64_t item) { return s.uniform() ? pairs[0] : pairs[item / c.kv_heads]; };
  double total = 0;
  for (int64_t item : items) total += pairs_at(item);
  const double flops = 2.0 * static_cast<double>(p.group * (3 * p.head_dim + 2 * p.v_head_dim)) * total;
  const AttentionParams largest = s.largest();
  const int64_t block = plan.kernel->backward_key_block, blocks = pieces(largest.kv_len, block);
  const int64_t parts = p.block_size ? blocks : std::max(blocks, largest.kv_len / 64);  // at most, of a head
  plan.threads = thread_count(n * parts, flops);
  const int64_t most_parts = std::min(plan.threads, parts);
  std::vector<Tier> cut;  // of the last items; all before these are whole
  if (plan.threads > 1 && most_parts > 1 && s.uniform()) {
    std::vector<double> shares{0};
    const int64_t step = p.block_size ? block_step(p.block_size, block) : block;
    for (int64_t parts = 1; parts <= most_parts; parts++)
      shares.push_back(static_cast<double>(keys_of_part(p, step, parts)) / static_cast<double>(p.kv_len));
    cut = tiers(n % plan.threads, plan.threads, shares);
  } else if (plan.threads > 1 && most_parts > 1) {
    // what does not fill the threads evenly, and what is above a thread's share: the largest
    std::stable_sort(items.begin(), items.end(), [&](int64_t a, int64_t b) { return pairs_at(a) < pairs_at(b); });
    const double share = total / static_cast<double>(plan.threads) * 1.01;
    int64_t heads = n % plan.threads;
    while (heads < n && pairs_at(items[static_cast<size_t>(n - 1 - heads)]) > share) heads++;
    if (heads) cut.push_back({heads, std::min(pieces(plan.threads, heads), most_parts)});
  }
  int64_t next = n;
  for (const Tier& tier : cut) next -= tier.heads;
  for (int64_t i = 0; i < next; i++) plan.pieces.push_back({items[static_cast<size_t>(i)], 0, 1, -1});
  for (const Tier& tier : cut)
    for (const int64_t end = next + tier.heads; next < end; next++) {
      const int64_t item = items[static_cast<size_t>(next)];
      if (tier.parts == 1) {
        plan.pieces.push_back({item, 0, 1, -1});
        continue;
      }
      plan.cuts.push_back({item, tier.parts, plan.partials});
      plan.most_parts = std::max(plan.most_parts, tier.parts);
      for (int64_t part = 0; part < tier.parts; part++)
        plan.pieces.push_back({item, part, tier.parts, plan.partials++});
    }
  if (!s.uniform())
    std::stable_sort(plan.pieces.begin(), plan.pieces.end(), [&](const auto& a, const auto& b) {
      return pairs_at(a.item) * static_cast<double>(b.parts) > pairs_at(b.item) * static_cast<double>(a.parts);
    });
  return plan;
}

}  // namespace attnjourney

// CPU entry of decode: sequences, heads and chunks of keys over threads. Few query rows go through
// kernels/decode/decode.h, many (a prompt, or a large piece of one) through decode_tiled.cpp.
#include <atomic>

#include "cache_walk.h"
#include "cpu/plan.h"
#include "cpu/threads.h"
#include "decode_cpu.h"

namespace attnjourney {
namespace {

constexpr int64_t few_rows = 16;  // query rows of one sequence that count as few
constexpr int64_t row_block = decode_row_block;

// What one sequence's query rows may see, in chunks.
struct Sequence {
  DecodeParams params;
  VisibleKeys seen;
  int64_t chunks;      // at least 1: a sequence that sees nothing has one empty chunk
  int64_t first_unit;  // (key/value head, row block) of this sequence, counted over all sequences
  int64_t first_item;  // unit and chunk
};

void decode_few(const DecodeCall& c, const DecodeInputs& in, const Tensor& query, const Tensor& out,
                const Tensor& lse) {
  const DecodeKernels& kernel = kernels().decode[static_cast<int>(kernel_dtype(query.scalar_type()))];
  const CacheWalk walk(c, in);
  const int64_t* lengths = static_cast<const int64_t*>(in.lengths.const_data_ptr());
  const int64_t rows = c.group * c.q_len, row_blocks = (rows + row_block - 1) / row_block;
  const int64_t units = c.kv_heads * row_blocks;

  const std::vector<double> sinks = per_head(in.options.sinks, c.batch, c.q_heads),
                            slopes = per_head(in.options.alibi_slopes, c.batch, c.q_heads);
  const char* const mask =
      in.options.attn_mask ? static_cast<const char*>(in.options.attn_mask->const_data_ptr()) : nullptr;
  const int64_t mask_item = mask ? item_size(in.options.attn_mask->scalar_type()) : 0;

  std::vector<Sequence> all(static_cast<size_t>(c.batch));
  int64_t keys = 0;
  for (int64_t b = 0; b < c.batch; b++) {
    DecodeParams& p = all[static_cast<size_t>(b)].params;
    p.q_len = c.q_len, p.head_dim = c.head_dim, p.v_head_dim = c.v_head_dim;
    p.q_head = stride_of(query, 1), p.q_row = stride_of(query, 2), p.k_row = walk.key_row(), p.v_row = walk.value_row();
    p.scale = c.scale;
    p.modifier = c.modifier, p.alibi = !slopes.empty();
    p.mask = c.mask, p.mask_fp32 = c.mask_fp32;
    p.mask_head = c.mask_head, p.mask_row = c.mask_row, p.mask_col = c.mask_col;
    p.keys = c.keys(lengths[b]);
    Sequence& s = all[static_cast<size_t>(b)];
    s.seen = p.keys.any(0, c.q_len - 1);
    keys += s.seen.count();
  }
  // The length of a chunk follows from the call alone, not from the threads: the same bits for any number of them.
  int64_t chunk = 2048;
  while (chunk > 256 && keys * units < 64 * chunk) chunk /= 2;
  int64_t items = 0;
  for (int64_t b = 0; b < c.batch; b++) {
    Sequence& s = all[static_cast<size_t>(b)];
    s.chunks = std::max<int64_t>(1, (s.seen.count() + chunk - 1) / chunk);
    s.first_unit = b * units;
    s.first_item = items;
    items += units * s.chunks;
  }

  const DecodeParams& any = all.front().params;
  const int64_t partial = kernel.partial_size(any, std::min(rows, row_block));
  const Tensor partials = aten::empty(query, {(items * partial + 63) / bytes_of(query.scalar_type())});
  const auto aligned = [](void* p) { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); };
  char* const parts = aligned(partials.mutable_data_ptr());
  const char* const q = static_cast<const char*>(query.const_data_ptr());
  char *const o = static_cast<char*>(out.mutable_data_ptr()), *const l = static_cast<char*>(lse.mutable_data_ptr());
  const int64_t item = bytes_of(query.scalar_type()), lse_item = bytes_of(lse.scalar_type());
  std::vector<std::atomic<int64_t>> left(static_cast<size_t>(c.batch * units));  // chunks of a unit still to come
  for (const Sequence& s : all)
    for (int64_t u = 0; u < units; u++) left[static_cast<size_t>(s.first_unit + u)].store(s.chunks);

  // 200 KB of keys and values, or 1 MFLOP, are about 10 us
  const double row = static_cast<double>(c.head_dim + c.v_head_dim), pairs = static_cast<double>(keys * c.kv_heads);
  const double cost = pairs * row * std::max(5.0 * static_cast<double>(item), 2.0 * static_cast<double>(rows));
  const int64_t space = kernel.space(any, std::min(rows, row_block));
  run_queue(items, thread_count(items, cost), space, [&](int64_t i, void* scratch) {
    size_t at = 0;
    if (c.batch > 1) {  // the last sequence whose first item is not past i
      const auto after =
          std::upper_bound(all.begin(), all.end(), i, [](int64_t x, const Sequence& s) { return x < s.first_item; });
      at = static_cast<size_t>(after - all.begin()) - 1;
    }
    const Sequence& s = all[at];
    const int64_t b = static_cast<int64_t>(at), unit = (i - s.first_item) / s.chunks, n = (i - s.first_item) % s.chunks;
    const int64_t kv = unit / row_blocks, bh = b * c.q_heads + kv * c.group;
    DecodeRows r;
    r.first = unit % row_blocks * row_block;
    r.count = std::min(row_block, rows - r.first);
    r.query = q + (b * stride_of(query, 0) + kv * c.group * stride_of(query, 1)) * item;
    r.out = o + bh * c.q_len * c.v_head_dim * item;
    r.lse = l + bh * c.q_len * lse_item;
    if (mask) r.mask = mask + (b * c.mask_batch + kv * c.group * c.mask_head) * mask_item;
    if (!sinks.empty()) r.sinks = sinks.data() + bh;
    if (!slopes.empty()) r.slopes = slopes.data() + bh;
    std::vector<DecodeRun> runs;
    const int64_t from = n * chunk, to = std::min(from + chunk, s.seen.count()), prefix = s.seen.prefix;
    if (from < prefix) walk.runs(b, kv, from, std::min(to, prefix), runs);
    if (to > prefix) walk.runs(b, kv, s.seen.key(std::max(from, prefix)), s.seen.key(to - 1) + 1, runs);
    char* const mine = parts + (s.first_item + unit * s.chunks) * partial;
    kernel.chunk(s.params, r, runs.data(), static_cast<int64_t>(runs.size()),
                 mine + n * kernel.partial_size(s.params, r.count), scratch);
    // whoever finishes a unit joins its chunks, in their order
    if (left[static_cast<size_t>(s.first_unit + unit)].fetch_sub(1, std::memory_order_acq_rel) == 1)
      kernel.merge(s.params, r, mine, s.chunks);
  });
}

}  // namespace

void cpu_decode(const DecodeCall& c, const DecodeInputs& in, const Tensor& out, const Tensor& lse) {
  check_decode_values(c, in);
  if (c.batch * c.q_heads * c.q_len == 0) return;
  const Tensor query = aten::rows_contiguous(in.query);
  (c.q_len <= few_rows ? decode_few : decode_tiled)(c, in, query, out, lse);
}

}  // namespace attnjourney

// Units (a key/value head of a sequence, and a block of its rows) and chunks of keys, over threads.
#include "few_rows.h"

#include <algorithm>
#include <atomic>

#include "cpu/attention/sequences.h"
#include "cpu/plan.h"
#include "cpu/threads.h"
#include "gathered_runs.h"

namespace attnjourney {
namespace {

constexpr int64_t row_block = decode_row_block;

// What one sequence's query rows may see, in chunks.
struct Sequence {
  const DecodeParams* params;
  VisibleKeys seen;
  int64_t rows;        // of a group
  int64_t row_blocks;  // units of a key/value head
  int64_t chunks;      // at least 1: a sequence that sees nothing has one empty chunk
  int64_t first_unit;  // counted over all sequences
  int64_t first_item;  // unit and chunk
};

class Walk {
 public:
  explicit Walk(const FewRows& call) : call_(call) {
    for (const DecodeParams& p : call.sequences) {
      const int64_t rows = call.group * p.q_len;
      all_.push_back({.params = &p,
                      .seen = rows ? p.keys.any(0, p.q_len - 1) : VisibleKeys{0, 0, 0},
                      .rows = rows,
                      .row_blocks = (rows + row_block - 1) / row_block,
                      .chunks = 1,
                      .first_unit = 0,
                      .first_item = 0});
      most_rows_ = std::max(most_rows_, std::min(rows, row_block));
      keys_ += all_.back().seen.count();
      pairs_ += all_.back().seen.count() * rows;
    }
    share();
  }
  int64_t items() const { return items_; }
  int64_t units() const { return units_; }
  int64_t most_rows() const { return most_rows_; }
  int64_t keys() const { return keys_; }
  int64_t pairs() const { return pairs_; }  // of a row of the group and a key
  int64_t chunk() const { return chunk_; }
  const std::vector<Sequence>& sequences() const { return all_; }

  // the sequence of an item: the last one whose first item is not past it
  size_t sequence_of(int64_t item) const {
    if (all_.size() == 1) return 0;
    const auto after =
        std::upper_bound(all_.begin(), all_.end(), item, [](int64_t x, const Sequence& s) { return x < s.first_item; });
    return static_cast<size_t>(after - all_.begin()) - 1;
  }

 private:
  // The length of a chunk follows from the call alone, not from the threads: the same bits for any number of them.
  void share() {
    const int64_t most_blocks = std::max<int64_t>(1, most_row_blocks());
    while (chunk_ > 256 && keys_ * call_.kv_heads * most_blocks < 64 * chunk_) chunk_ /= 2;
    for (Sequence& s : all_) {
      const int64_t units = call_.kv_heads * s.row_blocks;
      s.chunks = std::max<int64_t>(1, (s.seen.count() + chunk_ - 1) / chunk_);
      s.first_unit = units_, s.first_item = items_;
      units_ += units;
      items_ += units * s.chunks;
    }
  }
  int64_t most_row_blocks() const {
    int64_t most = 0;
    for (const Sequence& s : all_) most = std::max(most, s.row_blocks);
    return most;
  }

  const FewRows& call_;
  std::vector<Sequence> all_;
  int64_t chunk_ = 2048, items_ = 0, units_ = 0, most_rows_ = 0, keys_ = 0, pairs_ = 0;
};

int64_t gathered_space(const FewRows& call, const Walk& walk) {
  if (!call.one_by_one || walk.most_rows() < rows_that_gather) return 0;
  return GatheredRuns::space(call.sequences.front(), item_size(call.cache_dtype), walk.chunk());
}

FewRowsPlan plan_of(const FewRows& call, const Walk& walk) {
  const DecodeKernels& kernel = decode_kernels(call.dtype, call.cache_dtype);
  const DecodeParams& any = call.sequences.front();
  // 200 KB of keys and values, or 1 MFLOP, are about 10 us
  const double row = static_cast<double>((any.head_dim + any.v_head_dim) * call.kv_heads);
  const double bytes = 5.0 * static_cast<double>(walk.keys() * item_size(call.cache_dtype));
  const double cost = row * std::max(bytes, 2.0 * static_cast<double>(walk.pairs()));
  const int64_t gathered = gathered_space(call, walk);
  return {.items = walk.items(),
          .threads = thread_count(walk.items(), cost),
          .chunk = walk.chunk(),
          .rows = walk.most_rows(),
          .space = gathered + std::max(kernel.space(any, walk.most_rows()), call.again_space),
          .gathered = gathered};
}

char* aligned(void* p) { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + 63) / 64 * 64); }

}  // namespace

FewRowsPlan plan_few_rows(const FewRows& call) {
  const Walk walk(call);
  if (walk.items() == 0) return {.items = 0, .threads = 1, .chunk = walk.chunk(), .rows = 0, .space = 0};
  return plan_of(call, walk);
}

void run_few_rows(const FewRows& call, const Tensor& like) {
  const DecodeKernels& kernel = decode_kernels(call.dtype, call.cache_dtype);
  const Walk walk(call);
  if (walk.items() == 0) return;
  const int64_t partial = kernel.partial_size(call.sequences.front(), walk.most_rows());
  const Tensor partials = aten::empty(like, {(walk.items() * partial + 63) / item_size(call.dtype)});
  char* const parts = aligned(partials.mutable_data_ptr());
  std::vector<std::atomic<int64_t>> left(static_cast<size_t>(walk.units()));  // chunks of a unit still to come
  for (const Sequence& s : walk.sequences())
    for (int64_t u = 0; u < call.kv_heads * s.row_blocks; u++)
      left[static_cast<size_t>(s.first_unit + u)].store(s.chunks, std::memory_order_relaxed);

  const FewRowsPlan plan = plan_of(call, walk);
  const int64_t item = item_size(call.cache_dtype);
  run_queue(plan.items, plan.threads, plan.space, [&](int64_t i, void* memory) {
    void* const scratch = static_cast<char*>(memory) + plan.gathered;
    const size_t at = walk.sequence_of(i);
    const Sequence& s = walk.sequences()[at];
    const int64_t b = static_cast<int64_t>(at), unit = (i - s.first_item) / s.chunks, n = (i - s.first_item) % s.chunks;
    const int64_t kv = unit / s.row_blocks, prefix = s.seen.prefix;
    DecodeRows r = call.rows(b, kv);
    r.first = unit % s.row_blocks * row_block;
    r.count = std::min(row_block, s.rows - r.first);
    std::vector<DecodeRun> runs;
    const int64_t from = n * walk.chunk(), to = std::min(from + walk.chunk(), s.seen.count());
    if (from < prefix) call.runs(b, kv, from, std::min(to, prefix), runs);
    if (to > prefix) call.runs(b, kv, s.seen.key(std::max(from, prefix)), s.seen.key(to - 1) + 1, runs);
    char* const mine = parts + (s.first_item + unit * s.chunks) * partial;
    DecodeParams p = *s.params;
    if (plan.gathered) GatheredRuns::gather(runs, p, item, static_cast<char*>(memory));
    kernel.chunk(p, r, runs.data(), static_cast<int64_t>(runs.size()), mine + n * kernel.partial_size(p, r.count),
                 scratch);
    // whoever finishes a unit joins its chunks, in their order
    if (left[static_cast<size_t>(s.first_unit + unit)].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    if (!kernel.merge(*s.params, r, mine, s.chunks) && call.again) call.again(b, kv, r, scratch);
  });
}

}  // namespace attnjourney

// CPU entry of the paged cache. Sequences share blocks after a reorder (beam search); a shared block is copied when one
// of its holders writes into it. An error leaves everything as it was.
#include <limits>

#include "cache_rows.h"
#include "decode_cpu.h"

namespace attnjourney {
namespace {

int64_t blocks_for(int64_t tokens, int64_t block_size) { return tokens / block_size + (tokens % block_size != 0); }

// What is changed is written at once and taken back unless it is kept: a step touches the few entries that it changes,
// not the table and the counts of a pool of any size.
class Blocks {
 public:
  explicit Blocks(const PagedTables& tables)
      : blocks_(static_cast<int32_t*>(tables.block_table.mutable_data_ptr())),
        holders_(static_cast<int32_t*>(tables.block_refs.mutable_data_ptr())),
        width_(tables.block_table.size(1)),
        count_(tables.block_refs.size(0)) {}
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  ~Blocks() {
    for (auto change = changes_.rbegin(); change != changes_.rend(); ++change) *change->first = change->second;
  }
  int64_t width() const { return width_; }
  int32_t entry(int64_t row, int64_t j) const { return blocks_[row * width_ + j]; }
  int32_t holders(int32_t block) const { return holders_[block]; }
  // the block that holds entry j of a row, which must be one in use
  int32_t held(int64_t row, int64_t j) const {
    const int32_t block = entry(row, j);
    check_value(block >= 0 && block < count_, "block_table: expected blocks from 0 to ", count_ - 1, ", got ", block,
                " at (", row, ", ", j, ")");
    check_value(holders(block) > 0, "block_refs: expected at least 1 for block ", block,
                ", which block_table holds, got ", holders(block));
    return block;
  }
  void set_entry(int64_t row, int64_t j, int32_t block) { set(blocks_ + row * width_ + j, block); }
  void hold(int32_t block) {
    check_value(holders(block) < std::numeric_limits<int32_t>::max(),
                "block_refs: expected fewer than 2^31 - 1 for block ", block,
                ", which one more sequence is to hold, got ", holders(block));
    set(holders_ + block, holders(block) + 1);
  }
  void let_go(int32_t block) { set(holders_ + block, holders(block) - 1); }
  // the lowest free one; -1 where there is none, which check_taken says
  int32_t take() {
    taken_++;
    while (next_free_ < count_ && holders_[next_free_] > 0) next_free_++;
    if (next_free_ == count_) {
      missing_++;
      return -1;
    }
    set(holders_ + next_free_, 1);
    return static_cast<int32_t>(next_free_);
  }
  void check_taken() const {
    check_value(missing_ == 0, "key: the cache overflows: expected at most ", taken_ - missing_,
                " new blocks, as many as are free of its ", count_, ", got ", taken_);
  }
  void release(int64_t row, int64_t j) {
    let_go(held(row, j));
    set_entry(row, j, -1);
  }
  void keep() { changes_.clear(); }

 private:
  void set(int32_t* at, int32_t value) {
    changes_.emplace_back(at, *at);
    *at = value;
  }
  int32_t* const blocks_;   // (batch, width_)
  int32_t* const holders_;  // (count_,)
  int64_t width_, count_, next_free_ = 0, taken_ = 0, missing_ = 0;
  std::vector<std::pair<int32_t*, int32_t>> changes_;
};

}  // namespace

void cpu_paged_append(const AppendInputs& in, const PagedTables& tables) {
  const auto& [key_cache, value_cache, lengths, key, value, counts, key_scale, value_scale] = in;
  Blocks blocks(tables);
  const int64_t batch = lengths.size(0), n = key.size(2), size = key_cache.size(2);
  int64_t* const have = static_cast<int64_t*>(lengths.mutable_data_ptr());
  const std::vector<int64_t> fresh = new_tokens(in);
  struct Copy {
    int32_t from, to;
    int64_t tokens;
  };
  std::vector<Copy> copies;
  for (int64_t b = 0; b < batch; b++) {
    const int64_t capacity = size * blocks.width(), count = fresh[static_cast<size_t>(b)];
    check_length("lengths", b, have[b], capacity, "the cache's capacity");
    check_value(have[b] + count <= capacity, "key: the cache overflows: expected at most ", capacity - have[b],
                " new tokens for batch row ", b, " (capacity ", capacity, ", length ", have[b], "), got ", count);
    for (int64_t j = 0; j < blocks_for(have[b], size); j++) blocks.held(b, j);
    if (count == 0) continue;
    if (have[b] % size != 0) {
      const int64_t j = have[b] / size;
      const int32_t shared = blocks.held(b, j);
      if (blocks.holders(shared) > 1) {
        blocks.let_go(shared);
        blocks.set_entry(b, j, blocks.take());
        copies.push_back({shared, blocks.entry(b, j), have[b] % size});
      }
    }
    for (int64_t j = blocks_for(have[b], size); j < blocks_for(have[b] + count, size); j++)
      blocks.set_entry(b, j, blocks.take());
  }
  blocks.check_taken();

  const auto write = [&](const Tensor& cache, const OptionalTensor& scale, const Tensor& tokens) {
    const TokenWriter writer(cache, scale, tokens);
    const int64_t heads = cache.size(1);
    for (const Copy& c : copies)
      for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < c.tokens; t++) writer.move(c.to, h, t, c.from, t);
    parallel_tokens(batch * heads, n * cache.size(3), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t b = i / heads, h = i % heads, count = fresh[static_cast<size_t>(b)];
        for (int64_t t = 0; t < count; t++) {
          const int64_t at = have[b] + t;
          writer.write(blocks.entry(b, at / size), h, at % size, b, n - count + t);
        }
      }
    });
  };
  write(key_cache, key_scale, key);
  if (value) write(*value_cache, value_scale, *value);
  blocks.keep();
  for (int64_t b = 0; b < batch; b++) have[b] += fresh[static_cast<size_t>(b)];
}

void cpu_paged_truncate(const PagedTables& tables, const Tensor& new_lengths, int64_t block_size) {
  const Tensor& lengths = tables.lengths;
  Blocks blocks(tables);
  const int64_t* const wanted = checked_truncation(lengths, new_lengths);
  int64_t* const have = static_cast<int64_t*>(lengths.mutable_data_ptr());
  for (int64_t b = 0; b < lengths.size(0); b++) {
    check_length("lengths", b, have[b], block_size * blocks.width(), "the cache's capacity");
    for (int64_t j = blocks_for(wanted[b], block_size); j < blocks_for(have[b], block_size); j++) blocks.release(b, j);
  }
  blocks.keep();
  std::copy(wanted, wanted + lengths.size(0), have);
}

void cpu_paged_reorder(const PagedTables& tables, const Tensor& batch_index) {
  const auto& [lengths, block_table, block_refs] = tables;
  Blocks blocks(tables);
  const int64_t* const index = checked_batch_index(batch_index, lengths);
  const int64_t batch = lengths.size(0), width = blocks.width();
  int64_t* const have = static_cast<int64_t*>(lengths.mutable_data_ptr());
  const std::vector<int64_t> before(have, have + batch);
  const int32_t* const table = static_cast<const int32_t*>(block_table.const_data_ptr());
  const std::vector<int32_t> old(table, table + batch * width);
  std::vector<int32_t> gone, come;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t j = 0; j < width; j++) {
      if (old[static_cast<size_t>(b * width + j)] >= 0) gone.push_back(blocks.held(b, j));
      const int32_t block = old[static_cast<size_t>(index[b] * width + j)];
      if (block >= 0) come.push_back(blocks.held(index[b], j));
    }
  for (int64_t b = 0; b < batch; b++)
    for (int64_t j = 0; j < width; j++) blocks.set_entry(b, j, old[static_cast<size_t>(index[b] * width + j)]);
  for (const int32_t block : come) blocks.hold(block);
  for (const int32_t block : gone) blocks.let_go(block);
  blocks.keep();
  for (int64_t b = 0; b < batch; b++) have[b] = before[static_cast<size_t>(index[b])];
}

}  // namespace attnjourney

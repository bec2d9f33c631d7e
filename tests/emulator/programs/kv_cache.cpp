// Runs the kernels of the caches in the order of their operators, as csrc/cuda/inst/cache/cache.cu launches them.
// stdin: lengths, then what the operator takes, in the order of the code; stdout: what it writes. Numbers are 16 bits.
#include "emulator/machine/driver.h"
//
#include "cuda/kernels/cache/paged.cuh"

using namespace attnjourney;

namespace {

using driver::read;
template <class T>
using Buffer = emulator::Buffer<T>;
using Number = uint16_t;
const dim3 block(kCacheThreads);

// (outer, heads, slots, dim), dense
CacheRows rows_of(const Buffer<Number>& b, int heads, int slots, int dim) {
  return {reinterpret_cast<unsigned char*>(b.data), int64_t{2} * heads * slots * dim, int64_t{2} * slots * dim,
          int64_t{2} * dim};
}

struct Operator {
  const driver::Arguments& a;
  const int batch = a["batch"], heads = a["heads"], dim = a["dim"], v_dim = a["v_dim"], tokens = a["tokens"];
  const int capacity = a["capacity"], blocks = a["blocks"], block_size = a["block_size"];
  const int max_blocks = a["max_blocks"];
  const emulator::Options how = a.options();

  template <class T>
  std::vector<T> numbers(int64_t count) const {
    return read<T>(static_cast<size_t>(count));
  }
  Buffer<int64_t> lengths{numbers<int64_t>(batch), "lengths"};
  Buffer<int> table{numbers<int>(int64_t{batch} * max_blocks), "block_table"};
  Buffer<uint32_t> refs{numbers<uint32_t>(blocks), "block_refs"};
  const int outer = blocks ? blocks : batch, slots = blocks ? block_size : capacity;
  Buffer<Number> key{numbers<Number>(int64_t{outer} * heads * slots * dim), "key_cache"};
  Buffer<Number> value{numbers<Number>(int64_t{outer} * heads * slots * v_dim), "value_cache"};
  Buffer<int64_t> counts{numbers<int64_t>(a["counts"] ? batch : 0), "counts"};
  Buffer<int64_t> wanted{numbers<int64_t>(a["wanted"] ? batch : 0), "new_lengths or batch_index"};
  Buffer<int64_t> lowest{numbers<int64_t>(a["lowest"] ? batch : 0), "lowest"};
  Buffer<Number> new_key{numbers<Number>(int64_t{batch} * heads * tokens * dim), "key"};
  Buffer<Number> new_value{numbers<Number>(int64_t{batch} * heads * tokens * v_dim), "value"};

  template <class Unit>
  CacheTensors tensors() const {
    const int size = sizeof(Unit);
    return {v_dim ? 2 : 1,
            {rows_of(key, heads, slots, dim), rows_of(value, heads, slots, v_dim)},
            {2 * dim / size, 2 * v_dim / size}};
  }
  const int64_t* given(const Buffer<int64_t>& b) const { return b.size ? b.data : nullptr; }

  template <class Unit>
  void append(const int64_t* plan) const {
    AppendTask p{};
    p.to = tensors<Unit>();
    p.fresh[0] = rows_of(new_key, heads, tokens, dim), p.fresh[1] = rows_of(new_value, heads, tokens, v_dim);
    p.lengths = lengths.data, p.counts = given(counts);
    p.batch = batch, p.heads = heads, p.tokens = tokens, p.capacity = slots, p.parts = a["parts"], p.ring = a["ring"];
    p.plan = plan, p.max_blocks = max_blocks, p.block_size = block_size, p.blocks = blocks;
    if (plan) p.table = table.data;
    emulator::launch(cache_append<Unit>, dim3(batch * p.parts), block, 0, how, p);
    if (p.parts > 1 && !plan)
      emulator::launch(cache_advance, dim3(1), block, 0, how, lengths.data, p.counts, batch, tokens);
  }

  PagedTask paged() const {
    PagedTask p{};
    p.lengths = lengths.data, p.counts = given(counts), p.new_lengths = p.index = wanted.data;
    p.table = table.data, p.refs = refs.data;
    p.batch = batch, p.heads = heads, p.tokens = tokens, p.blocks = blocks, p.block_size = block_size;
    p.max_blocks = max_blocks;
    return p;
  }
  template <class Unit>
  void paged_append() const {
    const Buffer<int64_t> plan(static_cast<size_t>(batch), "plan");
    const Buffer<int> takes(static_cast<size_t>(4 * batch), "takes"), free(static_cast<size_t>(blocks), "free");
    PagedTask p = paged();
    p.pools = tensors<Unit>(), p.plan = plan.data, p.takes = takes.data, p.free = free.data;
    emulator::launch(paged_plan, dim3(1), dim3(kPlanThreads), kPlanBytes, how, p);
    emulator::launch(paged_copy<Unit>, dim3(batch * heads), block, 0, how, p);
    append<Unit>(plan.data);
  }

  void reorder_lengths() const {
    emulator::launch(cache_reorder_lengths, dim3(1), block, batch * 8, how, lengths.data, wanted.data, batch);
  }
  template <class Unit>
  void reorder() const {
    const CacheTensors in = tensors<Unit>();
    for (int i = 0; i < in.count; i++) {
      const ReorderTask p{in.cache[i], in.units[i], lengths.data, wanted.data, batch, heads, capacity, a["width"]};
      const int pieces = (capacity * p.units + p.width - 1) / p.width;
      emulator::launch(cache_reorder<Unit>, dim3(pieces * heads), block, batch * p.width * int(sizeof(Unit)), how, p);
    }
    reorder_lengths();
  }

  template <class Unit>
  void gather() const {
    GatherTask p{};
    p.from = tensors<Unit>();
    Buffer<Number> keys(static_cast<size_t>(batch) * heads * capacity * dim, "keys");
    Buffer<Number> values(static_cast<size_t>(batch) * heads * capacity * v_dim, "values");
    Buffer<int64_t> held(static_cast<size_t>(batch), "held");
    p.to[0] = rows_of(keys, heads, capacity, dim), p.to[1] = rows_of(values, heads, capacity, v_dim);
    p.held = held.data, p.heads = heads, p.parts = a["parts"];
    DecodeTask& c = p.cache;
    c.lengths = lengths.data, c.ring = a["ring"], c.capacity = capacity;
    c.longest = c.ring ? int64_t{1} << 40 : capacity;
    if (blocks) c.table = table.data;
    c.blocks = blocks, c.block_size = block_size, c.max_blocks = max_blocks;
    c.q_len = 1, c.keys.left = a["left"] < 0 ? Ranges::unbounded : a["left"], c.keys.right = 0,
    c.keys.prefix = a["prefix"];
    emulator::launch(cache_gather<Unit>, dim3(batch * p.parts), block, 0, how, p);
    for (const auto* x : {&keys, &values}) driver::write(*x);
    driver::write(held);
  }

  template <class Unit>
  void run() const {
    switch (a["operator"]) {
      case 0:
        return append<Unit>(nullptr);
      case 1:
        emulator::launch(cache_truncate, dim3(1), block, 0, how, lengths.data, wanted.data, given(lowest), batch);
        return;
      case 2:
        return reorder<Unit>();
      case 3:
        return paged_append<Unit>();
      case 4:
        return emulator::launch(paged_truncate, dim3(batch), block, 0, how, paged());
      case 5:
        emulator::launch(paged_reorder, dim3((max_blocks + a["width"] - 1) / a["width"]), block, batch * a["width"] * 4,
                         how, paged(), a["width"]);
        return reorder_lengths();
      case 6:
        return gather<Unit>();
      default:
        throw emulator::Error("no such operator");
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const Operator op{a};
    if (a["unit"] == 16)
      op.run<uint4>();
    else
      op.run<uint16_t>();
    driver::write(op.lengths);
    driver::write(op.table);
    driver::write(op.refs);
    driver::write(op.key);
    driver::write(op.value);
  });
}

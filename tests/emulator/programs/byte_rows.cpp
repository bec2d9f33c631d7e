// Runs the kernels of caches of bytes, tokens in -DNUMBER=...: `operator` 0 appends, 1 expands, 2 dequantises. stdin:
// lengths, plan, table, key cache and its scales, what is appended; stdout: caches, scales and lengths, or what was
// expanded.
#include "emulator/machine/driver.h"
//
#include "cuda/kernels/cache/byte_rows.cuh"

using namespace attnjourney;
using T = NUMBER;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const int batch = a["batch"], heads = a["heads"], dim = a["dim"], tokens = a["tokens"], slots = a["slots"];
    const int blocks = a["blocks"], max_blocks = a["max_blocks"], outer = blocks ? blocks : batch;
    const auto kind = static_cast<ByteKind>(a["kind"]);
    const auto size = [](int64_t n) { return static_cast<size_t>(n); };
    emulator::Buffer<int64_t> lengths(driver::read<int64_t>(size(batch)), "lengths");
    emulator::Buffer<int> table(driver::read<int>(size(int64_t{batch} * max_blocks)), "block_table");
    const int64_t rows = int64_t{outer} * heads * slots;
    emulator::Buffer<unsigned char> cache(driver::read<unsigned char>(size(rows * dim)), "cache");
    emulator::Buffer<float> scale(driver::read<float>(size(rows)), "scale");
    emulator::Buffer<T> fresh(driver::read<T>(size(int64_t{batch} * heads * tokens * dim)), "tokens");
    const auto rows_of = [&](void* data, int64_t n, int64_t bytes) {  // n rows of a head
      return CacheRows{static_cast<unsigned char*>(data), heads * n * bytes, n * bytes, bytes};
    };
    const CacheRows cache_rows = rows_of(cache.data, slots, dim), scale_rows = rows_of(scale.data, slots, 4);
    const int capacity = blocks ? slots * max_blocks : slots;
    if (a["operator"] == 0) {
      AppendTask p{};
      p.to = {1, {cache_rows}, {dim}};
      p.fresh[0] = rows_of(fresh.data, tokens, int64_t{dim} * sizeof(T));
      const emulator::Buffer<int64_t> plan(std::vector<int64_t>(lengths.data, lengths.data + batch), "plan");
      p.lengths = lengths.data, p.batch = batch, p.heads = heads, p.tokens = tokens, p.capacity = slots;
      p.parts = a["parts"], p.ring = a["ring"];
      if (blocks) {
        p.plan = plan.data, p.table = table.data;
        p.max_blocks = max_blocks, p.block_size = slots, p.blocks = blocks;
      }
      emulator::launch(cache_append_bytes<T>, dim3(batch * p.parts), dim3(kCacheThreads), 0, a.options(), p,
                       AppendBytes{kind, {scale_rows}, {dim}});
      driver::write(cache);
      driver::write(scale);
      return driver::write(lengths);
    }
    emulator::Buffer<T> out(size(a["operator"] == 1 ? int64_t{batch} * heads * capacity * dim : rows * dim), "out");
    if (a["operator"] == 1) {
      emulator::Buffer<int64_t> held(size(batch), "held");
      GatherTask p{};
      p.from = {1, {cache_rows}, {dim}};
      p.to[0] = rows_of(out.data, capacity, int64_t{dim} * sizeof(T));
      p.held = held.data, p.heads = heads, p.parts = a["parts"], p.bytes = kind, p.scales[0] = scale_rows;
      DecodeTask& c = p.cache;
      c.lengths = lengths.data, c.capacity = capacity, c.longest = capacity, c.q_len = 1;
      c.ring = a["ring"];
      if (c.ring) c.longest = int64_t{1} << 40;
      c.keys.left = Ranges::unbounded, c.keys.right = 0;
      if (blocks) c.table = table.data, c.blocks = blocks, c.block_size = slots, c.max_blocks = max_blocks;
      emulator::launch(cache_expand<T>, dim3(batch * p.parts), dim3(kCacheThreads), 0, a.options(), p);
    } else {
      emulator::launch(dequantize_rows<T>, dim3(a["parts"]), dim3(kCacheThreads), 0, a.options(), kind, cache.data,
                       int64_t{dim}, scale.data, out.data, static_cast<int>(rows), dim);
    }
    driver::write(out);
  });
}

// Runs tile_kinds. stdin: lengths and options as attention_forward.cpp; stdout: the bits [entries, row tiles, words,
// 2], then, for every batch item and head, the number of its entry. tile_rows, tile_keys: of a tile, keys 64 or 128.
#include "tile_kinds_of.h"

using namespace attnjourney;

namespace {
struct Task : SequenceTask {
  int batch, q_heads;
};
void entries_of(const Task p, const TileKinds k, int64_t* out) {
  const int item = static_cast<int>(blockIdx.x) / p.q_heads, head = static_cast<int>(blockIdx.x) % p.q_heads;
  out[blockIdx.x] = (k.of(p.scores, item, head, 0) - k.bits) / (k.row_tiles * k.words);
}
}  // namespace

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    Task p{};
    p.batch = a["batch"], p.q_heads = a["q_heads"];
    const driver::Lengths lengths(p, a);
    const driver::Options<Half> options(p, a);
    const auto go = [&](const auto& found) {
      emulator::Buffer<int64_t> entries(static_cast<size_t>(p.batch) * p.q_heads, "entries");
      emulator::launch(entries_of, dim3(static_cast<unsigned>(entries.size)), dim3(1), 16, a.options(), p, found.kinds,
                       entries.data);
      driver::write(found.bits);
      driver::write(entries);
    };
    if (a["tile_keys"] == 64)
      go(driver::TileKindsOf<64>(p, p.q_heads, a["tile_rows"], a.options()));
    else
      go(driver::TileKindsOf<128>(p, p.q_heads, a["tile_rows"], a.options()));
  });
}

// Runs tile_kinds. stdin: lengths and options as forward.cpp; stdout: the bits [entries, row tiles, words, 2], then,
// for every batch item and head, the number of its entry. tile_rows, tile_keys: of a tile, keys 64 or 128.
#include "emulator/machine/driver.h"
//
#include "cuda/kernels/common/tile_kinds.cuh"

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
    TileKinds k = plan_tile_kinds(p, p.q_heads, a["tile_rows"], a["tile_keys"]);
    emulator::Buffer<uint2> bits(k.count(), "bits");
    k.bits = bits.data;
    const auto blocks = static_cast<unsigned>(k.count());
    const unsigned threads = p.scores.mask_kind == MaskElement::blocks ? 32 : kKindsThreads;
    emulator::launch(a["tile_keys"] == 64 ? tile_kinds<64> : tile_kinds<128>, dim3(blocks), dim3(threads), kKindsBytes,
                     a.options(), p, k);
    emulator::Buffer<int64_t> entries(static_cast<size_t>(p.batch) * p.q_heads, "entries");
    emulator::launch(entries_of, dim3(static_cast<unsigned>(entries.size)), dim3(1), 16, a.options(), p, k,
                     entries.data);
    driver::write(bits);
    driver::write(entries);
  });
}

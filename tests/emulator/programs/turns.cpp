// The order in which the blocks of a deterministic backward add to a tile of queries. stdin: lengths as
// attention_forward.cpp; stdout: for each block, int32: how many tiles it works on, then for each of them 1024 * its
// number among those of all heads + its turn.
#include "emulator/machine/driver.h"
//
#include "cuda/kernels/common/backward_task.cuh"

using namespace attnjourney;

namespace {
constexpr int kRows = 64, kKeys = 128;

template <bool Ranged>
void visits(const BackwardTask p, int width, int* out) {
  const BackwardTile where = p.cu_q ? BackwardTile(p, blockIdx.x, kKeys) : BackwardTile(p, blockIdx.x);
  const Sequence sequence = sequence_of<true>(p, where.batch);
  BackwardQueries<kRows, kKeys, Ranged> at(p, where, sequence);
  const int total = at.per_head() * where.heads;
  int* const own = out + int64_t(blockIdx.x) * (1 + width);
  own[0] = total;
  for (int i = 0; i < total; i++, at.next()) {
    const int tile = static_cast<int>(scratch_row(p, where.batch, at.head) / kRows) + at.tile;
    own[1 + i] = 1024 * tile + at.turn(p, where, sequence);
  }
}
}  // namespace

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    BackwardTask p{};
    p.batch = a["batch"], p.q_heads = a["q_heads"], p.kv_heads = a["kv_heads"], p.group = p.q_heads / p.kv_heads;
    const driver::Lengths lengths(p, a);
    p.tile_rows = kRows, p.tile_keys = kKeys;
    p.rows = p.cu_q ? (p.q_len / kRows + p.batch) * kRows : (p.q_len + kRows - 1) / kRows * kRows;
    p.key_tiles = p.cu_q ? p.kv_len / kKeys + p.batch : (p.kv_len + kKeys - 1) / kKeys;
    int turn = 0;
    p.turn = &turn;
    p.span = backward_span(p, 128, a["ranged"], true);
    const int width = p.rows / kRows * p.group;
    const auto blocks = static_cast<unsigned>(p.key_tiles * p.kv_heads * (p.cu_q ? 1 : p.batch));
    emulator::Buffer<int> out(std::vector<int>(size_t{blocks} * (1 + width), 0), "out");
    emulator::launch(a["ranged"] ? visits<true> : visits<false>, dim3(blocks), dim3(1), 16, a.options(), p, width,
                     out.data);
    driver::write(out);
  });
}

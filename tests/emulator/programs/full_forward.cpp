// Runs the Hopper forward with options of the Sm90FullShape -DSHAPE=..., after the pass over its mask. stdin,
// stdout: as forward_call.h.
#include "forward_call.h"
#include "tile_kinds_of.h"
//
#include "cuda/kernels/common/mask_tiles.cuh"
#include "kernels/full_forward.h"

using namespace attnjourney;
using S = SHAPE;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    driver::ForwardCall<S::T, ForwardTask> c(a);
    const driver::TileKindsOf<S::kKeys> kinds(c.p, c.p.q_heads, 64, a.options());
    c.plan(a, S::kRows);
    const Scores& s = c.p.scores;
    Sm90FullForwardMaps maps{c.maps<Sm90ForwardMaps, S::T>(S::kKeys), {}, S::kBias && tma_takes_mask(s), false};
    if (maps.mask_tiles) {
      const int64_t item = single_batch_stride(s, s.mask_batch), words = s.mask_bytes / 2;
      maps.mask_batched = item > 0;
      maps.mask = emulator::tensor_map(s.mask, {item * words, s.mask_head * words, s.mask_row * words},
                                       item ? c.p.batch : 1, s.mask_head ? c.p.q_heads : 1, s.mask_row ? c.p.q_len : 1,
                                       c.p.kv_len * words, s.mask_row ? S::kRows : 1);
    }
    emulator::launch(sm90_full_forward<S>, dim3(std::min(a["grid"], c.p.total)), dim3(S::kThreads), S::kSmemBytes,
                     a.options(), maps, c.p, kinds.kinds);
    c.finish();
  });
}

// Runs the Hopper forward with options of the Sm90FullShape -DSHAPE=..., after the pass over its mask. stdin,
// stdout: as forward_call.h.
#include "forward_call.h"
//
#include "kernels/full_forward.h"

using namespace attnjourney;
using S = SHAPE;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    driver::ForwardCall<S::T, ForwardTask> c(a);
    TileKinds kinds = plan_tile_kinds(c.p, c.p.q_heads, 64, S::kKeys);
    emulator::Buffer<uint2> bits(kinds.count(), "bits");
    if (bits.size) {
      kinds.bits = bits.data;
      const int threads = c.p.scores.mask_kind == MaskElement::blocks ? 32 : kKindsThreads;
      emulator::launch(tile_kinds<S::kKeys>, dim3(bits.size), dim3(threads), kKindsBytes, a.options(), c.p, kinds);
    }
    c.plan(a, S::kRows);
    emulator::launch(sm90_full_forward<S>, dim3(std::min(a["grid"], c.p.total)), dim3(S::kThreads), S::kSmemBytes,
                     a.options(), c.maps<Sm90ForwardMaps, S::T>(S::kKeys), c.p, kinds);
    c.finish();
  });
}

// Runs the Hopper forward with options of the Sm90FullShape -DSHAPE=..., after the pass over its mask. stdin,
// stdout: as forward_call.h.
#include "forward_call.h"
#include "tile_kinds_of.h"
//
#include "kernels/full_forward.h"

using namespace attnjourney;
using S = SHAPE;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    driver::ForwardCall<S::T, ForwardTask> c(a);
    const driver::TileKindsOf<S::kKeys> kinds(c.p, c.p.q_heads, 64, a.options());
    c.plan(a, S::kRows);
    emulator::launch(sm90_full_forward<S>, dim3(std::min(a["grid"], c.p.total)), dim3(S::kThreads), S::kSmemBytes,
                     a.options(), c.maps<Sm90ForwardMaps, S::T>(S::kKeys), c.p, kinds.kinds);
    c.finish();
  });
}

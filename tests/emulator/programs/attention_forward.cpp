// Runs one forward kernel, named by -DKERNEL=... (with SM90: a Sm90ForwardShape but for kRanged, as SHAPE(ranged)).
// stdin, stdout: as forward_call.h. -DRANGED, -DPLAIN: the kernel that looks at ranges, or does not, alone.
#include "forward_call.h"
//
#include "kernels/attention_forward.h"

using namespace attnjourney;

#ifdef SHAPE
using Call = driver::ForwardCall<SHAPE(false)::T, ForwardTask>;
template <bool Ranged>
void launch(Call& c, const driver::Arguments& a) {
  using S = SHAPE(Ranged);
  c.plan(a, S::kRows);
  const auto maps = c.maps<Sm90ForwardMaps, typename S::T>(S::kKeys / S::kCluster);
  emulator::Options how = a.options();
  how.cluster = S::kCluster;
  if (S::kCluster > 1 && (c.p.tiles * c.p.group % S::kCluster || c.p.counter))
    throw emulator::Error("no call for clusters");
  const int grid = std::min(std::max(a["grid"] / S::kCluster, 1) * S::kCluster, c.p.total);
  emulator::launch(sm90_forward<S>, dim3(grid), dim3(S::kThreads), S::kSmemBytes, how, maps, c.p);
}
#else
using Call = driver::ForwardCall<KERNEL::T, ForwardTask>;
template <bool Ranged>
void launch(Call& c, const driver::Arguments& a) {
  c.plan(a, KERNEL::kRows);
  emulator::launch(sm80_forward<KERNEL, Ranged>, dim3(c.p.total), dim3(KERNEL::kThreads), KERNEL::kSmemBytes,
                   a.options(), c.p);
}
#endif

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    Call c(a);
#ifdef PLAIN
    launch<false>(c, a);
#else
#ifndef RANGED
    if (!a["ranged"])
      launch<false>(c, a);
    else
#endif
      launch<true>(c, a);
#endif
    c.finish();
  });
}

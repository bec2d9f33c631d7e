// Runs one Sm80WideForward, named by -DKERNEL=...; stdin, stdout: as forward_call.h.
#include "forward_call.h"
//
#include "kernels/wide_forward.h"

using namespace attnjourney;
using Kernel = KERNEL;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    driver::ForwardCall<Kernel::T, ForwardTask> c(a);
    c.plan(a, Kernel::kRows);
    emulator::launch(sm80_wide_forward<Kernel>, dim3(c.p.total), dim3(Kernel::kThreads), Kernel::kSmemBytes,
                     a.options(), c.p);
    c.finish();
  });
}

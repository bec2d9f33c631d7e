// Runs one Fp32Forward, named by -DKERNEL=...; stdin, stdout: as forward_call.h.
#include "forward_call.h"
//
#include "kernels/fp32_forward.h"

using namespace attnjourney;
using Kernel = KERNEL;
using Real = Kernel::Real;

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    driver::ForwardCall<Real, ForwardTaskOf<Real>> c(a);
    c.plan(a, Kernel::kRows);
    emulator::launch(fp32_forward<Kernel>, dim3(c.p.total), dim3(Kernel::kThreads), Kernel::kSmemBytes, a.options(),
                     c.p);
    c.finish();
  });
}

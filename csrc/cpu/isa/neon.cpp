// AArch64 with Advanced SIMD.
#include "tuning_neon.h"
#include "vec_neon.h"

// what follows is compiled for these
#include "cpu/kernels/table.h"

namespace attnjourney {
constinit const KernelTable neon_kernels = make_table("neon", neon_gated, neon_sparse);
}

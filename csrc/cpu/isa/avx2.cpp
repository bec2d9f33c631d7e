#include "tuning_avx2.h"
#include "vec_avx2.h"

// what follows is compiled for these
#include "cpu/kernels/table.h"

namespace attnjourney {
constinit const KernelTable avx2_kernels = make_table("avx2", avx2_gated, avx2_sparse);
}

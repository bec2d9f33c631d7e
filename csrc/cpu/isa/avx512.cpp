#include "tuning_avx512.h"
#include "vec_avx512.h"

// what follows is compiled for these
#include "cpu/kernels/table.h"

namespace attnjourney {
constinit const KernelTable avx512_kernels = make_table("avx512", avx512_gated, avx512_sparse);
}

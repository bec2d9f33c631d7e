#include "tuning_scalar.h"
#include "vec_scalar.h"

// what follows is compiled for these
#include "cpu/kernels/table.h"

namespace attnjourney {
constinit const KernelTable scalar_kernels = make_table("scalar", scalar_gated, scalar_sparse);
}

#include "tuning_neon.h"
#include "vec_neon.h"

// what follows is compiled for these
#include "cpu/kernels/sparse/table.h"

namespace attnjourney {
constinit const SparseTable neon_sparse = make_sparse_table();
}

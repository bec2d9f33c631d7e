#include "tuning_avx2.h"
#include "vec_avx2.h"

// what follows is compiled for these
#include "cpu/kernels/sparse/table.h"

namespace attnjourney {
constinit const SparseTable avx2_sparse = make_sparse_table();
}

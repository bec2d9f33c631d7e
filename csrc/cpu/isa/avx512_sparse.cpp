#include "tuning_avx512.h"
#include "vec_avx512.h"

// what follows is compiled for these
#include "cpu/kernels/sparse/table.h"

namespace attnjourney {
constinit const SparseTable avx512_sparse = make_sparse_table();
}

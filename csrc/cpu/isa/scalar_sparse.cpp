#include "tuning_scalar.h"
#include "vec_scalar.h"

// what follows is compiled for these
#include "cpu/kernels/sparse/table.h"

namespace attnjourney {
constinit const SparseTable scalar_sparse = make_sparse_table();
}

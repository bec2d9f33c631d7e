#include "sparse.h"

namespace attnjourney {
const SparseLaunches sm80_sparse_fp64 = sparse_launches<double>;
}  // namespace attnjourney

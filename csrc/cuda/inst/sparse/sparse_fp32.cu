#include "sparse.h"

namespace attnjourney {
const SparseLaunches sm80_sparse_fp32 = sparse_launches<float>;
}  // namespace attnjourney

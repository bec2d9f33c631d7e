#include "sparse.h"

namespace attnjourney {
const SparseLaunches sm80_sparse_fp16 = sparse_launches<Half>;
}  // namespace attnjourney

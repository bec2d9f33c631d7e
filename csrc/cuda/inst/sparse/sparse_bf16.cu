#include "sparse.h"

namespace attnjourney {
const SparseLaunches sm80_sparse_bf16 = sparse_launches<Bf16>;
}  // namespace attnjourney

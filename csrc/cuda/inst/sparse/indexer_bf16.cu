#include "indexer.h"

namespace attnjourney {
const IndexerLaunches sm80_indexer_bf16 = IndexerOf<Bf16>::launches;
}  // namespace attnjourney

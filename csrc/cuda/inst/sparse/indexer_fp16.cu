#include "indexer.h"

namespace attnjourney {
const IndexerLaunches sm80_indexer_fp16 = IndexerOf<Half>::launches;
}  // namespace attnjourney

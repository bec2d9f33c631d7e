#include "indexer.h"

namespace attnjourney {
const IndexerLaunches sm80_indexer_fp32 = IndexerOf<float>::launches;
}  // namespace attnjourney

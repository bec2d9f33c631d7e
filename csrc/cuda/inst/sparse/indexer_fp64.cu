#include "indexer.h"

namespace attnjourney {
const IndexerLaunches sm80_indexer_fp64 = IndexerOf<double>::launches;
}  // namespace attnjourney

// The unit of scores: 1 / log2(e), so that a weight is 2^score; with a floating mask 1, for a mask is then added as it
// is, up to both ends of its range, and differences of scores are multiplied by log2(e).
#pragma once
#include "attention/params.h"
#include "common.h"

namespace attnjourney {
namespace {

struct ScoreUnit {
  double scores, exponents;  // what a natural score is in it; what it is in log2 units
};
template <class Params>
ATTN_INLINE ScoreUnit score_unit(const Params& params) {
  return params.mask == MaskKind::floating ? ScoreUnit{1, log2_e} : ScoreUnit{log2_e, 1};
}

}  // namespace
}  // namespace attnjourney

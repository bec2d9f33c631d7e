// Whether one row sees one key: for the rare cases that look at pairs by themselves.
#pragma once
#include "block_rows.h"
#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

// T: the dtype of query
template <class T>
ATTN_NOINLINE bool sees(const AttentionParams& params, const HeadPointers& head, int64_t row, int64_t key) {
  if (!params.keys.visible(row, key)) return false;
  const int64_t at = row * params.mask_row + key * params.mask_col;
  switch (params.mask) {
    case MaskKind::none:
      return true;
    case MaskKind::boolean:
      return static_cast<const mask_bool*>(head.mask)[at].value != 0;
    case MaskKind::floating: {
      const auto shows = [&](auto x) { return !(x == -decltype(x)(__builtin_inff())); };
      return params.mask_fp32 ? shows(static_cast<const float*>(head.mask)[at])
                              : shows(load_one(static_cast<const T*>(head.mask) + at));
    }
    case MaskKind::blocks: {
      const BlockRows& blocks = *static_cast<const BlockRows*>(head.mask);
      const int64_t row_block = row / blocks.size;
      const int32_t place = find_block(blocks, row_block, key / blocks.size);
      if (place >= blocks.offsets[row_block + 1] || blocks.index[place] != key / blocks.size) return false;
      const int64_t partial = blocks.partial[place];
      return partial < 0 ||
             blocks.elements[(partial * blocks.size + row % blocks.size) * blocks.size + key % blocks.size];
    }
  }
  return true;
}

}  // namespace
}  // namespace attnjourney

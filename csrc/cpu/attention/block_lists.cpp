#include "block_lists.h"

namespace attnjourney {
namespace {

// One head's lists: every place they lead to is there.
void check_lists(const BlockRows& b, int64_t rows, int64_t key_blocks, int64_t blocks, int64_t partial_blocks) {
  for (int64_t r = 0; r < rows; r++) {
    const int64_t begin = b.offsets[r], end = b.offsets[r + 1];
    check_value(0 <= begin && begin <= end && end <= blocks, "block_offsets: expected numbers from 0 to ", blocks,
                " that never fall, got ", begin, " and ", end, " for row of blocks ", r);
    for (int64_t i = begin; i < end; i++) {
      const int64_t least = i > begin ? b.index[i - 1] + int64_t{1} : 0;
      const bool rises = least <= b.index[i] && b.index[i] < key_blocks;
      if (!rises)
        check_value(false, "block_index: expected rising numbers below ", key_blocks, " in row of blocks ", r, ", got ",
                    b.index[i], i > begin ? text(" after ", least - 1) : "");
      check_value(b.partial[i] >= -1 && b.partial[i] < partial_blocks, "block_partial: expected numbers from -1 to ",
                  partial_blocks - 1, ", got ", b.partial[i], " at ", i);
    }
  }
}

}  // namespace

BlockLists::BlockLists(const AttentionCall& c) : call_(c) {
  const std::optional<BlockTensors>& blocks = c.args.options.blocks;
  if (!blocks) return;
  const AttentionParams& p = c.params;
  dense_ = BlockTensors{.offsets = blocks->offsets,
                        .index = aten::contiguous(blocks->index),
                        .partial = aten::contiguous(blocks->partial),
                        .elements = aten::contiguous(blocks->elements)};
  const Tensor& offsets = dense_->offsets;
  if (offsets.size(offsets.dim() - 1) > 1 && offsets.stride(offsets.dim() - 1) != 1)
    check_value(false, "block_offsets: expected the last dimension to be dense");
  const HeadWalk walk(c, c.mask_map, offsets);
  const int64_t rows = (p.q_len + p.block_size - 1) / p.block_size;
  const int64_t key_blocks = (p.kv_len + p.block_size - 1) / p.block_size;
  for (int64_t b = 0; b < c.batch; b++)
    for (int64_t h = 0; h < c.q_heads; h++) {
      BlockRows lists;
      lists.offsets = static_cast<const int32_t*>(walk.at(b, h));
      lists.index = static_cast<const int32_t*>(dense_->index.data_ptr());
      lists.partial = static_cast<const int32_t*>(dense_->partial.data_ptr());
      lists.elements = static_cast<const uint8_t*>(dense_->elements.data_ptr());
      lists.size = p.block_size;
      const bool checked = !heads_.empty() && heads_.back().offsets == lists.offsets;  // one for all heads
      if (!checked) check_lists(lists, rows, key_blocks, dense_->index.size(0), dense_->elements.size(0));
      heads_.push_back(lists);
    }
}

}  // namespace attnjourney

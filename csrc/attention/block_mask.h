// Masks of blocks: legal inputs. Which blocks there are is checked where they are read (cpu/attention/block_lists.h).
#pragma once
#include "attention.h"

namespace attnjourney {

// Derives mask, mask_row and what the params say of blocks. Throws with the tensor's name.
void check_blocks(AttentionCall& call, const BlockTensors& blocks, const Tensor& query);

}  // namespace attnjourney

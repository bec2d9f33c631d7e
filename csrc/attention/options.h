// The options of an attention call, and their one reader.
#pragma once
#include <array>
#include <optional>

#include "core/arguments.h"

namespace attnjourney {

// A mask of blocks, see attention/params.h. Leading dimensions of offsets broadcast.
struct BlockTensors {
  Tensor offsets;   // (..., heads, row blocks + 1) int32
  Tensor index;     // (blocks,) int32
  Tensor partial;   // (blocks,) int32
  Tensor elements;  // (partial blocks, size, size) bool
};

// Where a call stands that is a part of a larger one: the positions of its first row and key, and its first head among
// the larger one's `heads` (0: its own). Causality, window, ALiBi and dropout's bits count from there; prefix and
// lengths do not.
struct Origin {
  int64_t row = 0, key = 0, head = 0, heads = 0;
};

// A field added here does not compile before its reader (read_options), the checks (check_attention, check_decode) and
// the kernels of each device (HeadInputs, OptionInputs, needs_full_kernels) have named it.
struct AttentionOptions {
  OptionalTensor attn_mask;  // broadcasts to (..., heads, q_len, kv_len); bool (true = may attend) or floating (added)
  OptionalTensor cu_seqlens_q, cu_seqlens_k;  // (sequences + 1,): packed sequences; tensors (heads, total, dim)
  OptionalTensor block_table;          // (sequences, max_blocks) int32 beside them: key and value are paged caches
  std::optional<BlockTensors> blocks;  // in place of attn_mask
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale;  // default 1 / sqrt(head_dim)
  bool enable_gqa = false;
  int64_t causal_alignment = 0;               // of causal, window and ALiBi: 0 top-left, 1 bottom-right
  std::array<int64_t, 2> window = {-1, -1};   // keys p - left .. p + right of row position p; -1 unbounded
  int64_t prefix_length = 0;                  // the first keys, seen by every row
  OptionalTensor key_lengths, query_lengths;  // (batch,) int32 or int64: what lies beyond does not exist
  double softcap = 0;                         // score -> softcap * tanh(score / softcap), before any mask; 0 none
  OptionalTensor sinks, alibi_slopes;         // (heads,) or (batch, heads)
  Origin origin;
  OptionalTensor dropout_seed;  // () int64; needed when dropout_p > 0
};

// The arguments that say which pairs are seen: attn_mask, the offsets of packed sequences, these and a block_table, or
// a mask of blocks.
enum class MaskArguments { dense, packed, paged, blocks };

void read_mask(Arguments& in, MaskArguments kind, AttentionOptions& options);
// What follows: dropout_p, where it has one, and the tail of all schemas (options in schemas.cpp; paged: without what
// dropout needs). Read after all other tensors, for it may throw.
void read_options(Arguments& in, MaskArguments kind, AttentionOptions& options, bool with_dropout_p = true);
// those of attention over numbers in e4m3, in its order
void read_fp8_options(Arguments& in, AttentionOptions& options);
// those that decoding takes, in its order
void read_decode_options(Arguments& in, AttentionOptions& options);

}  // namespace attnjourney

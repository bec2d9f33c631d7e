#include "options.h"

namespace attnjourney {
namespace {

std::array<int64_t, 2> window_of(const std::vector<int64_t>& sizes, const char* expected) {
  check_value(sizes.size() == 2, "window_size: expected ", expected, ", got ", sizes.size());
  return {sizes[0], sizes[1]};
}

Origin origin_of(const std::vector<int64_t>& numbers) {
  check_value(numbers.size() == 4, "origin: expected four numbers (row, key, head, heads), got ", numbers.size());
  return {.row = numbers[0], .key = numbers[1], .head = numbers[2], .heads = numbers[3]};
}

}  // namespace

void read_mask(Arguments& in, MaskArguments kind, AttentionOptions& options) {
  switch (kind) {
    case MaskArguments::dense:
      options.attn_mask = in.optional_tensor();
      return;
    case MaskArguments::packed:
      options.cu_seqlens_q = in.tensor();
      options.cu_seqlens_k = in.tensor();
      return;
    case MaskArguments::paged:
      options.cu_seqlens_q = in.tensor();
      options.cu_seqlens_k = in.tensor();
      options.block_table = in.tensor();
      return;
    case MaskArguments::blocks:
      options.blocks =
          BlockTensors{.offsets = in.tensor(), .index = in.tensor(), .partial = in.tensor(), .elements = in.tensor()};
  }
}

void read_options(Arguments& in, MaskArguments kind, AttentionOptions& options, bool with_dropout_p) {
  auto& [attn_mask, cu_seqlens_q, cu_seqlens_k, block_table, blocks, dropout_p, is_causal, scale, enable_gqa,
         causal_alignment, window, prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes, origin,
         dropout_seed] = options;
  (void)attn_mask, (void)cu_seqlens_q, (void)cu_seqlens_k, (void)block_table, (void)blocks;  // read_mask's
  const bool paged = kind == MaskArguments::paged, packed = paged || kind == MaskArguments::packed;
  if (with_dropout_p) dropout_p = in.number();
  is_causal = in.flag();
  scale = in.optional_number();
  enable_gqa = packed || in.flag();
  causal_alignment = in.integer();
  const std::vector<int64_t> window_size = in.integers();
  prefix_length = in.integer();
  if (!packed) {
    key_lengths = in.optional_tensor();
    query_lengths = in.optional_tensor();
  }
  softcap = in.number();
  sinks = in.optional_tensor();
  alibi_slopes = in.optional_tensor();
  const std::vector<int64_t> place = paged ? std::vector<int64_t>(4) : in.integers();
  if (!paged) dropout_seed = in.optional_tensor();
  window = window_of(window_size, "two numbers (left, right)");
  origin = origin_of(place);
}

void read_fp8_options(Arguments& in, AttentionOptions& options) {
  auto& [attn_mask, cu_seqlens_q, cu_seqlens_k, block_table, blocks, dropout_p, is_causal, scale, enable_gqa,
         causal_alignment, window, prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes, origin,
         dropout_seed] = options;
  // not taken
  (void)attn_mask, (void)cu_seqlens_q, (void)cu_seqlens_k, (void)block_table, (void)blocks, (void)query_lengths;
  (void)dropout_p, (void)dropout_seed, (void)origin, (void)alibi_slopes;
  is_causal = in.flag();
  scale = in.optional_number();
  enable_gqa = in.flag();
  causal_alignment = in.integer();
  const std::vector<int64_t> window_size = in.integers();
  prefix_length = in.integer();
  key_lengths = in.optional_tensor();
  softcap = in.number();
  sinks = in.optional_tensor();
  window = window_of(window_size, "two numbers (left, right)");
}

void read_decode_options(Arguments& in, AttentionOptions& options) {
  auto& [attn_mask, cu_seqlens_q, cu_seqlens_k, block_table, blocks, dropout_p, is_causal, scale, enable_gqa,
         causal_alignment, window, prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes, origin,
         dropout_seed] = options;
  // not taken: a cache has lengths of its own, and nothing is dropped
  (void)cu_seqlens_q, (void)cu_seqlens_k, (void)block_table, (void)blocks, (void)key_lengths, (void)query_lengths;
  (void)dropout_p, (void)dropout_seed, (void)origin;
  enable_gqa = true;
  causal_alignment = 1;
  is_causal = in.flag();
  const std::vector<int64_t> window_size = in.integers();
  scale = in.optional_number();
  attn_mask = in.optional_tensor();
  prefix_length = in.integer();
  softcap = in.number();
  sinks = in.optional_tensor();
  alibi_slopes = in.optional_tensor();
  window = window_of(window_size, "two numbers");
}

}  // namespace attnjourney

// The operator `decode` over a device's kernel: to be registered with TORCH_BOX.
#pragma once
#include "decode.h"

namespace attnjourney {

template <DecodeKernel kernel>
std::tuple<Tensor, Tensor> boxed_decode(const Tensor& query, const Tensor& key, const Tensor& value,
                                        const Tensor& lengths, OptionalTensor block_table, bool ring, bool is_causal,
                                        const std::vector<int64_t>& window_size, std::optional<double> scale,
                                        OptionalTensor attn_mask, int64_t prefix_length, double softcap,
                                        OptionalTensor sinks, OptionalTensor alibi_slopes) {
  check_value(window_size.size() == 2, "window_size: expected two numbers, got ", window_size.size());
  return decode(kernel,
                {query, key, value, lengths, std::move(block_table), ring, is_causal, window_size[0], window_size[1],
                 scale, std::move(attn_mask), prefix_length, softcap, std::move(sinks), std::move(alibi_slopes)});
}

}  // namespace attnjourney
